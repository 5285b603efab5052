"""`paceline status` says what is wrong: that a run stands still, who is halted, who failed first and of what."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_run_files import Workers
from paceline.events import EventLog, Restarted, StreamOpened, Warned, WorkerFailed, WorkerStarted
from paceline.monitor.records.failure import Failure, is_consequence
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.status.status import main_status, status
from paceline.processes import this_host


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path / "run")
    workers.start()
    yield workers
    workers.close()


def metrics(run: Path, *rows: dict[str, Any], ago_s: float = 0.0) -> None:
    """Rows of `metrics.jsonl`; the last one was committed so long ago."""
    began = time.time() - ago_s - len(rows)
    about = {"epoch": 1, "loss": 0.5, "seconds": {"total": 0.05}, "samples_per_s": 1000.0}
    with open(run / "metrics.jsonl", "a") as file:
        for number, row in enumerate(rows, start=1):
            file.write(json.dumps({"step": number, "time": began + number, **about, **row}) + "\n")


def begin_long_ago(run: Path) -> None:
    RunRecord.load(run).changed(started=time.time() - 3600.0)


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main_status(run) == 0
    return capsys.readouterr().out


def test_progress_has_the_whole_and_people_count_epochs_from_1(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.emit(StreamOpened(name="train", num_samples=100, epochs=6, last_step=192))
    metrics(workers.run, *[{}] * 8, {"samples_per_s": 20.0})  # the last batch of the epoch was short
    assert "  step 9 of 192  epoch 2 of 6  loss 0.5  1,000 samples/s\n" in shown(workers.run, capsys)
    metrics(workers.run, {"step": 10, "loss_scale": 16777216.0})
    assert "  loss 0.5  loss scale 16777216  1,000 samples/s\n" in shown(workers.run, capsys), "in fp16"
    told = status(workers.run).facts()
    assert (told["step"], told["last_step"], told["epoch"], told["epochs"]) == (10, 192, 1, 6), "programs: from 0"
    RunRecord.load(workers.run).changed(job={"max_steps": 60})
    assert status(workers.run).progress.last_step == 60


def test_that_all_have_begun_again_is_told_with_the_cause(workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    lost = Restarted(
        causes=["worker 1 (pid 7) killed"], lost=[1], workers=2, at_step=21, step=12, source="memory", lost_at=1.0
    )
    with contextlib.closing(EventLog(workers.attempt / "events.jsonl", worker=None)) as supervisor:
        supervisor.emit(lost)
    told = shown(workers.run, capsys)
    assert "  1 worker lost, 2 taking part now; the last incident:\n    worker 1 (pid 7) killed after step 21: " in told


@pytest.mark.parametrize(
    ("ago_s", "step_s", "is_said"), [(16.7, 0.05, True), (4.0, 0.05, False), (16.7, 3.0, False), (40.0, 3.0, True)]
)
def test_a_run_that_takes_no_step_any_more_is_said_to_stand_still(
    workers: Workers, ago_s: float, step_s: float, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics(workers.run, *[{"seconds": {"total": step_s}}] * 3, ago_s=ago_s)
    begin_long_ago(workers.run)
    assert status(workers.run).stands_still is is_said
    assert (f"  NO STEP for {ago_s:.0f}"[:14] in shown(workers.run, capsys)) is is_said
    RunRecord.load(workers.run).end_attempt("finished", 0)
    assert not status(workers.run).stands_still, "it is over"


def test_a_run_that_has_taken_no_step_since_it_was_started_again_is_not_said_to_stand_still(workers: Workers) -> None:
    metrics(workers.run, {}, ago_s=100.0)
    assert not status(workers.run).stands_still, "that step was the attempt's before"


def test_the_last_warning_is_shown_until_a_step_is_committed(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics(workers.run, {}, {}, ago_s=20.0)
    begin_long_ago(workers.run)
    log = EventLog(workers.attempt / "events.jsonl", worker=None)
    log.emit(Warned(text="worker 1 has not entered all_reduce 24"))
    log.close()
    assert " ago: worker 1 has not entered all_reduce 24\n" in shown(workers.run, capsys)
    assert status(workers.run).facts()["warning"] == "worker 1 has not entered all_reduce 24"
    metrics(workers.run, {"step": 3, "time": time.time() + 1.0})
    assert status(workers.run).trouble.warning is None, "it goes on"


def test_a_process_that_is_halted_is_told_from_one_that_runs(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        about: dict[str, Any] = {"rank": 1, "pid": process.pid, "startup_s": 1.9, "plan": "", "workers": 2}
        path = workers.directories[1] / "events.jsonl"
        path.unlink()
        log = EventLog(path, worker=1)
        log.emit(WorkerStarted(**about, host=this_host(), device="cpu", resumed_from_step=0))
        log.close()
        try:
            assert status(workers.run).workers[1].state == "running"
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert [worker.state for worker in status(workers.run).workers] == ["running", "halted"]
            told = shown(workers.run, capsys)
            assert (
                f"  worker 1 (pid {process.pid}) is halted (SIGSTOP, a debugger) and keeps the others waiting" in told
            )
        finally:
            process.kill()  # a stopped one, too


def test_who_failed_first_is_told_from_those_who_only_followed(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"kind": "ValueError", "message": "this picture is corrupt", "step": 50, "time": 2.0}
    failures = [
        Failure(worker=0, host="a", pid=10, signal=15, sent_by_us=True),
        Failure(worker=1, host="a", pid=11, exit_code=1, error=error),
    ]
    told = [is_consequence(failure, failures) for failure in failures]
    assert told == [True, False]
    log = EventLog(workers.attempt / "events.jsonl", worker=None)
    for failure, only in zip(failures, told, strict=True):
        log.emit(WorkerFailed(rank=failure.worker, host="a", step=50, reason=f"end {failure.worker}", follows=only))
    log.close()
    RunRecord.load(workers.run).end_attempt("failed", 1)
    assert [worker.state for worker in status(workers.run).workers] == ["stopped", "failed"]
    assert "\n  end 1\n" in shown(workers.run, capsys)
    assert not is_consequence(failures[0], failures[:1]), "it is alone"
