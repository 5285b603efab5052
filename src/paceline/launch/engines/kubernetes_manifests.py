"""What a run is on Kubernetes, as plain data: a Secret, a Service, and two Jobs.

The head Job has one pod, which begins as the coordinator. The hosts Job has a pod for each other host and no
`completions`: its `parallelism` may be changed, and a pod that is preempted or evicted is replaced and joins the run.
It is done when one of its pods has ended well and no other one runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from paceline import environment
from paceline.launch.engines.submission import Submission
from paceline.plan.own_programs import sent_program

if TYPE_CHECKING:
    from paceline.launch.engines.kubernetes import Kubernetes

__all__ = ["RUN_LABEL", "Manifests", "as_yaml", "reader_pod"]

RUN_LABEL, ROLE_LABEL = "paceline.dev/run", "paceline.dev/role"
CONTAINER = "paceline"
TRAINERS = "node"  # the job, and its container, of the runtime "torch-distributed"
MEMORY_MOUNT = "/dev/shm"  # the workers of a host exchange tensors there; a pod has 64 MiB unless it says more
SPARE_S = 30  # from the workers' time to save to the pod's end
LONGEST = 40  # of a name; Kubernetes allows 63 for what is made of it


class Manifests:
    """The objects of one run."""

    def __init__(self, engine: Kubernetes, submission: Submission) -> None:
        self._engine, self._submission = engine, submission
        self.name = run_name(submission)

    @property
    def run_dir(self) -> str:
        """The run directory in the pods."""
        return run_dir_there(self._engine, self._submission)

    def secret(self, token: str) -> dict[str, Any]:
        return self._object("v1", "Secret", self.name) | {"type": "Opaque", "stringData": {"token": token}}

    def service(self) -> dict[str, Any]:
        """The name by which the other hosts find the head's pod, also before it is ready."""
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: self.name, ROLE_LABEL: "head"},
            "ports": [{"name": "paceline", "port": self._engine.port}],
        }
        return self._object("v1", "Service", self.name) | {"spec": spec}

    def head_job(self) -> dict[str, Any]:
        return self._job("head", head="$(POD_IP)", spec={"parallelism": 1, "completions": 1})

    def hosts_job(self) -> dict[str, Any]:
        return self._job("hosts", head=self.name, spec={"parallelism": self._submission.job.hosts - 1})

    def job_set(self) -> dict[str, Any]:
        """The same run as a JobSet (jobset.x-k8s.io), which starts all again where a host fails."""
        head = f"{self.name}-head-0-0.{self.name}"
        jobs = [{"name": "head", "replicas": 1, "template": {"spec": self._job_spec("head", "$(POD_IP)", 1)}}]
        if (others := self._submission.job.hosts - 1) > 0:
            jobs.append({"name": "hosts", "replicas": 1, "template": {"spec": self._job_spec("hosts", head, others)}})
        spec = {
            "failurePolicy": {"maxRestarts": self._engine.most_restarts},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["head"]},
            "replicatedJobs": jobs,
        }
        return self._object("jobset.x-k8s.io/v1alpha2", "JobSet", self.name) | {"spec": spec}

    def train_job(self) -> dict[str, Any]:
        """The same run as a TrainJob of Kubeflow's Trainer (2.3), by its runtime for torch, whose pods get the volume
        by a patch."""
        pod = self._template("node", "$(PET_MASTER_ADDR)")["spec"]
        (container,) = pod.pop("containers")
        for name in ("restartPolicy", "priorityClassName"):  # a patch has none
            pod.pop(name, None)
        folder = ["env", f"--chdir={container['workingDir']}"] if "workingDir" in container else []
        trainer = {
            "image": self._engine.image,
            "numNodes": self._submission.job.hosts,
            "command": [*folder, *container["command"]],
            "env": [entry for entry in container["env"] if entry["name"] != "POD_IP"],
        }
        if "resources" in container:
            trainer["resourcesPerNode"] = container["resources"]
        pod["containers"] = [{"name": TRAINERS, "volumeMounts": container["volumeMounts"]}]
        job = {"name": TRAINERS, "template": {"spec": {"template": {"spec": pod}}}}
        patch = {"manager": "paceline", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, "runtimePatches": [patch]}
        return self._object("trainer.kubeflow.org/v1alpha1", "TrainJob", self.name) | {"spec": spec}

    def _job(self, role: str, *, head: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        labels = {"kueue.x-k8s.io/queue-name": self._engine.queue} if self._engine.queue else {}
        about = self._object("batch/v1", "Job", f"{self.name}-{role}", labels=labels)
        more = {"ttlSecondsAfterFinished": self._engine.keep_s, "podReplacementPolicy": "Failed"}
        return about | {"spec": {**spec, **more, **self._failures(), "template": self._template(role, head)}}

    def _job_spec(self, role: str, head: str, pods: int) -> dict[str, Any]:
        """A Job's part of a JobSet."""
        counts = {"parallelism": pods, "completions": pods, "completionMode": "Indexed"}
        return {**counts, "backoffLimit": 0, "template": self._template(role, head)}

    def _failures(self) -> dict[str, Any]:
        """Evicted pods are replaced; 1 and 2 would fail again; 75, 76 and lost nodes count up to the limit."""
        rules = [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [1, 2]},
            },
        ]
        return {"backoffLimit": self._engine.most_restarts, "podFailurePolicy": {"rules": rules}}

    def _template(self, role: str, head: str) -> dict[str, Any]:
        engine = self._engine
        memory: dict[str, Any] = {"medium": "Memory"}
        if engine.shared_memory:
            memory["sizeLimit"] = engine.shared_memory
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(self._submission.job.grace_s) + SPARE_S,
            "containers": [self._container(head)],
            "volumes": [
                {"name": "run", "persistentVolumeClaim": {"claimName": engine.volume}},
                {"name": "shared-memory", "emptyDir": memory},
            ],
            **_placing(engine),
        }
        return {"metadata": {"labels": {**self._labels(), ROLE_LABEL: role}}, "spec": spec}

    def _container(self, head: str) -> dict[str, Any]:
        engine = self._engine
        resources: dict[str, dict[str, str]] = {}
        for resource, amount in (("cpu", engine.cpus), ("memory", engine.memory)):
            if amount is not None:
                resources.setdefault("requests", {})[resource] = str(amount)
        if engine.gpus is not None:
            resources["limits"] = {engine.gpu_resource: str(engine.gpus)}
        env: list[dict[str, Any]] = [
            {"name": "PACELINE_TOKEN", "valueFrom": {"secretKeyRef": {"name": self.name, "key": "token"}}},
            {"name": environment.ENGINE, "value": "kubernetes"},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": name, "value": value} for name, value in environment.for_hosts(engine.env).items()),
        ]
        command = self._submission.host_command(
            python=engine.python,
            head=f"{head}:{engine.port}",
            run_dir=self.run_dir,
            program=program_there(engine, self._submission),
        )
        container: dict[str, Any] = {"name": CONTAINER, "image": engine.image, "command": command, "env": env}
        if engine.folder:
            container["workingDir"] = engine.folder
        if engine.pull_policy:
            container["imagePullPolicy"] = engine.pull_policy
        if resources:
            container["resources"] = resources
        container["volumeMounts"] = [
            {"name": "run", "mountPath": engine.mount},
            {"name": "shared-memory", "mountPath": MEMORY_MOUNT},
        ]
        return container

    def _object(self, version: str, kind: str, name: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name, "labels": {**self._labels(), **(labels or {})}}
        if self._engine.namespace:
            metadata["namespace"] = self._engine.namespace
        return {"apiVersion": version, "kind": kind, "metadata": metadata}

    def _labels(self) -> dict[str, str]:
        own = {"app.kubernetes.io/name": "paceline", "app.kubernetes.io/instance": self.name, RUN_LABEL: self.name}
        return {**own, **dict(_pair(each) for each in self._engine.labels)}


def reader_pod(engine: Kubernetes, name: str, words: Sequence[str], *, limit_s: float) -> dict[str, Any]:
    """A pod for one command on the volume of an ended run, ended by the cluster after `limit_s`. It has none of the
    run's own labels."""
    container: dict[str, Any] = {"name": CONTAINER, "image": engine.image, "command": list(words)}
    if engine.folder:
        container["workingDir"] = engine.folder
    if engine.pull_policy:
        container["imagePullPolicy"] = engine.pull_policy
    container["volumeMounts"] = [{"name": "run", "mountPath": engine.mount}]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": int(limit_s),
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "run", "persistentVolumeClaim": {"claimName": engine.volume}}],
        **_placing(engine),
    }
    own = {"app.kubernetes.io/name": "paceline", "app.kubernetes.io/instance": f"{name}-reader"}
    labels = {**own, **dict(_pair(each) for each in engine.labels)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": f"{name}-reader-", "labels": labels},
        "spec": spec,
    }


def run_name(submission: Submission) -> str:
    """The objects' name: the script's, and a mark of the run directory, so that one directory has one run."""
    stem = re.sub(r"[^a-z0-9]+", "-", submission.name.lower()).strip("-")[:LONGEST].rstrip("-") or "run"
    mark = hashlib.sha256(str(submission.run_dir).encode()).hexdigest()[:8]
    return f"{stem if stem[0].isalpha() else f'run-{stem}'}-{mark}"


def run_dir_there(engine: Kubernetes, submission: Submission) -> str:
    """The run directory on the volume: at the same place below its mount as here below the folder."""
    run_dir = submission.run_dir
    if run_dir.is_relative_to(engine.mount):
        return str(run_dir)
    inner = run_dir.relative_to(submission.folder) if run_dir.is_relative_to(submission.folder) else run_dir.name
    return str(PurePosixPath(engine.mount) / inner)


def program_there(engine: Kubernetes, submission: Submission) -> str:
    """The script in the image: at the same place below the container's folder as here below the one where the command
    was given; a script elsewhere keeps its path, and Paceline's own are named by their place in the package."""
    from pathlib import Path

    sent = sent_program(submission.job.program)
    if sent != submission.job.program:
        return sent
    program = Path(submission.job.program)
    return str(program.relative_to(submission.folder)) if program.is_relative_to(submission.folder) else str(program)


def as_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return manifests as YAML, as kubectl takes them."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes no anchors: nothing is shared by reference."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    return "---\n".join(yaml.dump(dict(one), Dumper=Dumper, sort_keys=False, width=110) for one in objects)


def _placing(engine: Kubernetes) -> dict[str, Any]:
    """Where a pod may run, and by which account, as far as the user has said it."""
    said = {
        "serviceAccountName": engine.service_account,
        "priorityClassName": engine.priority_class,
        "nodeSelector": dict(_pair(each) for each in engine.node_selector),
        "tolerations": [_toleration(each) for each in engine.tolerations],
    }
    return {name: value for name, value in said.items() if value}


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _toleration(text: str) -> dict[str, str]:
    """ "key=value:NoSchedule", "key:NoSchedule" or "key" as a toleration."""
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    found = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return {**found, "effect": effect} if effect else found
