"""Kubernetes: the official client makes the objects of a run (`kubernetes_manifests`) and follows its pods."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from paceline import config
from paceline.errors import LaunchError, PlanError
from paceline.launch.engines.engine import Answer, Console, EngineState, Refusal, Say
from paceline.launch.engines.engine_record import EngineRecord
from paceline.launch.engines.follow import follow
from paceline.launch.engines.kubernetes_manifests import RUN_LABEL, Manifests, as_yaml, reader_pod
from paceline.launch.engines.submission import Document, Submission

__all__ = ["Kubernetes"]

EXTRA = "pip install 'paceline[kubernetes]'"
LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?=[-A-Za-z0-9_.]*")
ASK_S = 30.0  # the API server answers sooner
LOOK_S = 0.5  # between two looks for pods whose logs are to be shown
EXEC_S = 60.0  # a command beside the run
READ_S = 300.0  # a command in a pod of its own, which a cluster may have to find room for
ELSEWHERE = 2  # exit status of a command that was given at another host than the coordinator's
STOPPED = 75


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kubernetes:
    """Settings of a job for Kubernetes; None leaves the choice to the cluster.

    Example::

        engine = paceline.Kubernetes(image="registry/me/train:1", volume="runs", cpus=8, memory="64Gi", gpus=4)

    :param image: has Python with Paceline, and the script.
    :param volume: PersistentVolumeClaim that all pods mount at `mount` ("/paceline"); the run directory lies on it.
    :param folder: where the script lies in the image, and runs (the image's working directory).
    :param python: the interpreter in the image ("python").
    :param context: of the kubeconfig (the current one); `namespace` too.
    :param cpus: what each host's pod asks for; `memory` ("64Gi") and `gpus` (of `gpu_resource`) too.
    :param shared_memory: limit of each pod's /dev/shm, "16Gi" (half of the node's memory).
    :param queue: Kueue's LocalQueue, which admits the Jobs.
    :param service_account: of the pods; `priority_class` and `pull_policy` too.
    :param node_selector: labels of nodes: ("pool=gpu",); `labels` are for the objects.
    :param tolerations: as ("gpu=yes:NoSchedule", "spot:NoSchedule").
    :param env: variables of this machine that the pods get: "HF_HOME", or with a value, "NCCL_DEBUG=INFO".
    :param port: at which the hosts meet (29500).
    :param most_restarts: so many pods of a Job may fail, or save and leave, and are replaced (20).
    :param keep_s: seconds that the ended Jobs, and with them their logs, are kept (a day).
    :raises PlanError: a setting is out of range.
    """

    title: ClassVar[str] = "Kubernetes"
    may_detach: ClassVar[bool] = True
    takes_functions: ClassVar[bool] = False
    may_resize: ClassVar[bool] = True
    reads_ended: ClassVar[bool] = True
    begins_with_all: ClassVar[bool] = False

    image: str
    volume: str
    mount: str = "/paceline"
    folder: str | None = None
    python: str = "python"
    context: str | None = None
    namespace: str | None = None
    cpus: int | float | None = None
    memory: str | None = None
    gpus: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    shared_memory: str | None = None
    queue: str | None = None
    service_account: str | None = None
    priority_class: str | None = None
    pull_policy: str | None = None
    node_selector: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    port: int = 29500
    most_restarts: int = 20
    keep_s: int = 86400

    def __post_init__(self) -> None:
        config.check_fields(self)
        for name, least in (("gpus", 1), ("most_restarts", 0), ("keep_s", 0), ("port", 1024)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise PlanError(f"Kubernetes.{name} is {value}; it must be at least {least}.")
        if self.cpus is not None and self.cpus <= 0:
            raise PlanError(f"Kubernetes.cpus is {self.cpus}; it must be more than 0.")
        if not self.mount.startswith("/"):
            raise PlanError(f"Kubernetes.mount is {self.mount!r}; it must be an absolute path, such as '/paceline'.")
        for name in ("node_selector", "labels"):
            for each in getattr(self, name):
                if LABEL.fullmatch(each) is None:
                    raise PlanError(f"Kubernetes.{name} has {each!r}; each must be a label with its value: 'pool=gpu'.")

    def refusals(self, submission: Submission) -> Iterator[Refusal]:
        """Yield why Kubernetes cannot run the job."""
        if submission.job.token_file is not None:
            yield Refusal(
                says=f"token_file={submission.job.token_file!r} is a file here, and pods get the token by a Secret.",
                fix="Leave --token-file out; PACELINE_TOKEN is used if it is set.",
            )

    def render(self, submission: Submission) -> Sequence[Document]:
        """Return the manifests: what is created, and the same run for JobSet and Kubeflow's Trainer."""
        made = Manifests(self, submission)
        secret = made.secret("(a random token of at least 16 characters)")
        own = [secret, made.service(), made.head_job(), *([made.hosts_job()] if submission.job.hosts > 1 else [])]
        try:
            return (
                Document(name="manifests, for kubectl apply -f", text=as_yaml(own), language="yaml"),
                Document(name="the Jobs as a JobSet instead", text=as_yaml([made.job_set()]), language="yaml"),
                Document(name="or as a Kubeflow TrainJob", text=as_yaml([made.train_job()]), language="yaml"),
            )
        except ImportError as error:
            raise PlanError(f"Manifests are YAML, which needs {error.name}: {EXTRA}") from error

    def start(self, submission: Submission, record: EngineRecord, *, token: str, say: Say, detach: bool) -> int:
        """Create the objects; follow the run unless `detach`."""
        cluster = self._cluster()
        made = Manifests(self, submission)
        cluster.clear(made.name)
        cluster.create(made, token=token, hosts=submission.job.hosts)
        handle = {"name": made.name, "namespace": cluster.namespace, "elastic": submission.is_elastic}
        record = record.changed(handle=handle, run_dir_there=made.run_dir, folder=self.folder or "", python=self.python)
        say(f"submitted to Kubernetes as {cluster.namespace}/{made.name}; its run directory is {made.run_dir}")
        return 0 if detach else follow(self, record, say=say)

    def state(self, record: EngineRecord) -> EngineState:
        """Ask for the Jobs and their pods."""
        cluster, name = self._cluster(record), str(record.handle["name"])
        title = f"Kubernetes job {cluster.namespace}/{name}"
        jobs, pods = cluster.jobs(name), cluster.pods(name)
        live = list(filter(_is_live, pods))
        ended = [pod for pod in pods if pod.status.phase in ("Succeeded", "Failed")]
        verdicts = {each.type for job in jobs for each in job.status.conditions or () if each.status == "True"}
        if not jobs and not [pod for pod in pods if pod not in ended]:
            return EngineState(phase="ended", says=f"{title} has ended: it was stopped", exit_code=STOPPED)
        if "Failed" in verdicts and not live:
            code = _exit_code(ended)
            why = next(
                (each.message for job in jobs for each in job.status.conditions or () if each.type == "Failed"), ""
            )
            return EngineState(phase="ended", says=f"{title} has failed: {why} (exit status {code})", exit_code=code)
        if "Complete" in verdicts and not live:
            return EngineState(phase="ended", says=f"{title} is finished (exit status 0)", exit_code=0)
        if live:
            nodes = ", ".join(sorted({str(pod.spec.node_name) for pod in live}))
            return EngineState(phase="running", says=f"{title} runs {len(live)} pods on {nodes}")
        reasons = cluster.reasons(name, [pod for pod in pods if pod not in ended])
        return EngineState(phase="waiting", says=f"{title} waits" + (f": {reasons}" if reasons else ""))

    def console(self, record: EngineRecord) -> Console:
        """The pods' logs, followed."""
        return PodConsole(self._cluster(record), str(record.handle["name"]))

    def resize(self, record: EngineRecord, hosts: int) -> str:
        """Change how many pods the hosts Job has."""
        if not record.handle["elastic"]:
            raise PlanError(
                "The run has a fixed number of replicas, and cannot change its hosts. Start it with a range, for "
                "example --plan replicas=1-4."
            )
        self._cluster(record).set_parallelism(f"{record.handle['name']}-hosts", hosts - 1)
        record.changed(hosts=hosts)
        return f"asked Kubernetes for {hosts} hosts; new ones join the run as they come"

    def stop(self, record: EngineRecord) -> None:
        """Delete the Jobs: their pods get SIGTERM, save and leave, and are not replaced."""
        self._cluster(record).delete_jobs(str(record.handle["name"]))

    def at_head(self, record: EngineRecord, words: Sequence[str]) -> Answer:
        """Run a command in the coordinator's pod: in the first one that does not say that it is another. When the run
        has ended, a pod of its own reads the volume.
        """
        cluster, name = self._cluster(record), str(record.handle["name"])
        live = list(filter(_is_live, cluster.pods(name)))
        if not live and self.state(record).phase == "ended":
            return cluster.read(reader_pod(self, name, words, limit_s=READ_S))
        answer, failed = None, f"Kubernetes runs no pod of {record.run_dir} now."
        for pod in live:
            try:
                answer = cluster.execute(pod.metadata.name, words)
            except LaunchError as error:  # its node may be lost
                failed = str(error)
                continue
            if answer.exit_code != ELSEWHERE:
                return answer
        if answer is None:
            raise LaunchError(failed)
        return answer

    def _cluster(self, record: EngineRecord | None = None) -> ApiServer:
        namespace = None if record is None else str(record.handle["namespace"])
        return ApiServer(context=self.context, namespace=namespace or self.namespace)


class ApiServer:
    """The API server, for the objects of runs. What it refuses is a LaunchError with its words."""

    def __init__(self, *, context: str | None, namespace: str | None) -> None:
        try:
            kubernetes: Any = importlib.import_module("kubernetes")
        except ImportError as error:
            raise PlanError(f"--on kubernetes needs the Kubernetes client: {EXTRA}") from error
        try:
            kubernetes.config.load_kube_config(context=context)
            _, current = kubernetes.config.list_kube_config_contexts()
            in_context = (current or {}).get("context", {}).get("namespace")
        except kubernetes.config.ConfigException as error:
            try:
                kubernetes.config.load_incluster_config()
            except kubernetes.config.ConfigException:
                raise LaunchError(
                    f"There is no cluster to submit to: {error}. Set KUBECONFIG, or choose a context."
                ) from error
            in_context = None
        self.namespace = namespace or in_context or "default"
        self._client = kubernetes
        self._core, self._batch = kubernetes.client.CoreV1Api(), kubernetes.client.BatchV1Api()

    def create(self, made: Manifests, *, token: str, hosts: int) -> None:
        """Create the objects of a run; where one is refused, what was created is removed again. All belong to the head
        Job, and are removed with it."""
        try:
            with self._refused("creates the run's objects"):
                head = self._batch.create_namespaced_job(self.namespace, made.head_job(), _request_timeout=ASK_S)
                owner = {"apiVersion": "batch/v1", "kind": "Job", "name": head.metadata.name, "uid": head.metadata.uid}
                self._core.create_namespaced_secret(
                    self.namespace, _owned(made.secret(token), owner), _request_timeout=ASK_S
                )
                self._core.create_namespaced_service(
                    self.namespace, _owned(made.service(), owner), _request_timeout=ASK_S
                )
                if hosts > 1:
                    self._batch.create_namespaced_job(
                        self.namespace, _owned(made.hosts_job(), owner), _request_timeout=ASK_S
                    )
        except LaunchError:
            with contextlib.suppress(LaunchError):
                self.clear(made.name)
            raise

    def clear(self, name: str) -> None:
        """Remove what is left of an ended run of this name, and wait until its Jobs and its Secret are gone."""
        self.delete_jobs(name)
        for delete in (self._core.delete_namespaced_secret, self._core.delete_namespaced_service):
            with self._refused("removes an ended run"), self._missing():
                delete(name, self.namespace, _request_timeout=ASK_S)
        deadline = time.monotonic() + ASK_S
        while self.jobs(name):
            if time.monotonic() > deadline:
                raise LaunchError(f"The Jobs of an earlier run, {self.namespace}/{name}, do not go away.")
            time.sleep(LOOK_S)

    def delete_jobs(self, name: str) -> None:
        """Delete the Jobs; their pods are ended as they would be by an eviction."""
        for role in ("hosts", "head"):
            with self._refused("deletes the run's Jobs"), self._missing():
                self._batch.delete_namespaced_job(
                    f"{name}-{role}", self.namespace, propagation_policy="Background", _request_timeout=ASK_S
                )

    def jobs(self, name: str) -> list[Any]:
        """The Jobs of a run that are there."""
        with self._refused("reads the run's Jobs"):
            selector = f"{RUN_LABEL}={name}"
            return list(
                self._batch.list_namespaced_job(self.namespace, label_selector=selector, _request_timeout=ASK_S).items
            )

    def pods(self, name: str) -> list[Any]:
        """The pods of a run, the head's first."""
        with self._refused("reads the run's pods"):
            selector = f"{RUN_LABEL}={name}"
            found = self._core.list_namespaced_pod(
                self.namespace, label_selector=selector, _request_timeout=ASK_S
            ).items
        return sorted(found, key=lambda pod: (pod.metadata.name.startswith(f"{name}-hosts"), pod.metadata.name))

    def reasons(self, name: str, pods: Sequence[Any]) -> str:
        """Why pods do not run yet, in the cluster's words."""
        said = dict[str, None]()
        for pod in pods:
            for condition in pod.status.conditions or ():
                if condition.type == "PodScheduled" and condition.status == "False" and condition.message:
                    said[condition.message] = None
            for container in pod.status.container_statuses or ():
                waiting = container.state.waiting if container.state else None
                if waiting is not None and waiting.reason not in (None, "ContainerCreating"):
                    said[f"{waiting.reason}: {waiting.message or ''}".strip(": ")] = None
        if not pods:
            with self._refused("reads events"):
                events = self._core.list_namespaced_event(self.namespace, _request_timeout=ASK_S).items
            for event in events:
                if event.type == "Warning" and str(event.involved_object.name).startswith(f"{name}-"):
                    said[str(event.message)] = None
        return "; ".join(list(said)[:3])

    def set_parallelism(self, job: str, pods: int) -> None:
        with self._refused("changes the number of hosts"):
            body = {"spec": {"parallelism": pods}}
            self._batch.patch_namespaced_job(job, self.namespace, body, _request_timeout=ASK_S)

    def execute(self, pod: str, words: Sequence[str]) -> Answer:
        """Run a command in a pod."""
        with self._refused(f"runs a command in pod {pod}"):
            link = self._client.stream.stream(
                self._client.client.CoreV1Api().connect_get_namespaced_pod_exec,
                pod,
                self.namespace,
                command=list(words),
                stdout=True,
                stderr=True,
                stdin=False,
                tty=False,
                _preload_content=False,
                _request_timeout=ASK_S,
            )
            deadline, output, errors = time.monotonic() + EXEC_S, "", ""
            while link.is_open():
                link.update(timeout=1)
                output += link.read_stdout() if link.peek_stdout() else ""
                errors += link.read_stderr() if link.peek_stderr() else ""
                if time.monotonic() > deadline:
                    link.close()
                    raise LaunchError(f"A command in pod {pod} did not end within {EXEC_S:.0f} s.")
            return Answer(exit_code=int(link.returncode), output=output.encode(), errors=errors)

    def read(self, pod: Mapping[str, Any]) -> Answer:
        """Create a pod, wait for its end, and return what it has printed; it is removed on every path."""
        with self._refused("creates a pod that reads the run's volume"):
            made = self._core.create_namespaced_pod(self.namespace, pod, _request_timeout=ASK_S)
        name, deadline = made.metadata.name, time.monotonic() + READ_S
        try:
            while made.status.phase not in ("Succeeded", "Failed"):
                if time.monotonic() > deadline:
                    why = self.reasons(name, [made]) or f"it is {made.status.phase}"
                    raise LaunchError(f"The pod that reads the run's volume has not ended in {READ_S:.0f} s: {why}")
                time.sleep(LOOK_S)
                with self._refused("reads the run's pods"):
                    made = self._core.read_namespaced_pod(name, self.namespace, _request_timeout=ASK_S)
            with self._refused("reads the logs of pods"):
                log = self._core.read_namespaced_pod_log(
                    name, self.namespace, _preload_content=False, _request_timeout=ASK_S
                )
            if made.status.phase == "Succeeded":
                return Answer(exit_code=0, output=log.data, errors="")
            ends = [one.state.terminated for one in made.status.container_statuses or () if one.state]
            code = next((int(end.exit_code) for end in ends if end is not None), 1)
            return Answer(exit_code=code, output=b"", errors=log.data.decode(errors="replace"))
        finally:
            with contextlib.suppress(LaunchError), self._refused("removes a pod"), self._missing():
                self._core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0, _request_timeout=ASK_S)

    def log(self, pod: str) -> Iterator[bytes]:
        """The lines of a pod's log, until its container ends."""
        answer = self._core.read_namespaced_pod_log(pod, self.namespace, follow=True, _preload_content=False)
        try:
            partial = b""
            for data in answer.stream(amt=None):
                *lines, partial = (partial + data).split(b"\n")
                yield from lines
            if partial:
                yield partial
        finally:
            answer.close()

    @contextlib.contextmanager
    def _refused(self, what: str) -> Iterator[None]:
        import urllib3

        try:
            yield
        except self._client.client.ApiException as error:
            raise LaunchError(
                f"Kubernetes refuses: nobody {what} in namespace {self.namespace}: {_said(error)}"
            ) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            host = self._core.api_client.configuration.host
            raise LaunchError(f"The cluster at {host} cannot be reached: {error}") from error

    @contextlib.contextmanager
    def _missing(self) -> Iterator[None]:
        """What is not there need not be removed."""
        try:
            yield
        except self._client.client.ApiException as error:
            if error.status != 404:
                raise


class PodConsole:
    """What the pods of a run print; pods that come later are followed as well."""

    def __init__(self, cluster: ApiServer, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._lines = queue.SimpleQueue[str]()
        self._followed: dict[str, threading.Thread] = {}
        self._look_at = 0.0

    def read(self) -> str:
        """Return what is new; pods are looked for every half second."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            with contextlib.suppress(LaunchError):  # asked again soon; the state says it, too
                for pod in self._cluster.pods(self._name):
                    if pod.status.phase != "Pending" and pod.metadata.uid not in self._followed:
                        self._follow(pod.metadata.uid, pod.metadata.name)
        found = list[str]()
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._lines.get_nowait())
        return "".join(found)

    def close(self) -> None:
        """Threads that still read end with their pods, or with this process."""
        deadline = time.monotonic() + LOOK_S
        for thread in self._followed.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _follow(self, uid: str, pod: str) -> None:
        thread = threading.Thread(target=self._read, args=(pod,), name=f"log of {pod}", daemon=True)
        self._followed[uid] = thread
        thread.start()

    def _read(self, pod: str) -> None:
        shown = 0
        for _ in range(5):  # a connection may be cut; what was shown is passed over
            try:
                for number, line in enumerate(self._cluster.log(pod)):
                    if number >= shown:
                        shown += 1
                        self._lines.put(line.decode(errors="replace") + "\n")
                return
            except Exception:
                time.sleep(LOOK_S)


def _is_live(pod: Any) -> bool:
    return pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None


def _owned(body: dict[str, Any], owner: Mapping[str, Any]) -> dict[str, Any]:
    body["metadata"]["ownerReferences"] = [{**owner, "blockOwnerDeletion": False, "controller": False}]
    return body


def _exit_code(pods: Sequence[Any]) -> int:
    """How the run failed, by the pods that ended: an error of the program before everything else."""
    codes = list[int]()
    for pod in pods:
        for container in pod.status.container_statuses or ():
            if container.state and container.state.terminated:
                codes.append(int(container.state.terminated.exit_code))
    return next((code for wanted in (1, 2, 76, 75) for code in codes if code == wanted), 1)


def _said(error: Any) -> str:
    """The API server's message."""
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
