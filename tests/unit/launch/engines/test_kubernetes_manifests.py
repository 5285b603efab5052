"""What is created on Kubernetes, as text and against the schemas of its versions."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml

from engine_submissions import asked
from imported import Later
from paceline.errors import PlanError
from paceline.launch.engines.catalog import read_engine, refusals
from paceline.launch.engines.kubernetes import Kubernetes, _exit_code
from paceline.launch.engines.kubernetes_manifests import Manifests, reader_pod, run_name

models: Any = Later("kubeflow_trainer_api.models")
VERSIONS = ("1.30", "1.33", "1.37")
ELASTIC: dict[str, Any] = {"least_hosts": 2, "plan": "replicas=16-32+batch(size=1024)"}
ONE: dict[str, Any] = {"hosts": 1, "workers": 8, "least_hosts": 1}
FULL = Kubernetes(
    image="registry/me/train:1",
    volume="runs",
    folder="/app",
    namespace="team",
    cpus=7.5,
    memory="64Gi",
    gpus=8,
    shared_memory="16Gi",
    queue="gpus",
    service_account="trainer",
    priority_class="low",
    pull_policy="IfNotPresent",
    node_selector=("pool=gpu",),
    tolerations=("gpu=yes:NoSchedule", "spot:NoExecute", "any"),
    labels=("team=vision",),
    env=("NCCL_DEBUG=INFO",),
)
HEAD = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: train-NAME-head
  labels:
    app.kubernetes.io/name: paceline
    app.kubernetes.io/instance: train-NAME
    paceline.dev/run: train-NAME
spec:
  parallelism: 1
  completions: 1
  ttlSecondsAfterFinished: 86400
  podReplacementPolicy: Failed
  backoffLimit: 20
  podFailurePolicy:
    rules:
    - action: Ignore
      onPodConditions:
      - type: DisruptionTarget
        status: 'True'
    - action: FailJob
      onExitCodes:
        containerName: paceline
        operator: In
        values:
        - 1
        - 2
  template:
    metadata:
      labels:
        app.kubernetes.io/name: paceline
        app.kubernetes.io/instance: train-NAME
        paceline.dev/run: train-NAME
        paceline.dev/role: head
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 60
      containers:
      - name: paceline
        image: my/image
        command:
        - python
        - -m
        - paceline
        - run
        - train.py
        - --hosts
        - '4'
        - --workers
        - '32'
        - --head
        - $(POD_IP):29500
        - --run-dir
        - /paceline/runs/big
        - --save-every
        - '200'
        - --plan
        - replicas=32+batch(size=1024)
        - --
        - --lr
        - '0.1'
        env:
        - name: PACELINE_TOKEN
          valueFrom:
            secretKeyRef:
              name: train-NAME
              key: token
        - name: PACELINE_ENGINE
          value: kubernetes
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        volumeMounts:
        - name: run
          mountPath: /paceline
        - name: shared-memory
          mountPath: /dev/shm
      volumes:
      - name: run
        persistentVolumeClaim:
          claimName: runs
      - name: shared-memory
        emptyDir:
          medium: Memory
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)


def documents(engine: Kubernetes, **job: Any) -> list[list[dict[str, Any]]]:
    return [list(yaml.safe_load_all(document.text)) for document in engine.render(asked(**job))]


def test_the_head_is_a_job_that_is_replaced_and_bounded() -> None:
    text = Kubernetes(image="my/image", volume="runs").render(asked())[0].text
    name = run_name(asked())
    assert HEAD.replace("train-NAME", name) in text
    assert name.startswith("train-") and len(name) == len("train-") + 8


def test_the_other_hosts_are_a_job_whose_size_may_change() -> None:
    (secret, service, head, hosts), _, _ = documents(Kubernetes(image="i", volume="runs"), **ELASTIC)
    assert [one["kind"] for one in (secret, service, head, hosts)] == ["Secret", "Service", "Job", "Job"]
    assert hosts["spec"]["parallelism"] == 3
    assert "completions" not in hosts["spec"]
    command = hosts["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--head") + 1] == f"{service['metadata']['name']}:29500"
    assert command[command.index("--hosts") + 1] == "2"
    assert service["spec"]["selector"]["paceline.dev/role"] == "head"
    assert service["spec"]["clusterIP"] == "None"


def test_one_host_is_the_head_alone() -> None:
    own, job_set, _ = documents(Kubernetes(image="i", volume="runs"), hosts=1, workers=8, least_hosts=1)
    assert [one["kind"] for one in own] == ["Secret", "Service", "Job"]
    assert [one["name"] for one in job_set[0]["spec"]["replicatedJobs"]] == ["head"]


def test_the_token_is_in_the_secret_alone() -> None:
    made = Manifests(FULL, asked())
    assert made.secret("hidden-token")["stringData"] == {"token": "hidden-token"}
    others = [made.service(), made.head_job(), made.hosts_job(), made.job_set(), made.train_job()]
    assert "hidden-token" not in str(others)


def test_what_the_settings_say_is_in_every_pod() -> None:
    made = Manifests(FULL, asked())
    for job in (made.head_job(), made.hosts_job()):
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert job["metadata"]["labels"]["team"] == "vision"
        assert job["metadata"]["namespace"] == "team"
        spec = job["spec"]["template"]["spec"]
        assert spec["serviceAccountName"] == "trainer"
        assert spec["priorityClassName"] == "low"
        assert spec["nodeSelector"] == {"pool": "gpu"}
        assert spec["tolerations"] == [
            {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
            {"key": "spot", "operator": "Exists", "effect": "NoExecute"},
            {"key": "any", "operator": "Exists"},
        ]
        (container,) = spec["containers"]
        assert container["resources"] == {
            "requests": {"cpu": "7.5", "memory": "64Gi"},
            "limits": {"nvidia.com/gpu": "8"},
        }
        assert container["workingDir"] == "/app"
        assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
        assert spec["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "job", [{}, ELASTIC, {"hosts": 1, "workers": 8, "least_hosts": 1}], ids=["fixed", "elastic", "one"]
)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("engine", [FULL, Kubernetes(image="i", volume="v")], ids=["full", "plain"])
def test_every_manifest_is_valid(engine: Kubernetes, version: str, job: dict[str, Any]) -> None:
    own, _, _ = documents(engine, **job)
    for each in own:
        kubernetes_validate.validate(each, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**own[-1], "spec": {**own[-1]["spec"], "paralellism": 3}}, version, strict=True)


@pytest.mark.thorough
@pytest.mark.parametrize("job", [{}, {"hosts": 1, "workers": 8, "least_hosts": 1}], ids=["four", "one"])
@pytest.mark.parametrize("engine", [FULL, Kubernetes(image="i", volume="v")], ids=["full", "plain"])
def test_the_job_set_and_the_train_job_have_no_field_that_their_kinds_lack(
    engine: Kubernetes, job: dict[str, Any]
) -> None:
    """By the models that Kubeflow makes of the kinds' schemas: a field that they do not know is lost on the way."""
    _, (job_set,), (train_job,) = documents(engine, **job)
    for made, model in ((job_set, models.JobsetV1alpha2JobSet), (train_job, models.TrainerV1alpha1TrainJob)):
        parsed = model.from_dict(made)
        assert parsed is not None
        known = json.loads(parsed.to_json())
        assert lost(made, known) == []
        assert lost({**made, "spec": {**made["spec"], "suspended": True}}, known) == ["/spec/suspended"]


def lost(made: Any, known: Any, path: str = "") -> list[str]:
    """The places of what has another value, or none."""
    if isinstance(made, dict) and isinstance(known, dict):
        return [place for name in made for place in lost(made[name], known.get(name), f"{path}/{name}")]
    if isinstance(made, list) and isinstance(known, list) and len(made) == len(known):
        return [place for number, one in enumerate(made) for place in lost(one, known[number], f"{path}/{number}")]
    return [] if made == known else [path]


def test_names_are_those_of_kubernetes() -> None:
    for program, start in (
        ("/x/My_Train.v2.py", "my-train-v2-"),
        ("/x/1.py", "run-1-"),
        ("/x/" + "a" * 90 + ".py", "a" * 40),
    ):
        name = run_name(asked(program=program))
        assert name.startswith(start)
        assert len(f"{name}-hosts-xxxxx") <= 63
    assert run_name(asked()) != run_name(asked(run_dir="/home/me/runs/other"))


def test_paths_in_the_pods_are_as_below_the_folder() -> None:
    made = Manifests(Kubernetes(image="i", volume="v", mount="/data"), asked(program="/opt/train.py"))
    assert made.run_dir == "/data/runs/big"
    assert "/opt/train.py" in made.head_job()["spec"]["template"]["spec"]["containers"][0]["command"]
    assert Manifests(FULL, asked(run_dir="/paceline/a/b")).run_dir == "/paceline/a/b"
    assert Manifests(FULL, asked(run_dir="/elsewhere/b")).run_dir == "/paceline/b"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kubernetes", "image is missing"),
        ("kubernetes(image=i)", "volume is missing"),
        ("kubernetes(image=i,volume=v,mount=data)", "must be an absolute path"),
        ("kubernetes(image=i,volume=v,cpus=0)", "must be more than 0"),
        ("kubernetes(image=i,volume=v,labels=team)", "must be a label with its value"),
        ("kubernetes(image=i,volume=v,port=80)", "must be at least 1024"),
    ],
)
def test_settings_that_are_none_are_refused(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_engine(text)


def test_a_token_file_is_refused() -> None:
    found = [str(one) for one in refusals(FULL, asked(token_file="t"), detach=True)]
    assert len(found) == 1
    assert "the pods get the token by a Secret" in found[0] or "pods get the token by a Secret" in found[0]


def test_an_error_of_the_program_is_the_exit_status_whatever_the_others_say() -> None:
    class Named:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    def pod(code: int) -> Any:
        state = Named(terminated=Named(exit_code=code))
        return Named(status=Named(container_statuses=[Named(state=state)]))

    assert _exit_code([pod(75), pod(1), pod(76)]) == 1
    assert _exit_code([pod(75), pod(76)]) == 76
    assert _exit_code([pod(137)]) == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pod_that_reads_an_ended_runs_volume_is_no_part_of_the_run(version: str) -> None:
    pod = reader_pod(FULL, "train-1", ["paceline", "status", "/paceline/r"], limit_s=300)
    kubernetes_validate.validate(pod, version, strict=True)
    assert not [name for name in pod["metadata"]["labels"] if name.startswith("paceline.dev/")]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["paceline", "status", "/paceline/r"]
    assert "resources" not in container and "env" not in container  # no GPU, and no token
    assert pod["spec"]["nodeSelector"] == {"pool": "gpu"}
