"""A watch shows a run while it goes on, and says in the end how it went: on terminals, in pipes, unseen."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.events import (
    CheckpointSaved,
    Evaluated,
    EventLog,
    Note,
    Regrouped,
    StepDone,
    StreamOpened,
    Warned,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.console import PlainConsole
from paceline.monitor.failure import Failure
from paceline.monitor.live import LiveConsole
from paceline.monitor.run_record import RunRecord
from paceline.monitor.watch import Watch
from paceline.monitor.wording import closing_table, event_line, number_text
from paceline.plan.job import Job

SECONDS = {"data": 0.001, "compute": 0.086, "communication": 0.008, "optimizer": 0.003, "total": 0.1}
JOB = Job(tensorboard=False)


class Workers:
    """Pretended workers that write what real ones would."""

    def __init__(self, run: Path, count: int = 2) -> None:
        self.run, self.count = run, count
        RunRecord.begin_attempt(run, job={}, workers=count)
        self.directories = [run / "attempt_1" / f"worker_{worker}" for worker in range(count)]
        for directory in self.directories:
            directory.mkdir(parents=True)
        self.logs = [EventLog(path / "events.jsonl", worker=worker) for worker, path in enumerate(self.directories)]

    def start(self, *, resumed_from_step: int = 0) -> None:
        for worker in range(self.count):
            self.start_one(worker, resumed_from_step=resumed_from_step)

    def start_one(self, worker: int, *, host: str = "a", resumed_from_step: int = 0) -> None:
        about: dict[str, Any] = {"rank": worker, "pid": 10 + worker, "startup_s": 1.9, "plan": "replicas=2"}
        about |= {"host": host, "resumed_from_step": resumed_from_step}
        self.logs[worker].emit(WorkerStarted(**about, workers=self.count, device="cpu"))

    def step(self, number: int, **fields: Any) -> None:
        values: dict[str, Any] = {"epoch": 0, "num_samples": 8, "loss": 10 / number, "metrics": {}, "seconds": SECONDS}
        self.emit(StepDone(step=number, **{**values, **fields}))

    def emit(self, event: Any) -> None:
        for log in self.logs:
            log.emit(event)

    def write(self, worker: int, stream: str, text: str) -> None:
        with open(self.directories[worker] / f"{stream}.log", "a") as file:
            file.write(text)

    def close(self) -> None:
        for log in self.logs:
            log.close()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path / "run")
    yield workers
    workers.close()


def test_a_finished_run_leaves_its_files_and_a_closing_table(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=Job(), stream=stream)
    workers.start()
    watch.poll()
    for number in range(1, 6):
        workers.step(number, metrics={"lr": 0.5})
        watch.poll()
    workers.write(0, "stdout", "a sample of text\n")
    for worker, log in enumerate(workers.logs):
        log.emit(Evaluated(step=5, num_samples=30, metrics={"accuracy": 0.75}, duration_s=0.5))
        log.emit(WorkerFinished(rank=worker, step=5, peak_memory_bytes=300 << 20))
    path = str(workers.run / "checkpoints" / "step_5")
    workers.logs[0].emit(CheckpointSaved(step=5, path=path, num_bytes=2048, stall_s=0.004, write_s=1.0))
    facts = watch.finish("finished", 0)
    assert watch.finish("failed", 1) is facts
    shown = stream.getvalue()
    assert shown.startswith("2 workers on cpu, ready in 1.90 s  plan replicas=2\nstep 1  loss 10  lr 0.5\n")
    assert shown.count("held out: accuracy 0.75  (30 samples in 500 ms)") == 1
    assert shown.count("step 5  checkpoint saved (2.00 KiB; training waited 4.00 ms)") == 1
    assert "\na sample of text\n" in shown
    table = shown[shown.index("finished at step 5") :].splitlines()
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in table[1:])
    assert list(rows) == [
        "samples/s", "communication", "start-up", "steps", "loss", "held out",
        "peak memory", "checkpoint", "logs", "run",
    ]  # fmt: skip
    assert rows["communication"] == "8.0% of the steps' time" and rows["start-up"].startswith("1.90 s (first step")
    assert (rows["steps"], rows["loss"], rows["logs"]) == ("5 (40 samples)", "10 -> 2", "run/attempt_1")
    assert rows["held out"] == "accuracy 0.75 (step 5)"
    lines = [json.loads(line) for line in (workers.run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["lr"]) for line in lines] == [(number, 0.5) for number in range(1, 6)]
    assert json.loads((workers.run / "summary.json").read_text()) == facts
    assert facts["steps"] == 5 and facts["state"] == "finished"
    assert list((workers.run / "tensorboard").iterdir())
    assert watch.exit_note == "finished at step 5"


def test_a_failed_run_says_why_before_anything_else(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    workers.start()
    workers.step(1)
    trace = 'Traceback (most recent call last):\n  File "train.py", line 3, in f\nValueError: bad\n'
    for worker in range(2):
        workers.write(worker, "stderr", trace)
    watch.poll()
    error = {"kind": "ValueError", "message": "bad", "traceback": trace, "step": 1, "time": 1.0, "echo": False}
    failures = [
        Failure(worker=0, host="a", pid=10, signal=15, sent_by_us=True),
        Failure(worker=1, host="a", pid=11, exit_code=1, error=error, peak_memory_bytes=1 << 20),
    ]
    facts = watch.finish("failed", 1, failures)
    shown = stream.getvalue()
    assert shown.count("Traceback") == shown.count('File "train.py"') == 1
    report = shown.index("worker 1 (host a, pid 11) failed at step 1: ValueError: bad\nTraceback")
    assert report < shown.index("worker 0 stopped because of it") < shown.index("failed at step 1, after")
    assert watch.exit_note == "worker 1 (host a, pid 11) failed at step 1: ValueError: bad"
    assert facts["peak_memory_bytes"] == 1 << 20


def test_a_killed_worker_is_said_to_have_reached_its_last_step(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    workers.step(6)
    workers.logs[0].emit(StepDone(step=7, epoch=0, num_samples=8, loss=1.0, metrics={}, seconds={}))
    watch.finish("failed", 1, [Failure(worker=1, host="a", pid=11, signal=9)])
    assert "worker 1 (host a, pid 11) was killed by signal 9 (SIGKILL) at step 6\n" in stream.getvalue()
    assert watch.failures[0].step == 6


def test_a_run_that_failed_before_its_first_step_has_no_table(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    watch.finish("failed", 2)
    assert stream.getvalue() == "\nfailed before the first step; logs are in run/attempt_1\n"


def test_a_stopped_run_says_what_stopped_it(workers: Workers) -> None:
    watch = Watch(workers.run, 1, 2, job=JOB, console="none")
    workers.step(3)
    watch.finish("stopped", 130)
    assert watch.exit_note == "stopped at step 3 (Ctrl-C)"


def test_notes_and_warnings_of_several_workers_are_shown_once(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    workers.emit(Warned(text="parameter a was not used"))
    workers.emit(Note(text="resumed from step 400"))
    watch.poll()
    workers.logs[1].emit(Warned(text="only here"))
    workers.emit(Warned(text="parameter a was not used"))
    watch.say("of the supervisor")
    watch.finish("finished", 0)
    assert stream.getvalue().splitlines()[:4] == [
        "[workers 0, 1] warning: parameter a was not used",
        "resumed from step 400",
        "of the supervisor",
        "[worker 1] warning: only here",
    ]


def test_a_plain_line_comes_first_then_once_an_interval_and_at_the_end(workers: Workers) -> None:
    stream = io.StringIO()
    console = PlainConsole(stream, every_s=2.0)
    watch = Watch(workers.run, 1, 2, job=JOB, console="none")
    watch._sinks.append(console)  # pyright: ignore[reportPrivateUsage]
    for number in range(1, 8):
        workers.step(number)
        watch.poll()
        console.poll(now=100.0 + number)
    workers.step(8)
    watch.finish("finished", 0)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1", "3", "5", "7", "8"]
    assert stream.getvalue().splitlines()[0] == "step 1  loss 10"  # its speed says nothing about the others
    assert stream.getvalue().splitlines()[1].endswith("data 1% compute 86% comm 8% optim 3% other 2%")


def test_a_plain_line_says_how_far_the_run_is_to_go_and_counts_epochs_from_one(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=Job(tensorboard=False, max_steps=90), stream=stream)
    workers.step(1)
    watch.poll()
    workers.emit(StreamOpened(name="train", num_samples=80, epochs=3, last_step=30))
    workers.step(25, epoch=2)
    watch.finish("finished", 0)
    assert stream.getvalue().startswith("step 1 of 90  loss 10\nstep 25 of 30  epoch 3 of 3  loss 0.4  ")


def test_a_host_tells_of_all_workers_of_the_job_and_which_of_them_are_its_own(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run", count=4)
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 4, job=JOB, stream=stream, local=[2, 3])
    workers.start_one(0, host="b")  # another host's, seen on a disk that both share
    workers.start_one(2)
    watch.poll()
    assert stream.getvalue() == ""
    workers.start_one(3)
    watch.poll()
    workers.start_one(1, host="b")
    watch.poll()
    workers.close()
    assert stream.getvalue() == "4 workers (2 of them here on a: cpu), ready in 1.90 s  plan replicas=2\n"


def test_a_resumed_run_says_so_once(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    workers.emit(Note(text="resumed from step 417 (run/checkpoints/step_00000417)"))
    workers.start(resumed_from_step=417)
    workers.step(418)
    watch.poll()
    assert stream.getvalue().splitlines()[:3] == [
        "2 workers on cpu, ready in 1.90 s  plan replicas=2",
        "resumed from step 417 (run/checkpoints/step_00000417)",
        "step 418  loss 0.02392",
    ]
    assert stream.getvalue().count("step 417") == 1
    watch.finish("stopped", 130)


def lose(supervisor: EventLog, rank: int, step: int, *, members: list[int], steps_lost: int = 0) -> None:
    reason = f"worker {rank} (pid 7) killed by signal 9"
    supervisor.emit(WorkerLost(rank=rank, host="a", step=step, reason=reason))
    about: dict[str, Any] = {"causes": [reason], "members": members, "step": step, "holds": len(members) < 1}
    supervisor.emit(Regrouped(**about, detected_s=0.01, regrouped_s=0.03, steps_lost=steps_lost))


def test_a_loss_is_one_line_and_so_is_its_end_and_ready_is_said_once(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    supervisor = EventLog(workers.run / "attempt_1" / "events.jsonl", worker=None)
    workers.start()
    workers.step(1)
    watch.poll()
    lose(supervisor, 1, 1, members=[0])
    workers.logs[0].emit(StepDone(step=2, epoch=0, num_samples=8, loss=1.0, metrics={}, seconds=SECONDS))
    watch.poll()
    metrics = (workers.run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]  # it is not waited for the lost one
    workers.start_one(1)
    workers.step(3)
    supervisor.emit(WorkerJoined(rank=1, step=3, after_s=0.2))
    supervisor.emit(WorkerLost(rank=2, host="a", step=3, reason="worker 2 (pid 9) killed by signal 9"))
    watch.poll()
    facts = watch.finish("finished", 0)
    supervisor.close()
    shown = stream.getvalue()
    assert shown.count("2 workers on cpu, ready in") == 1
    line = "worker 1 (pid 7) killed by signal 9 after step 1: detected in 0.01 s, regrouped in 0.03 s; 1 worker goes on"
    assert shown.count("killed by signal 9 after") == 1
    assert f"\n{line}, steps lost 0, samples repeated 0\n" in shown
    assert "\nworker 1 joined at step 3, 0.20 s after the loss\n" in shown
    assert "\nworker 2 (pid 9) killed by signal 9 before it had joined\n" in shown  # nothing else would tell of it
    assert (facts["workers_lost"], facts["workers_joined"], facts["steps_lost"]) == (2, 1, 0)
    assert "\n  incidents      2 workers lost, 1 taken in again, 0 steps lost (more: paceline report" in shown


@pytest.mark.parametrize(
    ("members", "steps_lost", "holds", "text"),
    [
        ((0, 1, 3), 0, False, "3 workers go on, steps lost 0, samples repeated 0"),
        ((0, 1), 1, False, "2 workers go on, steps lost 1, samples repeated those of 1 step"),
        ((0,), 0, True, "1 worker waits for others, steps lost 0, samples repeated 0"),
        ((0, 1), 3, True, "2 workers wait for others, steps lost 3, samples repeated those of 3 steps"),
    ],
)
def test_what_a_loss_cost_is_said_in_numbers(members: tuple[int, ...], steps_lost: int, holds: bool, text: str) -> None:
    about: dict[str, Any] = {"causes": ["worker 2 (pid 1) failed", "worker 4 was not heard of"], "step": 812}
    event = Regrouped(**about, members=members, detected_s=0.0123, regrouped_s=0, steps_lost=steps_lost, holds=holds)
    assert event_line(event) == (
        "worker 2 (pid 1) failed, worker 4 was not heard of after step 812: "
        f"detected in 0.01 s, regrouped in 0.00 s; {text}"
    )


def test_a_worker_that_was_added_is_waited_for_from_its_first_step_on(workers: Workers) -> None:
    watch = Watch(workers.run, 1, 1, job=JOB, console="none")  # the run began with worker 0 alone
    workers.start()
    workers.step(1)
    watch.poll()
    workers.step(2, num_bytes_sent=10)
    watch.poll()
    assert watch.finish("finished", 0)["num_bytes_sent"] == 20


def test_a_closed_pipe_does_not_end_the_run_and_is_said_once(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", closefd=False) as stream:
        watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
        workers.start()
        watch.poll()
        workers.step(1)
        watch.poll()
        facts = watch.finish("finished", 0)
        print("what others write later does no harm", file=stream, flush=True)
    os.close(writing)
    assert facts["steps"] == 1
    assert capsys.readouterr().err.count("the console is gone") == 1


def test_a_stream_without_unicode_gets_question_marks() -> None:
    raw = io.BytesIO()
    console = PlainConsole(io.TextIOWrapper(raw, encoding="ascii"))
    console.show("déjà vu")
    assert raw.getvalue() == b"d?j? vu\n"


def test_nobody_looking_means_nothing_shown_and_everything_written(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch(workers.run, 1, 2, job=JOB, console="none")
    workers.start()
    workers.step(1)
    watch.finish("finished", 0)
    assert capsys.readouterr() == ("", "")
    assert (workers.run / "metrics.jsonl").exists()


def test_a_host_that_follows_a_head_writes_no_file_of_the_run(workers: Workers) -> None:
    watch = Watch(workers.run, 1, 4, job=Job(metrics_port=0), console="none", local=[0, 1], record=False)
    workers.step(1)
    watch.poll()
    assert watch.finish("finished", 0)["steps"] == 1  # complete with the two workers of this host
    assert sorted(path.name for path in workers.run.iterdir()) == ["attempt_1", "run.json"]


def test_the_metrics_endpoint_is_told_and_noted_while_it_serves(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=Job(metrics_port=0, tensorboard=False), stream=stream)
    try:
        url = RunRecord.load(workers.run).metrics_url
        assert url and stream.getvalue() == f"metrics are served at {url}\n" and watch.metrics_url == url
        workers.step(1)
        watch.poll()
        assert "paceline_steps_total 1.0" in urllib.request.urlopen(url, timeout=10).read().decode()
    finally:
        watch.finish("finished", 0)
    assert RunRecord.load(workers.run).metrics_url is None


def test_a_sink_that_cannot_write_is_given_up_and_the_run_goes_on(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=Job(), stream=stream)
    (workers.run / "metrics.jsonl").mkdir()
    (workers.run / "tensorboard").write_text("in the way")
    (workers.run / "summary.json").mkdir()
    for number in (1, 2, 3):
        workers.step(number)
        watch.poll()
    facts = watch.finish("finished", 0)
    watch.poll()  # too late, and harmless
    assert (facts["steps"], facts["exit_code"]) == (3, 1), "the run is whole, but its books are not"
    shown = stream.getvalue()
    assert shown.count("metrics.jsonl could not be written: Is a directory. Look at the disk and the rights") == 1
    assert (
        shown.count("The run goes on without it.") == 1 and shown.count("tensorboard could not be written: File") == 1
    )
    assert "summary.json could not" not in shown, "once for each reason"
    assert {Path(name).name for name in watch.unwritten} == {"metrics.jsonl", "summary.json"}
    assert "finished at step 3" in shown


def test_an_unknown_kind_of_console_is_refused(workers: Workers) -> None:
    with pytest.raises(ValueError, match="'auto', 'plain' or 'none'"):
        Watch(workers.run, 1, 2, job=JOB, console="fancy")  # type: ignore[arg-type]


def test_an_idle_poll_is_cheap(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run", count=8)
    watch = Watch(workers.run, 1, 8, job=JOB, console="plain", stream=io.StringIO())
    workers.start()
    workers.step(1)
    for worker in range(8):
        workers.write(worker, "stderr", "one\n")
        workers.write(worker, "stdout", "two\n")
    watch.poll()
    costs = []
    for _ in range(50):
        began = time.thread_time()
        watch.poll()
        costs.append(time.thread_time() - began)
    watch.finish("finished", 0)
    workers.close()
    assert sorted(costs)[len(costs) // 2] < 1e-3  # of this thread: other processes do not count


def test_watching_imports_no_torch_and_no_tensorboard_before_there_is_something_to_write(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, module)
    watch = Watch(workers.run, 1, 2, job=Job(), console="none")
    workers.start()
    watch.poll()
    workers.step(1)
    watch.poll()
    assert "tensorboard" not in sys.modules
    watch.finish("finished", 0)


# ------------------------------------------------------------------------------------------------------------- terminal


class Terminal:
    """A pseudo-terminal; `text` collects what was written to it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115
        self.text = ""

    def read(self) -> str:
        """Return what is new."""
        new = b""
        try:
            while piece := os.read(self._master, 1 << 16):
                new += piece
        except BlockingIOError:
            pass
        self.text += new.decode("utf-8")
        return new.decode("utf-8")

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def test_a_terminal_shows_a_block_with_lines_above_it(workers: Workers, terminal: Terminal) -> None:
    watch = Watch(workers.run, 1, 2, job=Job(tensorboard=False, max_steps=10), stream=terminal.stream)
    watch.poll()
    assert "starting the workers" in terminal.read()
    workers.start()
    watch._screen.poll(time.monotonic() + 2.0)  # pyright: ignore[reportPrivateUsage]
    assert "starting the workers" in terminal.read()  # nobody has read yet that they are there
    workers.step(1)
    workers.step(5, metrics={"lr": 0.5})
    workers.emit(Evaluated(step=5, num_samples=30, metrics={"accuracy": 0.75}, duration_s=0.5))
    workers.write(0, "stdout", "\x1b[31mred\x1b[0m text\n50%\r100%\n")
    watch.poll()
    watch._screen.poll(time.monotonic() + 5.0)  # pyright: ignore[reportPrivateUsage]
    shown = plain(terminal.read())
    for part in (
        "5 of 10  50%",
        "lr 0.5",
        "  data 1%  compute 86%  comm 8%  optim 3%  other 2%",
        "●●  2",
        "accuracy 0.75",
    ):
        assert part in shown
    assert "red text\n100%\n" in shown
    assert "\x1b[31mred" in terminal.text
    watch.finish("finished", 0)
    end = terminal.read()
    assert "\x1b[?25h" in end  # the cursor is back
    assert plain(end).split("finished at step 5")[1].strip().endswith("run            run")


def test_the_marks_of_a_terminal_follow_the_members(workers: Workers, terminal: Terminal) -> None:
    watch = Watch(workers.run, 1, 2, job=JOB, stream=terminal.stream)
    supervisor = EventLog(workers.run / "attempt_1" / "events.jsonl", worker=None)

    def marks(after_s: float) -> str:
        watch.poll()
        watch._screen.poll(time.monotonic() + after_s)  # pyright: ignore[reportPrivateUsage]
        return re.findall(r"workers  ([●○✗✓]+  \d(?:  \d lost so far)?)", plain(terminal.read()))[-1]

    workers.start()
    workers.step(1)
    assert marks(2.0) == "●●  2"
    lose(supervisor, 1, 1, members=[0])
    assert marks(4.0) == "●✗  2  1 lost so far"
    workers.start_one(1)
    assert marks(6.0) == "●○  2  1 lost so far"
    supervisor.emit(WorkerJoined(rank=1, step=2, after_s=0.2))
    assert marks(8.0) == "●●  2  1 lost so far"
    supervisor.close()
    watch.finish("finished", 0)


NUMBERS = (
    "1234 of 20000", "6%", "epoch 3 of 40", "1.9876", "lr 0.0001234", "grad_norm 12.35", "samples/s", "a step",
    "data 1%", "compute 86%", "comm 8%", "optim 3%", "other 2%", "accuracy 0.9876", "top5_accuracy 0.9988",
    "loss 0.1235", "at step 1230", "step 1000", "12.0 MiB",
)  # fmt: skip


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120])
def test_no_number_of_the_block_is_cut_at_any_width(
    workers: Workers, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    job = Job(tensorboard=False)
    console = LiveConsole(terminal.stream, run_dir=workers.run, workers=2, local=range(2), max_steps=None)
    watch = Watch(workers.run, 1, 2, job=job, console="none")
    watch._sinks.append(console)  # pyright: ignore[reportPrivateUsage]
    workers.start()
    workers.emit(StreamOpened(name="train", num_samples=4000, epochs=40, last_step=20000))
    workers.step(1200, epoch=2)
    workers.step(1234, epoch=2, loss=1.98764, metrics={"lr": 0.0001234, "grad_norm": 12.3456})
    measured = {"accuracy": 0.98764, "top5_accuracy": 0.99876, "loss": 0.123456}
    workers.emit(Evaluated(step=1230, num_samples=30, metrics=measured, duration_s=0.5))
    workers.emit(CheckpointSaved(step=1000, path="c", num_bytes=12 << 20, stall_s=0.1, write_s=1.0))
    watch.poll()
    console.poll(now=1e9)
    rows = plain(terminal.read()).splitlines()
    watch.finish("finished", 0)
    numbers = {number.replace("1.9876", "1.988") for number in NUMBERS}
    assert {number for number in numbers if not any(number in row for row in rows)} == set()
    below_title = [row for row in rows if "paceline" not in row]
    assert not [row for row in below_title if len(row) > columns or "…" in row]
    assert (len(below_title) > 7) == (columns < 80)  # with room, each has its own single line


def test_the_bar_of_times_is_as_long_as_the_bar_of_steps_and_ends_with_what_is_left(
    workers: Workers, terminal: Terminal
) -> None:
    watch = Watch(workers.run, 1, 2, job=Job(tensorboard=False, max_steps=10), stream=terminal.stream)
    seconds = {"data": 0.0, "compute": 0.05, "communication": 0.0, "optimizer": 0.0, "total": 0.1}
    workers.step(4, seconds={**SECONDS, "total": 9.0})  # what belongs to the first step is left out
    workers.step(5, seconds=seconds)
    watch.poll()
    shown = terminal.read()
    watch.finish("finished", 0)
    bars = {
        row.split()[0]: sum(map(row.count, "━─█")) for row in plain(shown).splitlines() if row[6:10] in ("step", "time")
    }
    assert bars == {"step": 40, "time": 40}
    assert "compute 50%  comm 0%  optim 0%  other 50%" in plain(shown)
    assert re.search(r"\x1b\[32m█{20}\x1b\[0m\x1b\[90m█{20}\x1b\[0m", shown)


def test_a_terminal_of_one_host_of_several_waits_for_its_own_workers_only(tmp_path: Path, terminal: Terminal) -> None:
    workers = Workers(tmp_path / "run", count=4)
    watch = Watch(workers.run, 1, 4, job=JOB, stream=terminal.stream, local=[0, 1])
    workers.start_one(0)
    watch.poll()
    assert "●○  1 of 2 here, 4 in all" in plain(terminal.read())
    workers.start_one(1)
    watch.poll()
    watch._screen.poll(time.monotonic() + 5.0)  # pyright: ignore[reportPrivateUsage]
    shown = plain(terminal.read())
    watch.finish("finished", 0)
    workers.close()
    assert "the first step is under way" in shown and "●●  2 here, 4 in all" in shown


def test_a_terminal_that_understands_nothing_gets_plain_lines(
    workers: Workers, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    watch = Watch(workers.run, 1, 2, job=JOB, stream=terminal.stream)
    workers.step(1)
    watch.finish("finished", 0)
    assert "\x1b" not in terminal.read()


def test_the_debugger_s_terminal_is_left_alone(workers: Workers, terminal: Terminal) -> None:
    watch = Watch(workers.run, 1, 2, job=Job(launcher="inline", tensorboard=False), stream=terminal.stream)
    workers.step(1)
    watch.finish("finished", 0)
    assert "\x1b" not in terminal.read()


# -------------------------------------------------------------------------------------------------------------- wording


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.3141, "2.314"),
        (0.0003, "0.0003"),
        (1e-9, "1e-09"),
        (3, "3"),
        (1.0, "1"),
        (None, "nan"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_four_significant_digits(value: float | None, text: str) -> None:
    assert number_text(value) == text


def test_the_table_of_a_run_without_anything_optional_is_short(workers: Workers) -> None:
    watch = Watch(workers.run, 1, 2, job=JOB, console="none")
    workers.step(1, loss=None, seconds={})
    table = closing_table(watch.finish("finished", 0))
    assert "loss" not in table and "checkpoint" not in table and "communication  0.0%" in table
