"""Experiment trackers get each step of a run once, and can neither slow the run nor end it."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline import Job
from paceline.errors import PlanError
from paceline.events import Evaluated, Event, Record, RunStarted, WorkerStarted
from paceline.monitor.export import logger_feed, process_logger
from paceline.monitor.export.logger_feed import LoggerFeed
from paceline.monitor.export.run_logger import LoggedRun, ScalarPoint, arguments_by_name
from paceline.monitor.export.tracker_process import point_from, point_to
from paceline.monitor.records.steps import Step
from paceline.runs.run_loggers import RunLoggers, check_trackers
from wandb_files import offline_run

PLAN = "replicas=2+batch(size=8,micro=4)"


class Kept:
    """A tracker that keeps what it is given; it `has` steps already."""

    def __init__(self, has: int | None = None) -> None:
        self.has = has
        self.runs: list[LoggedRun] = []
        self.points: list[ScalarPoint] = []
        self.states: list[str] = []

    def start(self, run: LoggedRun) -> int | None:
        self.runs.append(run)
        return self.has

    def log(self, points: Sequence[ScalarPoint]) -> None:
        self.points += points

    def end(self, state: str) -> None:
        self.states.append(state)


def step(number: int, **fields: Any) -> Step:
    values: dict[str, Any] = {
        "step": number, "epoch": 0, "time": 100.0 + number, "num_samples": 8, "loss": 1 / number,
        "metrics": {"lr": 0.5, "grad_norm": 2.0}, "samples_per_s": 4.0, "seconds": {"compute": 1.0, "total": 2.0},
        "skipped": False, "num_bytes_sent": 10, "workers": (0, 1),
    }  # fmt: skip
    return Step(**{**values, **fields})


def said(event: Event, *, when: float = 100.0) -> Record:
    return Record(when, 0, event)


def started(worker: int = 0) -> Record:
    return said(
        WorkerStarted(
            rank=worker, workers=2, host="a", pid=1, device="cpu", startup_s=1.0, plan=PLAN, resumed_from_step=0
        )
    )


def attempt(loggers: RunLoggers, run_dir: Path, number: int, items: Sequence[Step | Record]) -> None:
    for sink in loggers.sinks(run_dir, number):
        opening = RunStarted(run_dir=str(run_dir), attempt=number, workers=2, hosts=1, program="t.py", launcher="local")
        for item in (said(opening), started(0), started(1), *items):
            sink.accept(item)
        sink.close()


def steps_of(points: Sequence[ScalarPoint], name: str = "loss") -> list[int]:
    return [point.step for point in points if name in point.values]


def run_of(tmp_path: Path, **fields: Any) -> LoggedRun:
    return LoggedRun(name="r", run_dir=str(tmp_path), **fields)


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger_feed, "EVERY_S", 0.01)
        yield


def test_a_tracker_gets_the_run_and_all_its_numbers_and_steps_that_come_again_only_once(tmp_path: Path) -> None:
    own, warned = Kept(has=2), list[str]()
    loggers = RunLoggers(Job(workers=2), [own], arguments=["data.txt", "--lr", "0.1", "--fast"])
    evaluated = said(Evaluated(step=4, num_samples=5, metrics={"accuracy": 0.75}, duration_s=0.1), when=105.0)
    attempt(loggers, tmp_path / "run", 1, [*map(step, range(1, 5)), evaluated, step(5)])
    attempt(loggers, tmp_path / "run", 2, [*map(step, range(4, 8)), step(6), step(8)])  # a rollback takes 6 again
    loggers.end("finished", warned.append)
    (run,) = own.runs
    assert (run.name, run.program, run.hosts, run.plan, run.attempt) == ("run", "t.py", ("a",), PLAN, 1)
    wanted = {"plan.batch.size": 8, "plan.layout.replicas": 2, "arg.0": "data.txt", "arg.lr": "0.1", "arg.fast": "true"}
    assert wanted.items() <= run.parameters.items()
    assert steps_of(own.points) == [3, 4, 5, 6, 7, 8], "the tracker had two, and the rest comes once"
    (held_out,) = [point for point in own.points if "eval/accuracy" in point.values]
    assert (held_out.step, held_out.values["eval/accuracy"]) == (4, 0.75)
    whole = {"lr", "grad_norm", "samples_per_second", "seconds/total", "seconds/compute", "progress/epoch"}
    assert whole <= own.points[0].values.keys()
    assert (own.states, warned) == (["finished"], [])


def test_a_tracker_gets_the_parameters_of_a_sweeps_trial_however_the_script_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_PARAMETERS", '{"lr": 0.1, "width": 16}')
    own = Kept()
    loggers = RunLoggers(Job(workers=2), [own], arguments=["--lr", "0.1", "--fast"])
    attempt(loggers, tmp_path, 1, [step(1)])
    loggers.end("finished", print)
    (run,) = own.runs
    assert run.arguments == {"lr": "0.1", "fast": "true", "width": "16"}


def test_steps_of_replicas_in_any_order_all_come(tmp_path: Path) -> None:
    own = Kept()
    loggers = RunLoggers(Job(workers=2), [own])
    attempt(loggers, tmp_path, 1, [step(1), step(3), step(2), step(5), step(4)])
    loggers.end("stopped", print)
    assert (steps_of(own.points), own.states) == ([1, 3, 2, 5, 4], ["stopped"])


def test_a_run_that_fails_before_its_first_step_is_logged_as_failed(tmp_path: Path) -> None:
    own = Kept()
    loggers = RunLoggers(Job(workers=2), [own])
    attempt(loggers, tmp_path, 1, [])
    loggers.end("failed", print)
    assert (len(own.runs), own.points, own.states) == (1, [], ["failed"])


@pytest.mark.parametrize("broken", ["start", "log", "end"])
def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on(tmp_path: Path, broken: str) -> None:
    class Broken(Kept):
        num_calls = 0

    def fail(*_: object) -> None:
        Broken.num_calls += 1
        raise ConnectionError("no route to the tracker")

    setattr(Broken, broken, fail)
    own, warned = Kept(), list[str]()
    loggers = RunLoggers(Job(workers=2), [Broken(), own])
    attempt(loggers, tmp_path, 1, list(map(step, range(1, 50))))
    attempt(loggers, tmp_path, 2, list(map(step, range(50, 60))))
    loggers.end("finished", warned.append)
    loggers.poll(warned.append)
    assert warned == [
        "nothing more is logged to Broken: no route to the tracker. The run goes on; metrics.jsonl has every step."
    ]
    assert Broken.num_calls == 1
    assert steps_of(own.points) == list(range(1, 60))


def test_a_tracker_that_hangs_holds_up_nothing_and_its_end_has_a_limit(tmp_path: Path) -> None:
    release = threading.Event()

    class Hanging(Kept):
        def log(self, points: Sequence[ScalarPoint]) -> None:
            release.wait(30)

    feed = LoggerFeed("Hanging", Hanging())
    try:
        feed.begin(run_of(tmp_path))
        for first in range(0, 3 * logger_feed.MOST_WAITING, 100):
            feed.add([ScalarPoint(step=first + k, time=0.0, values={"loss": 1.0}) for k in range(100)])
        (slow,) = feed.warnings()
        assert slow.startswith("Hanging is too slow: 20,000 points wait for it, and more are left out.")
        feed.end("finished", limit_s=0.05)
        (late,) = feed.warnings()
        assert "it has not taken the last points within 0 s" in late
    finally:
        release.set()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--lr 0.1 --seed=3", {"lr": "0.1", "seed": "3"}),
        ("--shift -0.5 --deep a.txt", {"shift": "-0.5", "deep": "a.txt"}),
        ("in.txt --fast -v -n 3 out", {"0": "in.txt", "fast": "true", "v": "true", "n": "3", "1": "out"}),
        ("--x -.5 -", {"x": "-.5", "0": "-"}),
        ("", {}),
    ],
)
def test_arguments_of_a_script_are_parameters_by_name(words: str, found: dict[str, str]) -> None:
    assert arguments_by_name(words.split()) == found


def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"--log mlflow needs the package mlflow.*pip install 'paceline\[mlflow\]'"):
        check_trackers(Job(log=("mlflow",)))
    check_trackers(Job())


def test_an_unknown_tracker_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="log"):
        Job(log=("wandbb",))  # pyright: ignore[reportArgumentType]


@pytest.mark.further
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own use of SQLAlchemy
def test_wandb_offline_and_mlflow_have_each_step_of_a_resumed_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real packages: an offline run of W&B and a SQLite store of MLflow, in their processes."""
    store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    warned: list[str] = []
    job = Job(workers=2, log=("wandb", "mlflow"))
    evaluated = said(Evaluated(step=4, num_samples=5, metrics={"accuracy": 0.75}, duration_s=0.1), when=105.0)
    for number, items, state in (
        (1, [step(1), step(2), step(3, loss=math.nan), evaluated, step(4), step(5)], "failed"),
        (2, [*map(step, range(4, 8))], "finished"),
    ):
        loggers = RunLoggers(job, arguments=["--lr", "0.1"])  # as a new command makes them
        attempt(loggers, tmp_path / "digits", number, items)
        loggers.end(state, warned.append)
    assert warned == []

    parts = [offline_run(path) for path in sorted((tmp_path / "digits/loggers/wandb").glob("offline-run-*/*.wandb"))]
    (config, first, failed), (again, second, finished) = parts
    assert [row["_step"] for row in (*first, *second)] == [1, 2, 3, 4, 5, 6, 7]
    assert first[3]["eval/accuracy"] == 0.75 and first[3]["loss"] == 0.25 and first[3]["grad_norm"] == 2.0
    assert (config["_id"], config["_name"]) == (again["_id"], "digits")
    assert (config["plan.batch.size"], config["arg.lr"], config["hosts"]) == (8, "0.1", "a")
    assert (failed, finished) == (1, 0)

    from mlflow import MlflowClient

    client = MlflowClient(store)
    (experiment,) = [one for one in client.search_experiments() if one.name == "paceline"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("digits", "FINISHED")
    assert (run.data.params["plan.batch.size"], run.data.params["arg.lr"]) == ("8", "0.1")
    history = {name: client.get_metric_history(run.info.run_id, name) for name in ("loss", "lr", "eval/accuracy")}
    assert sorted(point.step for point in history["loss"]) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(point.step for point in history["lr"]) == [1, 2, 3, 4, 5, 6, 7]
    assert [(point.step, point.value) for point in history["eval/accuracy"]] == [(4, 0.75)]


@pytest.mark.thorough
def test_a_tracker_whose_process_does_not_answer_is_ended_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes connections and says nothing: MLflow would wait for it for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(process_logger, "START_S", 2.0)
        warned: list[str] = []
        loggers = RunLoggers(Job(workers=2, log=("mlflow",)))
        attempt(loggers, tmp_path, 1, [step(1)])
        loggers.end("finished", warned.append)
    assert warned == [
        "nothing more is logged to mlflow: no answer for 2 s. The run goes on; metrics.jsonl has every step."
    ]


def test_points_keep_their_values_on_the_way_to_the_process() -> None:
    point = ScalarPoint(step=3, time=1.5, values={"loss": math.inf, "x": 2.0})
    assert dataclasses.asdict(point_from(point_to(point))) == dataclasses.asdict(point)
