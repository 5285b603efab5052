"""Runs of another framework's program in report, status and TensorBoard: tasks and times, and no steps."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from paceline.events import (
    Event,
    EventLog,
    Record,
    Restarted,
    TaskLost,
    TaskReady,
    TaskScalars,
    TaskStarted,
    TaskUsage,
    WorkerFailed,
    WorkerFinished,
    WorkerStarted,
)
from paceline.monitor.console.closing_table import closing_table
from paceline.monitor.console.event_lines import event_line, ready_line
from paceline.monitor.export.metrics_jsonl import MetricsFile
from paceline.monitor.export.scalars import ScalarPoints
from paceline.monitor.export.summary_json import Summary
from paceline.monitor.records.event_reader import decode_event
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.report.attempt_log import AttemptLog
from paceline.monitor.report.goodput import goodput_ledger
from paceline.monitor.report.report import incident_text
from paceline.monitor.status import status as status_module
from paceline.monitor.status.status import main_status, status
from paceline.plan import Job
from paceline.ui.metrics_index import FollowedMetrics
from paceline.ui.run_summary import summary_of


def started(rank: int, *, startup_s: float = 1.0, pid: int = 10) -> WorkerStarted:
    return WorkerStarted(
        rank=rank, workers=2, host="east", pid=pid + rank, device="cpu", startup_s=startup_s, plan="",
        resumed_from_step=0,
    )  # fmt: skip


def log(records: Sequence[tuple[float, int | None, Event]], *, number: int = 1, state: str = "finished") -> AttemptLog:
    times = [when for when, _, _ in records]
    return AttemptLog(
        attempt=number, workers=2, began=min(times) - 1.0, ended=max(times), state=state,
        exit_code=0 if state == "finished" else 1, last_step=0,
        records=[Record(when, worker, event) for when, worker, event in records], steps=lambda _: (),
    )  # fmt: skip


def at_work(rank: int, began: float, ready: float) -> list[tuple[float, int | None, Event]]:
    task = TaskStarted(rank=rank, name=f"worker {rank}", pid=10 + rank)
    return [
        (began, rank, started(rank)),
        (began, rank, task),
        (ready, rank, TaskReady(rank=rank, name=f"worker {rank}")),
    ]


def finished(rank: int, when: float) -> tuple[float, int | None, Event]:
    return when, rank, WorkerFinished(rank=rank, step=0, peak_memory_bytes=1 << 20)


def test_a_programs_time_counts_from_when_it_is_ready_and_no_step_is_asked_for() -> None:
    records = [*at_work(0, 101.0, 111.0), *at_work(1, 101.0, 111.0), finished(0, 151.0), finished(1, 151.0)]
    ledger = goodput_ledger([log(sorted(records, key=lambda one: one[0]))])
    assert ledger.duration_s == pytest.approx(51.0)
    assert ledger.worker_s["program"] == pytest.approx(80.0) and ledger.worker_s["start_up"] == pytest.approx(22.0)
    assert ledger.goodput == pytest.approx(40.0 / 51.0)


def test_after_a_loss_of_all_the_start_of_the_next_attempt_is_the_incidents_cost() -> None:
    failed = WorkerFailed(rank=1, host="east", step=0, reason="worker 1 was killed", follows=False)
    first = [*at_work(0, 101.0, 105.0), *at_work(1, 101.0, 105.0), (125.0, None, failed)]
    again = Restarted(
        causes=["worker 1 (pid 11) killed by signal 9"], lost=[1], workers=2, at_step=0, step=0, source="program",
        lost_at=125.0,
    )  # fmt: skip
    second = [(126.0, None, again), *at_work(0, 127.0, 135.0), *at_work(1, 127.0, 135.0)]
    second += [finished(0, 145.0), finished(1, 145.0)]
    logs = [
        log(sorted(first, key=lambda one: one[0]), state="failed"),
        log(sorted(second, key=lambda one: one[0]), number=2),
    ]
    logs[1] = dataclasses.replace(logs[1], began=125.0)
    ledger = goodput_ledger(logs)
    assert ledger.worker_s["program"] == pytest.approx(2 * 20.0 + 2 * 10.0)
    assert ledger.worker_s["recovery"] == pytest.approx(2 * 10.0)  # from the loss until TensorFlow was imported again
    (incident,) = ledger.incidents
    assert incident_text(incident) == (
        "attempt 1 ended: worker 1 (pid 11) killed by signal 9; attempt 2 began, and the program went on from what it "
        "had saved"
    )
    assert incident.costs["recovery"] == pytest.approx(20.0)


def test_a_task_that_was_lost_alone_costs_its_own_time_until_it_is_back() -> None:
    lost = TaskLost(rank=1, name="worker 1", pid=11, reason="worker 1 (pid 11) killed by signal 9")
    back = TaskStarted(rank=1, name="worker 1", pid=21, restarts=1)
    records = [*at_work(0, 101.0, 105.0), *at_work(1, 101.0, 105.0)]
    records += [(120.0, 1, lost), (120.5, 1, back), (128.0, 1, TaskReady(rank=1, name="worker 1"))]
    records += [finished(0, 140.0), finished(1, 140.0)]
    ledger = goodput_ledger([log(sorted(records, key=lambda one: one[0]))])
    assert ledger.workers[0]["program"] == pytest.approx(35.0) and ledger.workers[0]["recovery"] == 0.0
    assert ledger.workers[1]["program"] == pytest.approx(15.0 + 12.0)
    assert ledger.workers[1]["recovery"] == pytest.approx(8.0)
    (incident,) = ledger.incidents
    assert incident_text(incident).endswith("killed by signal 9; back after 8.00 s, the others went on meanwhile")
    assert event_line(lost) == "worker 1 (pid 11) killed by signal 9: it is started again, and the others go on"
    assert event_line(back) == "worker 1 (pid 21) was started again"


def test_the_closing_table_names_no_step() -> None:
    summary = Summary(Path("run"), attempt=1, workers=2)
    for when, worker, event in [*at_work(0, 101.0, 105.0), *at_work(1, 101.0, 105.0), finished(0, 110.0)]:
        summary.accept(Record(when, worker, event))
    summary.accept(Record(107.0, 1, TaskLost(rank=1, name="worker 1", pid=11, reason="it was killed")))
    table = closing_table(summary.facts("finished", 0))
    assert table.startswith("finished, after") and "step" not in table and "samples" not in table
    assert "1 task lost, started again while the others went on" in table
    assert ready_line([started(0), started(1)], tasks="chief, 1 worker, 1 server") == (
        "chief, 1 worker, 1 server on cpu, started in 1.00 s"
    )


def test_status_names_tasks_by_their_roles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = dataclasses.asdict(Job(program="train.py", run_for="tensorflow", workers=3, servers=1))
    record = RunRecord.begin_attempt(tmp_path / "run", job=job, workers=3)
    for rank, name in enumerate(("chief", "worker 0", "server 0")):
        place = tmp_path / f"run/attempt_1/worker_{rank}"
        place.mkdir(parents=True)
        events = EventLog(place / "events.jsonl", worker=rank)
        events.emit(started(rank))
        events.emit(TaskStarted(rank=rank, name=name, pid=100 + rank, restarts=int(rank == 1)))
        if rank != 2:
            events.emit(TaskReady(rank=rank, name=name))
        usage = TaskUsage(
            rank=rank, name=name, pid=100 + rank, up_s=61.0, cores=1.5, memory_bytes=3 << 30,
            restarts=int(rank == 1), ready=rank != 2,
        )  # fmt: skip
        events.emit(usage)
        events.close()
    now = status(tmp_path / "run")
    record.end_attempt("failed", 1)
    assert now.tasks == "tensorflow: chief, 1 worker, 1 server"
    assert [(one.name, one.state, one.restarts) for one in now.workers] == [
        ("chief", "running", 0),
        ("worker 0", "running", 1),
        ("server 0", "starting", 0),
    ]
    assert main_status(tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "step" not in said and "samples" not in said
    assert "worker 0  east  101  cpu     gone   1 min 01 s  1.50   3.00 GiB  1" in said


def test_status_knows_a_task_from_its_last_lines_however_long_ago_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = dataclasses.asdict(Job(program="train.py", run_for="tensorflow", workers=2, servers=1))
    RunRecord.begin_attempt(tmp_path / "run", job=job, workers=1)
    place = tmp_path / "run/attempt_1/worker_0"
    place.mkdir(parents=True)
    events = EventLog(place / "events.jsonl", worker=0)
    events.emit(started(0))
    events.emit(TaskStarted(rank=0, name="chief", pid=100, restarts=2))
    events.emit(TaskReady(rank=0, name="chief"))
    for number in range(20):
        usage = TaskUsage(
            rank=0, name="chief", pid=100, up_s=10.0 * number, cores=1.5, memory_bytes=1 << 30, restarts=2, ready=True
        )
        events.emit(usage)
    monkeypatch.setattr(status_module, "NUM_LAST_LINES", 10)
    (worker,) = status(tmp_path / "run").workers
    assert (worker.pid, worker.restarts, worker.state, worker.up_s) == (100, 2, "running", 190.0)
    read = list[str]()
    monkeypatch.setattr(status_module, "decode_event", lambda line: read.append(line) or decode_event(line))
    events.emit(TaskStarted(rank=0, name="chief", pid=200, restarts=3))
    events.close()
    (worker,) = status(tmp_path / "run").workers
    assert (worker.pid, worker.restarts, worker.state, worker.up_s) == (200, 3, "starting", None)
    assert sum("TaskUsage" in line for line in read) == 0


def test_tensorboard_gets_what_each_task_uses_by_the_seconds_of_the_attempt() -> None:
    points, found = ScalarPoints(), []
    for second in (5.0, 15.0):
        usage = TaskUsage(
            rank=0, name="chief", pid=100, up_s=second, cores=0.5, memory_bytes=1 << 30, restarts=0, ready=True
        )
        found += points.take(Record(1000.0 + second, 0, usage))
    assert [point.step for point in found] == [0, 10]
    assert found[1].values == {"tasks/chief/cores": 0.5, "tasks/chief/memory_gib": 1.0}


def scalars(
    step: int, loss: float | None, *, epoch: int | None = None, metrics: Mapping[str, float] | None = None
) -> TaskScalars:
    return TaskScalars(
        rank=0, name="worker 0", program_step=step, written=1000.0 + step, epoch=epoch, loss=loss, metrics=metrics or {}
    )


def write_rows(run_dir: Path, rows: Sequence[TaskScalars], *, attempt: int = 1) -> None:
    file = MetricsFile(run_dir / "metrics.jsonl", attempt=attempt, of_program=True)
    file.accept(Record(900.0, 0, started(0)))
    for row in rows:
        file.accept(Record(row.written + 5.0, 0, row))
    file.close()


def begun(run_dir: Path) -> None:
    job = dataclasses.asdict(Job(program="train.py", run_for="tensorflow", workers=2))
    RunRecord.begin_attempt(run_dir, job=job, workers=2)


def steps_of(run_dir: Path) -> list[tuple[int, int]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["attempt"], row["step"]) for row in rows]


def test_what_a_program_writes_for_tensorboard_is_shown_as_its_steps_and_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path / "run")
    held_out = {"validation/loss": 0.75, "step": 3.0}
    write_rows(tmp_path / "run", [scalars(10, 1.5), scalars(20, 0.5), scalars(20, None, epoch=2, metrics=held_out)])
    newest = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert newest == {
        "step": 20, "attempt": 1, "epoch": 2, "time": 1020.0, "validation/loss": 0.75, "reported_step": 3.0,
    }  # fmt: skip
    assert main_status(tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "  step 20  epoch 3  loss 0.5 (by the program's event files)\n" in said
    now = status(tmp_path / "run")
    assert not now.stands_still, "how long ago a number was written says nothing of a program"
    summary = summary_of(tmp_path / "run", "run")
    assert (summary.step, summary.loss, summary.step_s) == (20, 0.5, None)
    followed = FollowedMetrics(tmp_path / "run/metrics.jsonl")
    followed.poll(10.0)
    assert followed.index.num_broken == 0 and followed.index.first_loss == 1.5
    assert {"loss", "metric/validation/loss"} <= followed.index.series.keys()


def test_an_attempt_of_a_program_drops_the_rows_that_it_writes_again(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    write_rows(tmp_path / "run", [scalars(step, 0.5) for step in (10, 20, 30)])
    write_rows(tmp_path / "run", [], attempt=2)  # it was lost before it wrote anything
    write_rows(tmp_path / "run", [scalars(20, 0.25), scalars(30, 0.25)], attempt=3)
    assert steps_of(tmp_path / "run") == [(1, 10), (3, 20), (3, 30)]


def test_status_says_where_a_program_stands_still_once_no_task_does_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path / "run")
    places = [tmp_path / f"run/attempt_1/worker_{rank}" for rank in range(2)]
    for place in places:
        place.mkdir(parents=True)
    logs = [EventLog(place / "events.jsonl", worker=rank) for rank, place in enumerate(places)]

    def tell(rank: int, still_s: float, place: str = "") -> None:
        usage = TaskUsage(
            rank=rank, name=f"worker {rank}", pid=10 + rank, up_s=500.0, cores=0.01, memory_bytes=1 << 30, restarts=0,
            ready=True, still_s=still_s, place=place,
        )  # fmt: skip
        logs[rank].emit(usage)

    for rank, events in enumerate(logs):
        for event in (started(rank), TaskStarted(rank=rank, name=f"worker {rank}", pid=10 + rank)):
            events.emit(event)
    (places[0] / "stdout.log").write_text("epoch 1 loss 0.5\n\n")
    tell(0, 70.0, "train.py:12 in step")
    tell(1, 0.0)
    assert not status(tmp_path / "run").stands_still, "another task does something"
    tell(1, 90.0)
    assert status(tmp_path / "run").stands_still
    main_status(tmp_path / "run")
    said = capsys.readouterr().out
    assert "STANDS STILL for 1 min 10 s: no task has used a processor or written anything" in said
    assert "    worker 0 at train.py:12 in step\n" in said
    assert re.search(r"the last line, .* ago, of worker 0: epoch 1 loss 0.5\n", said)
    for events in logs:
        events.close()
