"""What predicts a run: of which cluster, by a process that never outlasts it, and which receipts the next one sees."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from paceline.errors import PlanError
from paceline.events import MicroBatchHalved, Record, Regrouped, WorkerJoined, WorkerLost, WorkerStarted
from paceline.monitor.records.steps import Step
from paceline.plan import CommandPlan, Job, Plan
from paceline.planner.receipt import read_receipts
from paceline.planner.run_receipt import PredictedStep, RunPrediction, RunReceipt
from paceline.processes import process_started_s, this_host
from paceline.runs import run_conditions, run_predictor
from paceline.runs.run_conditions import RunConditions
from paceline.runs.run_predictor import RunPredictor

LAB = """
[devices.small]
memory_gb = 8.0
memory_gb_s = 20.0
tflops = { bf16 = 0.1 }
best_matmul = { bf16 = 0.8 }
attention = { flash = 0.1, vendor = 0.1 }
units = 1
watts = 20
link_gb_s = 4.0
network_gb_s = 1.0
source = "made up"

[clusters.lab]
device = "small"
hosts = 1
devices_per_host = 2
network_gb_s = 1.25
source = "made up"
"""
PLAN = "replicas=2+batch(size=16,micro=8)"
PREDICTED = PredictedStep(
    model="m",
    plan=PLAN,
    micro=8,
    workers=2,
    step_s=0.012,
    low_s=0.009,
    high_s=0.015,
    parts={"products": 0.01},
    bytes=0.3e9,
    estimated_s=0.012,
    estimated_parts={"products": 0.01},
    estimated_bytes=0.3e9,
    corrected_by=0,
    corrected_of="",
    is_cpu=True,
)
FACTS = {
    "steps": 40,
    "state": "finished",
    "duration_s": 60.0,
    "attempt": 1,
    "plan": PLAN,
    "workers": 2,
    "peak_memory_bytes": 310_000_000,
    "devices": ["cpu"],
}
WRITES = """
import json, os, sys
asked = json.loads(sys.argv[1])
path = os.path.join(asked["run_dir"], "prediction.json")
made = json.load(open(path))
made["problem"] = json.dumps([asked["plan"]["whole"]["batch"]["size"], asked["workers"], sys.argv[2:]])
made["problem"] += os.environ["OMP_NUM_THREADS"] + str(os.getpgrp() == os.getpid())
open(path + "x", "w").write(json.dumps(made))
os.replace(path + "x", path)
"""
SLEEPS = "import time; time.sleep(600)"
FORKS = """
import json, os, sys, time
asked = json.loads(sys.argv[1])
child = os.fork()
if child:
    open(os.path.join(asked["run_dir"], "child"), "w").write(str(child))
time.sleep(0 if child else 600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import paceline\npaceline.run(print, cluster='own.toml')\n")
    (tmp_path / "plain.py").write_text("import paceline\npaceline.run(print)\n")
    (tmp_path / "run").mkdir()
    return tmp_path


def made_for(folder: Path, job: Job, *, script: str | None = "plain.py", drills: bool = False) -> RunPredictor:
    path = None if script is None else folder / script
    return run_predictor.run_predictor(job, CommandPlan(), script=path, args=(), drills=drills)


def cluster_of(predictor: RunPredictor, folder: Path) -> tuple[str, str] | None:
    """The cluster, and why nothing is predicted of it; nothing is started."""
    with mock.patch.object(RunPredictor, "_start", return_value=None):
        predictor.begin(folder / "run", 1)
    found = RunPrediction.read(folder / "run" / "prediction.json")
    return None if found is None else (found.cluster, found.problem)


def test_the_commands_cluster_counts_before_the_scripts_and_that_before_the_folders(folder: Path) -> None:
    for name in ("own", "asked", "cluster"):
        (folder / f"{name}.toml").write_text(LAB)
    found = cluster_of(made_for(folder, Job(workers=2, cluster="asked.toml"), script="train.py"), folder)
    assert found == ("asked.toml", "it is being made")
    found = cluster_of(made_for(folder, Job(workers=2), script="train.py"), folder)
    assert found is not None and found[0] == "own.toml"
    found = cluster_of(made_for(folder, Job(workers=2)), folder)
    assert found is not None and found[0] == "cluster.toml"


@pytest.mark.parametrize(
    ("job", "drills"),
    [(Job(cluster="off"), False), (Job(launcher="inline"), False), (Job(workers=2), True)],
)
def test_nothing_is_predicted_where_that_is_not_wanted(folder: Path, job: Job, drills: bool) -> None:
    (folder / "cluster.toml").write_text(LAB)
    assert cluster_of(made_for(folder, job, drills=drills), folder) is None


def test_without_a_cluster_nothing_is_written(folder: Path) -> None:
    predictor = made_for(folder, Job(workers=2))
    assert cluster_of(predictor, folder) is None
    assert predictor.rows(FACTS) == []
    assert list((folder / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ("nowhere.toml", "cluster='nowhere.toml': Cannot read"),
        ("h100", "cluster='h100': No cluster is called 'h100'"),
        ("lab.toml", "too few for 3 workers"),
    ],
)
def test_a_cluster_that_was_asked_for_has_to_be_there(folder: Path, cluster: str, says: str) -> None:
    (folder / "lab.toml").write_text(LAB)
    with pytest.raises(PlanError, match=says):
        made_for(folder, Job(workers=3, cluster=cluster))


@pytest.mark.parametrize(
    ("job", "script", "says"),
    [
        (Job(workers=3), "plain.py", "too few for 3 workers"),  # the file that is here by chance
        (Job(workers=2), None, "the run has no script"),
        (Job(workers=2, hosts=2, head="a:1", cluster="first-host.toml"), "plain.py", "Cannot read first-host.toml"),
    ],
)
def test_what_nobody_asked_for_only_says_why_there_is_nothing(
    folder: Path, job: Job, script: str | None, says: str
) -> None:
    (folder / "cluster.toml").write_text(LAB)
    found = cluster_of(made_for(folder, job, script=script), folder)
    assert found is not None and says in found[1]


def test_a_cluster_without_a_name_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Job\.cluster is ' '; it must be a cluster's name"):
        Job(cluster=" ")


@pytest.fixture
def predictor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], RunPredictor]]:
    """One whose process does something else; it looks at it each time."""
    monkeypatch.setattr(run_predictor, "LOOK_S", 0.0)
    made: list[RunPredictor] = []

    def make(code: str) -> RunPredictor:
        monkeypatch.setattr(run_predictor, "BOOTSTRAP", code)
        plan = CommandPlan(whole=Plan.parse(PLAN))
        made.append(RunPredictor("lab", script=Path("train.py"), args=("--lr", "1"), plan=plan, workers=2))
        made[-1].begin(folder / "run", 1)
        return made[-1]

    yield make
    for one in made:
        one.close()


def problem(folder: Path) -> str:
    made = RunPrediction.read(folder / "run" / "prediction.json")
    assert made is not None
    return made.problem


def until(holds: Callable[[], object], *, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pid_of(one: RunPredictor) -> int:
    process = one._process  # pyright: ignore[reportPrivateUsage]
    assert process is not None
    return process.pid


def ended(one: RunPredictor) -> bool:
    one.poll()
    return one._process is None  # pyright: ignore[reportPrivateUsage]


def test_the_process_is_told_what_the_run_is(folder: Path, predictor: Callable[[str], RunPredictor]) -> None:
    one = predictor(WRITES)
    until(lambda: ended(one))
    assert problem(folder) == '[16, 2, ["train.py", "--lr", "1"]]1True'


def test_a_process_that_says_nothing_leaves_a_reason(folder: Path, predictor: Callable[[str], RunPredictor]) -> None:
    one = predictor("import sys; sys.exit(3)")
    until(lambda: ended(one))
    assert problem(folder) == "the process that makes it ended with exit status 3"
    killed = predictor(SLEEPS)
    os.kill(pid_of(killed), signal.SIGTERM)
    until(lambda: ended(killed))
    assert problem(folder) == "the process that makes it was ended by signal 15"


def test_a_process_that_takes_too_long_is_ended(
    folder: Path, predictor: Callable[[str], RunPredictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = predictor(SLEEPS)
    pid = pid_of(one)
    monkeypatch.setattr(run_predictor, "LIMIT_S", 0.0)
    until(lambda: ended(one))
    assert problem(folder) == "it took more than 0 s"
    assert process_started_s(pid) is None


def test_the_process_ends_with_the_run_on_every_path(folder: Path, predictor: Callable[[str], RunPredictor]) -> None:
    one = predictor(SLEEPS)
    pid = pid_of(one)
    with pytest.raises(KeyboardInterrupt), one:
        raise KeyboardInterrupt
    assert process_started_s(pid) is None
    assert problem(folder) == "the run ended before it was made"


def test_a_prediction_that_is_written_counts_also_while_its_process_ends(
    folder: Path, predictor: Callable[[str], RunPredictor]
) -> None:
    RunPrediction(cluster="lab", attempt=1, predicted=PREDICTED).write(folder / "made.json")
    with predictor(f"import os; os.replace({str(folder / 'made.json')!r}, 'run/prediction.json'); {SLEEPS}"):
        until(lambda: problem(folder) == "")
    made = RunPrediction.read(folder / "run" / "prediction.json")
    assert made is not None and made.predicted == PREDICTED


def test_what_the_script_has_started_ends_with_it(folder: Path, predictor: Callable[[str], RunPredictor]) -> None:
    one = predictor(FORKS)
    until(lambda: ended(one))
    child = int((folder / "run" / "child").read_text())
    until(lambda: process_started_s(child) is None)


def test_a_prediction_is_shown_once_it_is_there(folder: Path, predictor: Callable[[str], RunPredictor]) -> None:
    RunPrediction(cluster="lab", attempt=1, predicted=PREDICTED).write(folder / "made.json")
    one = predictor(f"import os; os.replace({str(folder / 'made.json')!r}, 'run/prediction.json')")
    said: list[str] = []
    until(lambda: said.append(one.poll()) or any(said))
    assert said[-1] == f"predicted on lab: {PREDICTED.text}"
    assert one.poll() == ""


def begun(folder: Path, *, steps: int = 40, catalogue: bool = False, made: float = 0.0, **fields: Any) -> RunPredictor:
    """A predictor of a run whose prediction is there, as are so many of its steps."""
    predictor = RunPredictor("lab", problem="not begun")
    predictor.begin(folder / "run", 1)
    receipts = None if catalogue else str(folder / "lab.receipts.jsonl")
    RunPrediction(cluster="lab", attempt=1, receipts=receipts, predicted=PREDICTED, made=made).write(
        folder / "run" / "prediction.json"
    )
    seconds = {"data": 0.0, "compute": 0.018, "communication": 0.002, "optimizer": 0.001, "total": 0.021}
    with open(folder / "run" / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "attempt": 1, "time": 1.7e9 + step, "seconds": seconds, **fields}
            file.write(json.dumps(row) + "\n")
    return predictor


def test_a_receipt_is_written_kept_and_told(folder: Path) -> None:
    ((name, text),) = begun(folder).rows(FACTS)
    assert name == "receipt"
    assert text == (
        "a step took 21.0 ms, predicted 12.0 ms (+75 %); memory 0.31 GB, predicted 0.3 GB (+3 %): paceline report run"
    )
    made = RunReceipt.read(folder / "run" / "receipt.json")
    assert made is not None and made.kept == str(folder / "lab.receipts.jsonl")
    assert made.steps == 38
    assert read_receipts(folder / "lab.receipts.jsonl") == [made.receipt]
    assert made.receipt.measured_bytes == 310_000_000


@pytest.mark.parametrize(
    ("facts", "run", "says"),
    [
        ({"state": "failed"}, {}, "the run has failed"),
        ({"devices": ["cuda:0"]}, {}, "the run was on cuda:0, which is not the cluster's device"),
        ({}, {"steps": 21}, "fewer than 20 were measured"),
        ({}, {"made": 1.7e9 + 37}, "its steps shared the machine with the process that predicted them"),
        ({}, {"made": 1.7e9 + 20}, "fewer than 20 were measured"),
        ({}, {"catalogue": True}, "lab is of the catalogue"),
    ],
)
def test_what_must_not_teach_the_next_prediction_is_not_kept(
    folder: Path, facts: dict[str, Any], run: dict[str, Any], says: str
) -> None:
    assert len(begun(folder, **run).rows({**FACTS, **facts})) == 1
    made = RunReceipt.read(folder / "run" / "receipt.json")
    assert made is not None and made.kept is None
    assert says in made.not_kept
    assert not (folder / "lab.receipts.jsonl").exists()


def test_a_run_that_was_held_up_most_of_the_time_is_not_kept(folder: Path) -> None:
    predictor = begun(folder, steps=60, skipped=True)
    with open(folder / "run" / "metrics.jsonl", "a") as file:
        for step in range(61, 90):
            seconds = {"compute": 0.02, "total": 0.02}
            file.write(json.dumps({"step": step, "attempt": 1, "time": 1.7e9, "seconds": seconds}) + "\n")
    assert len(predictor.rows(FACTS)) == 1
    made = RunReceipt.read(folder / "run" / "receipt.json")
    assert made is not None
    assert made.not_kept == "60 of 89 steps were skipped, or held up by workers that came or went"


@pytest.mark.parametrize(
    "facts", [{"plan": "shard=2"}, {"workers": 3}, {"steps": 4}, {"attempt": 2}], ids=lambda one: next(iter(one))
)
def test_another_run_than_the_predicted_one_has_no_receipt(folder: Path, facts: dict[str, Any]) -> None:
    assert begun(folder).rows({**FACTS, **facts}) == []
    assert not (folder / "run" / "receipt.json").exists()


def test_where_receipts_cannot_be_written_the_run_has_its_own(folder: Path) -> None:
    (folder / "lab.receipts.jsonl").mkdir()
    assert len(begun(folder).rows(FACTS)) == 1
    made = RunReceipt.read(folder / "run" / "receipt.json")
    assert made is not None and "cannot be written (Is a directory)" in made.not_kept


def test_who_asked_for_a_cluster_is_told_why_there_is_no_receipt(folder: Path) -> None:
    predictor = RunPredictor("lab", problem="no stepper", tells=True)
    predictor.begin(folder / "run", 1)
    assert predictor.rows(FACTS) == [("receipt", "none: no stepper")]


def test_a_second_start_makes_the_receipt_anew(folder: Path) -> None:
    begun(folder).rows(FACTS)
    RunPredictor("lab", problem="not begun").begin(folder / "run", 2)
    assert not (folder / "run" / "receipt.json").exists()
    made = RunPrediction.read(folder / "run" / "prediction.json")
    assert made is not None and (made.attempt, made.problem) == (2, "not begun")


def step(number: int) -> Step:
    return Step(
        step=number,
        epoch=0,
        time=1.0,
        num_samples=8,
        loss=None,
        metrics={},
        samples_per_s=None,
        seconds={},
        skipped=False,
        num_bytes_sent=0,
        workers=(0, 1),
    )


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (WorkerLost(rank=1, host="a", step=3, reason="killed"), "worker 1 was lost"),
        (
            MicroBatchHalved(step=3, workers=[1], message="out of memory", before=8, after=4),
            "micro-batches were halved in step 3",
        ),
        (WorkerJoined(rank=2, pid=1, step=3, after_s=0.1), "worker 2 was taken in"),
        (
            Regrouped(causes=[], members=[0], step=3, detected_s=0.1, regrouped_s=0.1, steps_lost=0, holds=False),
            "1 of 2 workers went on",
        ),
    ],
)
def test_steps_of_other_workers_are_noticed(folder: Path, event: Any, says: str) -> None:
    predictor = begun(folder)
    predictor.conditions(2).accept(Record(1.0, None, event))
    assert len(predictor.rows(FACTS)) == 1
    made = RunReceipt.read(folder / "run" / "receipt.json")
    assert made is not None and made.not_kept == f"not all steps were alike: {says}"


def test_how_long_workers_had_no_core_is_measured_from_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = {11: 5.0, 12: 7.0}
    clock = [100.0]
    monkeypatch.setattr(run_conditions, "run_delay_s", delays.get)
    monkeypatch.setattr(run_conditions, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    conditions = RunConditions(2)
    for worker, pid in enumerate((11, 12, 13)):
        about: dict[str, Any] = {"workers": 2, "device": "cpu", "startup_s": 1.0, "plan": PLAN}
        host = this_host() if pid < 13 else "elsewhere"
        started = WorkerStarted(rank=worker, host=host, pid=pid, resumed_from_step=0, **about)
        conditions.accept(Record(1.0, worker, started))
    conditions.poll()
    assert conditions.core_wait is None
    conditions.accept(step(1))
    clock[0] += 10.0
    delays |= {11: 8.0, 12: 12.0}
    conditions.accept(step(2))
    conditions.poll()
    assert conditions.core_wait == pytest.approx(0.4)
    delays.clear()
    clock[0] += 10.0
    conditions.poll()
    assert conditions.core_wait == pytest.approx(0.4), "workers that have ended say no more"
