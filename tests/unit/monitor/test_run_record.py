"""run.json tells other terminals how a run stands: status, logs and stop believe it as far as processes agree."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import run_lock
from paceline.events import (
    EventLog,
    Regrouped,
    StepDone,
    Warned,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.status import stop
from paceline.monitor.status.logs import main_logs
from paceline.monitor.status.status import main_status, status
from paceline.monitor.status.stop import main_stop
from paceline.processes import is_same_process, process_started_s

SUPERVISOR = """
import signal, sys
from paceline.monitor.records.run_record import RunRecord
record = RunRecord.begin_attempt(sys.argv[1], job={}, workers=1)
def end(number, frame):
    record.end_attempt("stopped", 143)
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def supervisor(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run, as a supervisor does. A busy machine may take long to end it, and that is neither
    explained nor given up."""
    monkeypatch.setattr("paceline.monitor.status.stop.SOON_S", 300.0)
    monkeypatch.setattr("paceline.monitor.status.stop.PATIENCE_S", 300.0)
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, run], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()
        process.wait(timeout=30)


# ----------------------------------------------------------------------------------------------------------- run record


def test_a_record_is_read_back_as_it_was_written(run: Path) -> None:
    record = RunRecord.begin_attempt(run, job={"workers": 2}, workers=2, plan="replicas=2")
    assert RunRecord.load(run) == record
    assert (record.state, record.attempt, record.pid, record.is_alive()) == ("running", 1, os.getpid(), True)
    ended = record.end_attempt("finished", 0)
    assert RunRecord.load(run) == ended
    assert (ended.state, ended.exit_code, ended.attempts[0].state) == ("finished", 0, "finished")
    assert ended.ended is not None and not ended.is_alive()


def test_attempts_are_numbered_and_kept(run: Path) -> None:
    RunRecord.begin_attempt(run, job={}, workers=2).end_attempt("failed", 1)
    second = RunRecord.begin_attempt(run, job={}, workers=3)
    assert [(each.attempt, each.state) for each in second.attempts] == [(1, "failed"), (2, "running")]
    assert (second.attempt, second.workers, second.exit_code) == (2, 3, None)


def test_a_change_keeps_what_others_have_noted_meanwhile(run: Path) -> None:
    record = RunRecord.begin_attempt(run, job={}, workers=1)
    RunRecord.load(run).changed(metrics_url="http://127.0.0.1:1/metrics")
    assert record.end_attempt("finished", 0).metrics_url == "http://127.0.0.1:1/metrics"


def test_a_directory_in_use_is_refused_and_a_lost_one_is_not(run: Path, supervisor: subprocess.Popen[str]) -> None:
    with pytest.raises(ValueError, match=rf"in use: process {supervisor.pid} runs attempt 1.*paceline stop"):
        RunRecord.begin_attempt(run, job={}, workers=1)
    supervisor.kill()
    supervisor.wait(timeout=30)
    assert RunRecord.load(run).state_now() == "lost"
    assert RunRecord.begin_attempt(run, job={}, workers=1).attempt == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"attempts": [], "unknown": 1}', '{"state": "running"}'])
def test_a_damaged_record_is_named(run: Path, text: str) -> None:
    run.mkdir()
    (run / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        RunRecord.load(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user for a moment, which only root can")
def test_the_record_of_another_user_is_not_called_damaged(run: Path) -> None:
    RunRecord.begin_attempt(run, job={}, workers=1)
    os.seteuid(65534)
    try:
        with pytest.raises(ValueError, match=r"Permission denied.*as that user") as error:
            RunRecord.load(run)
    finally:
        os.seteuid(0)
    assert "damaged" not in str(error.value)


def test_a_process_is_known_by_number_and_start() -> None:
    started = process_started_s(os.getpid())
    assert started is not None
    assert is_same_process(os.getpid(), started) and not is_same_process(os.getpid(), started + 5)


def test_a_zombie_does_not_run() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet collected
    assert process_started_s(process.pid) is None
    process.wait()
    assert process_started_s(process.pid) is None


@pytest.mark.parametrize("remains", ["nothing", "half a record", "the directory"])
def test_the_end_of_a_run_is_written_whatever_became_of_its_directory_meanwhile(run: Path, remains: str) -> None:
    record = RunRecord.begin_attempt(run, job={}, workers=2)
    if remains == "half a record":
        (run / "run.json").write_text('{"state": "run')
    else:
        shutil.rmtree(run)
    if remains == "the directory":
        run.mkdir()
    record.end_attempt("stopped", 75)
    assert (RunRecord.load(run).state, RunRecord.load(run).attempts[-1].exit_code) == ("stopped", 75)


# --------------------------------------------------------------------------------------------------------------- status


def write_events(run: Path, worker: int, last: int, *more: Any) -> None:
    directory = run / "attempt_1" / f"worker_{worker}"
    directory.mkdir(parents=True)
    log = EventLog(directory / "events.jsonl", worker=worker)
    about: dict[str, Any] = {"rank": worker, "pid": 10 + worker, "startup_s": 1.9, "plan": "replicas=2"}
    log.emit(WorkerStarted(**about, workers=2, host="a", device="cpu", resumed_from_step=0))
    for step in range(1, last + 1):
        log.emit(StepDone(step=step, epoch=0, num_samples=8, loss=1.0, metrics={}, seconds={}))
    for event in more:
        log.emit(event)
    log.close()


def test_status_tells_step_loss_and_every_worker(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunRecord.begin_attempt(run, job={}, workers=3, plan="auto")
    write_events(run, 0, 3)
    write_events(run, 1, 2)
    (run / "metrics.jsonl").write_text(
        '{"step": 3, "time": 1.0, "epoch": 0, "loss": 2.5, "samples_per_s": 512.0}\n{"step": 4, "lo'
    )
    now = status(run)
    come = now.progress
    assert (now.state, come.step, come.loss, come.samples_per_s, now.plan) == ("running", 3, 2.5, 512.0, "replicas=2")
    assert [(worker.rank, worker.host, worker.pid, worker.state, worker.step) for worker in now.workers] == [
        (0, "a", 10, "running", 3),
        (1, "a", 11, "running", 2),
        (2, "", 0, "starting", 0),
    ]
    assert now.workers[0].age_s is not None and now.workers[2].age_s is None
    assert main_status(run) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run: running\n  attempt 1, for ") and "step 3  loss 2.5  512 samples/s" in shown
    assert main_status(run, json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 3 and told["workers"][1]["pid"] == 11


def test_status_tells_each_workers_idle_share_over_its_last_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunRecord.begin_attempt(run, job={}, workers=3)
    for worker, waited_s in ((0, 0.25), (1, 0.03)):
        write_events(run, worker, 0)
        log = EventLog(run / "attempt_1" / f"worker_{worker}" / "events.jsonl", worker=worker)
        about: dict[str, Any] = {"epoch": 0, "num_samples": 8, "loss": 1.0, "metrics": {}}
        for step in range(1, 61):  # the first ten are of a time that is over
            seconds = {"communication": 0.9 if step <= 10 else waited_s, "total": 1.0}
            log.emit(StepDone(step=step, seconds=seconds, **about))
        log.close()
    assert [worker.idle for worker in status(run).workers] == [pytest.approx(0.25), pytest.approx(0.03), None]
    assert main_status(run) == 0
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert [row.split()[6] for row in rows] == ["idle", "25%", "3%", "-"]
    successor = EventLog(run / "attempt_1" / "worker_1" / "events.jsonl", worker=1)
    started = {"rank": 1, "pid": 99, "startup_s": 0.1, "plan": "", "workers": 3, "host": "a", "device": "cpu"}
    successor.emit(WorkerStarted(**started, resumed_from_step=0))
    successor.close()
    assert status(run).workers[1].idle is None, "what its predecessor waited is not its own"


def test_status_tells_how_workers_ended(run: Path) -> None:
    record = RunRecord.begin_attempt(run, job={}, workers=5)
    write_events(run, 0, 3, WorkerFinished(rank=0, step=3, peak_memory_bytes=1))
    write_events(run, 1, 3)
    write_events(run, 2, 3)
    write_events(run, 3, 3)
    write_events(run, 4, 3)
    (run / "attempt_1" / "worker_4" / "error.json").write_text('{"echo": true}')
    (run / "attempt_1" / "worker_1" / "error.json").write_text("{}")
    log = EventLog(run / "attempt_1" / "events.jsonl", worker=None)
    log.emit(WorkerFailed(rank=2, host="a", step=3, reason="SIGKILL"))
    log.close()
    record.end_attempt("failed", 1)
    assert [worker.state for worker in status(run).workers] == ["finished", "failed", "failed", "gone", "stopped"]
    assert status(run).exit_code == 1


def test_status_tells_who_takes_part_after_a_loss(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunRecord.begin_attempt(run, job={}, workers=3)
    for worker in range(3):
        write_events(run, worker, 3)
    supervisor = EventLog(run / "attempt_1" / "events.jsonl", worker=None)
    reason = "worker 1 (pid 11) killed by signal 9"
    supervisor.emit(WorkerLost(rank=1, host="a", step=3, reason=reason))
    formed = {"causes": [reason], "members": [0, 2], "step": 3, "detected_s": 0.012, "regrouped_s": 0.034}
    supervisor.emit(Regrouped(**formed, steps_lost=0, holds=False))
    now = status(run)
    assert (now.members, now.workers_lost, [worker.state for worker in now.workers]) == (
        (0, 2), 1, ["running", "lost", "running"],
    )  # fmt: skip
    assert main_status(run) == 0
    shown = capsys.readouterr().out
    assert (
        "1 worker lost, 2 taking part now; the last incident:\n    worker 1 (pid 11) killed by signal 9 after" in shown
    )

    successor = EventLog(run / "attempt_1" / "worker_1" / "events.jsonl", worker=1)
    about: dict[str, Any] = {"rank": 1, "pid": 99, "startup_s": 0.1, "plan": "replicas=2"}
    successor.emit(WorkerStarted(**about, workers=3, host="a", device="cpu", resumed_from_step=0))
    now = status(run)
    assert (now.members, now.workers[1].state, now.workers[1].pid) == ((0, 2), "starting", 99)
    successor.emit(StepDone(step=4, epoch=0, num_samples=8, loss=1.0, metrics={}, seconds={}))
    supervisor.emit(WorkerJoined(rank=1, step=4, after_s=0.2))
    now = status(run)
    assert (now.members, now.workers[1].state, now.workers[1].step) == ((0, 1, 2), "running", 4)
    supervisor.close()
    successor.close()


def test_a_killed_supervisor_that_wrote_no_end_is_lost(
    run: Path, supervisor: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(run).state == "running"
    supervisor.kill()
    supervisor.wait(timeout=30)
    assert status(run).state == "lost"
    main_status(run)
    assert "lost (its supervisor is gone without a word" in capsys.readouterr().out


def test_a_run_of_another_host_is_taken_at_its_word(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = RunRecord.begin_attempt(run, job={}, workers=1)
    dataclasses.replace(record, host="elsewhere", pid=1).save()
    assert (status(run).state, status(run).is_checked) == ("running", False)
    assert main_stop(run) == 2
    assert "runs on host elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize("command", [main_status, main_logs, main_stop])
def test_a_directory_that_is_no_run_is_a_usage_error(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for name, says in (("nowhere", "does not exist"), (".", "has no run.json"), ("file", "is not a directory")):
        assert command(tmp_path / name) == 2
        assert says in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------- logs


@pytest.fixture
def logged(run: Path) -> RunRecord:
    record = RunRecord.begin_attempt(run, job={}, workers=2)
    for worker in range(2):
        directory = run / "attempt_1" / f"worker_{worker}"
        directory.mkdir(parents=True)
        (directory / "stdout.log").write_text(f"out {worker}\nrest")
        (directory / "stderr.log").write_text(f"err {worker}\n")
    return record


def test_one_log_is_printed_as_it_is_and_several_with_tags(
    run: Path, logged: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_logs(run, worker=1, stream="stdout") == 0
    assert capsys.readouterr().out == "out 1\nrest\n"
    assert main_logs(run) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[0] out 0", "[0] rest", "[0 err] err 0", "[1] out 1", "[1] rest", "[1 err] err 1",
    ]  # fmt: skip


def test_a_worker_or_stream_that_does_not_exist_is_a_usage_error(
    run: Path, logged: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_logs(run, worker=7) == 2
    assert "has no worker 7; it has [0, 1]" in capsys.readouterr().err
    assert main_logs(run, stream="both") == 2
    assert "there is no stream 'both'" in capsys.readouterr().err


def test_following_ends_with_the_run_and_prints_what_came_meanwhile(
    run: Path, logged: RunRecord, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(["more\n", "last\n", None])

    def pause(_: float) -> None:
        """The run goes on while the reader waits; at the third look it ends."""
        text = next(looks)
        with open(run / "attempt_1" / "worker_0" / "stdout.log", "a") as file:
            file.write(text or "")
        if text is None:
            logged.end_attempt("finished", 0)

    monkeypatch.setattr("paceline.monitor.status.logs.time.sleep", pause)
    assert main_logs(run, worker=0, stream="stdout", follow=True) == 0
    assert capfd.readouterr().out == "out 0\nrestmore\nlast\n"


def test_ctrl_c_ends_following(run: Path, logged: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    def pause(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.monitor.status.logs.time.sleep", pause)
    assert main_logs(run, follow=True) == 130


# ----------------------------------------------------------------------------------------------------------------- stop


def test_stop_ends_the_supervisor_and_waits_for_it(
    run: Path, supervisor: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    collector = threading.Thread(target=supervisor.wait)  # as a shell would
    collector.start()
    assert main_stop(run) == 0
    collector.join(timeout=30)
    assert supervisor.returncode == 143
    assert capsys.readouterr().out == f"stopping run (process {supervisor.pid})\nrun is stopped\n"
    assert main_stop(run) == 0
    assert capsys.readouterr().out == "run does not run: it is stopped\n"


def test_stop_does_not_touch_another_process_of_the_same_number(run: Path, supervisor: subprocess.Popen[str]) -> None:
    record = RunRecord.load(run)
    dataclasses.replace(record, pid_started_s=record.pid_started_s - 100).save()
    assert main_stop(run) == 0
    assert supervisor.poll() is None
    assert RunRecord.load(run).state_now() == "lost"


def test_a_supervisor_that_does_not_end_is_said_to_go_on(
    run: Path, supervisor: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.monitor.status.stop.PATIENCE_S", 0.2)
    os.kill(supervisor.pid, signal.SIGSTOP)
    assert main_stop(run) == 1
    assert "still runs after 0 s" in capsys.readouterr().err


def write_summary(run: Path, **fields: Any) -> None:
    facts = {"attempt": 1, "step": 20, "steps": 20, "samples": 640, "steps_unsaved": 0, "checkpoints_saved": 1}
    (run / "summary.json").write_text(json.dumps({**facts, **fields}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, " at step 20, and everything is saved"),
        ({"steps_unsaved": 3}, " at step 20, and step 17 was saved last: 3 steps are lost"),
        (
            {"steps_unsaved": 20, "checkpoints_saved": 0},
            " at step 20, and nothing was saved of this attempt: its 20 steps are lost",
        ),
        ({"step": 0, "steps": 0, "checkpoints_saved": 0}, " at step 0"),
        ({"samples": 0}, " at step 20; the same command has the program go on from what it has saved"),  # own loop
        ({"attempt": 7}, ""),  # of another attempt
    ],
)
def test_stop_says_what_is_saved(
    run: Path, supervisor: subprocess.Popen[str], fields: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_summary(run, **fields)
    collector = threading.Thread(target=supervisor.wait)
    collector.start()
    assert main_stop(run) == 0
    collector.join(timeout=30)
    assert capsys.readouterr().out.splitlines()[1:] == [f"run is stopped{says}"]


def test_stop_says_meanwhile_what_the_run_waits_for_and_in_the_end_who_had_to_be_ended(
    run: Path, supervisor: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.monitor.status.stop.SOON_S", 0.2)
    os.kill(supervisor.pid, signal.SIGSTOP)
    write_summary(run)
    (run / "attempt_1").mkdir()
    log = EventLog(run / "attempt_1" / "events.jsonl", worker=None)
    log.emit(Warned(text="worker 1 has not entered all_reduce 24"))
    monkeypatch.setattr(sys, "stdout", told := _Told())
    stopping = threading.Thread(target=main_stop, args=[run])
    stopping.start()
    assert told.explained.wait(timeout=30)
    log.emit(Warned(text="workers 0, 1 have not left within 10 s: they are ended"))
    log.close()
    os.kill(supervisor.pid, signal.SIGCONT)
    supervisor.wait(timeout=30)
    stopping.join(timeout=30)
    assert told.lines() == [
        f"stopping run (process {supervisor.pid})",
        "it finishes step 1 and saves; a worker that has not left 0 s after SIGTERM is ended",
        "  worker 1 has not entered all_reduce 24",
        "run is stopped at step 20, and everything is saved",
        "  workers 0, 1 have not left within 10 s: they are ended",
    ]


class _Told(io.StringIO):
    """Standard output that says when a run's wait has been explained."""

    def __init__(self) -> None:
        super().__init__()
        self.explained = threading.Event()

    def write(self, text: str) -> int:
        if "after SIGTERM is ended" in text:
            self.explained.set()
        return super().write(text)

    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


def test_a_directory_whose_supervisor_is_on_another_host_is_not_begun_in_while_its_lock_is_held(tmp_path: Path) -> None:
    first = RunRecord.begin_attempt(tmp_path, job={}, workers=2)
    dataclasses.replace(first, host="elsewhere", pid=4711).save()  # by the record alone it could be lost
    run_lock.release(tmp_path)
    with open(tmp_path / ".lock", "wb") as other:  # another open file is another process to the kernel
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
        with pytest.raises(ValueError, match="in use: process 4711 on host elsewhere runs attempt 1 there"):
            RunRecord.begin_attempt(tmp_path, job={}, workers=2)
    again = RunRecord.begin_attempt(tmp_path, job={}, workers=2)
    assert again.attempt == 2
    again.end_attempt("finished", 0)


def test_the_record_of_a_later_start_outlives_what_an_earlier_one_still_notes(tmp_path: Path) -> None:
    first = RunRecord.begin_attempt(tmp_path, job={}, workers=2)
    dataclasses.replace(first, host="elsewhere").save()  # it was cut off, and its lock is gone
    later = RunRecord.begin_attempt(tmp_path, job={}, workers=2)
    first.end_attempt("failed", 1)
    assert RunRecord.load(tmp_path) == later
    assert "attempt 2, process" in (run_lock.newer_start(tmp_path, first.attempt) or "")
    assert run_lock.newer_start(tmp_path, later.attempt) is None


def test_stop_says_where_a_run_goes_on_that_another_host_leads_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator asked had begun to hand over."""
    record = RunRecord.begin_attempt(tmp_path, job={"head": "auto"}, workers=2)
    asked: list[int] = []

    def handed_over(*_: object, is_asked: bool) -> bool:
        assert is_asked
        record.changed(host="elsewhere", pid=1)
        return True

    monkeypatch.setattr(stop, "_end", handed_over)
    assert main_stop(tmp_path, lambda pid: bool(asked.append(pid)) or True) == 1
    assert asked == [os.getpid()]
    assert "goes on, led by host elsewhere: use `paceline stop` there" in capsys.readouterr().err
