"""A watch shows a run while it goes on, and says in the end how it went: in pipes, unseen, in files."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_run_files import JOB, Workers
from paceline.events import (
    CheckpointSaved,
    Evaluated,
    EventLog,
    Note,
    StepDone,
    StreamOpened,
    Warned,
    WorkerFinished,
)
from paceline.launch.job.outcome import lost_worker
from paceline.monitor.attempt_end import AttemptEnd
from paceline.monitor.console.closing_table import closing_table
from paceline.monitor.console.plain import PlainConsole
from paceline.monitor.console.progress import number_text
from paceline.monitor.records.failure import Failure
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.watch import Watch
from paceline.plan.job import Job


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
    report = shown.index("worker 1 (host a, pid 11) failed after step 1: ValueError: bad\nTraceback")
    assert report < shown.index("worker 0 stopped because of it") < shown.index("failed after step 1, ")
    assert watch.exit_note == "worker 1 (host a, pid 11) failed after step 1: ValueError: bad"
    assert facts["peak_memory_bytes"] == 1 << 20


@pytest.mark.parametrize("job", [JOB, Job(program="train.py", run_for="tensorflow")], ids=["torch", "tensorflow"])
def test_lines_of_information_are_left_out_in_programs_of_tensorflow_alone(workers: Workers, job: Job) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=job, stream=stream)
    workers.write(0, "stderr", "I1128 14:00:00.123456    4711 train.py:7] epoch 1\nE1128 a bad one\n")
    watch.finish("finished", 0)
    assert ("epoch 1" in stream.getvalue()) is (job.run_for is None)
    assert "a bad one" in stream.getvalue()


@pytest.mark.parametrize(("num_here", "step"), [(None, 7), (4, 6)], ids=["together", "apart"])
def test_a_killed_worker_has_committed_the_step_that_it_had_no_time_to_write(
    workers: Workers, num_here: int | None, step: int
) -> None:
    """As the closing table says; where replicas take steps by themselves, only what it wrote itself is known."""
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    workers.step(6)
    done = StepDone(step=7, epoch=0, num_samples=8, loss=1.0, metrics={}, seconds={}, num_here=num_here)
    workers.logs[0].emit(done)
    watch.finish("failed", 1, [Failure(worker=1, host="a", pid=11, signal=9)])
    shown = stream.getvalue()
    assert f"worker 1 (host a, pid 11) was killed by signal 9 (SIGKILL) after step {step}\n" in shown
    assert watch.failures[0].step == step and "failed after step 7, " in shown


def test_workers_of_a_lost_host_have_come_as_far_as_the_others(workers: Workers) -> None:
    """Their files are on that host."""
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    workers.step(6)
    exit = lost_worker(2, host="b", pid=12, kind="HostLost", message="host b was lost")
    watch.finish("failed", 1, [Failure(worker=2, host="b", pid=12, error=exit.error)])
    assert "worker 2 (host b, pid 12) failed after step 6: HostLost: host b was lost\n" in stream.getvalue()


def test_a_run_that_failed_before_its_first_step_has_no_table(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    watch.finish("failed", 2)
    assert stream.getvalue() == "\nfailed before the first step; logs are in run/attempt_1\n"


@pytest.mark.parametrize(("exit_code", "why"), [(143, " (SIGTERM)"), (130, " (Ctrl-C)"), (1, "")])
def test_a_run_that_was_stopped_before_its_first_step_says_by_what(workers: Workers, exit_code: int, why: str) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    watch.finish("stopped", exit_code)
    assert stream.getvalue() == f"\nstopped before the first step{why}; logs are in run/attempt_1\n"


@pytest.mark.parametrize(
    ("max_steps", "what"),
    [
        (200, "--max-steps beyond 253 (it is 200 now)"),
        (253, "--max-steps beyond 253 (it is 253 now)"),
        (None, "more epochs in the script"),
        (300, "more epochs in the script"),
    ],
)
def test_a_run_continued_from_its_own_end_says_what_would_take_it_further(
    workers: Workers, max_steps: int | None, what: str
) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=Job(tensorboard=False, max_steps=max_steps), stream=stream)
    workers.start(resumed_from_step=253)
    watch.finish("finished", 0)
    assert f"to train on  {what}; or --fresh, to start over\n" in stream.getvalue()


def test_the_event_of_a_killed_worker_has_its_last_step(workers: Workers) -> None:
    watch = Watch(workers.run, 1, 2, job=JOB, console="none")
    log = EventLog(workers.attempt / "events.jsonl", worker=None)
    workers.start()
    workers.step(6)
    failure = Failure(worker=1, host="a", pid=11, signal=9)
    AttemptEnd(workers.attempt, log=log, watch=watch, record=None, since=0.0).close("failed", 1, (failure,))
    (told,) = [json.loads(line) for line in (workers.attempt / "events.jsonl").read_text().splitlines()][:1]
    assert (told["event"], told["step"], told["follows"]) == ("WorkerFailed", 6, False)
    assert told["reason"] == "worker 1 (host a, pid 11) was killed by signal 9 (SIGKILL) after step 6"


def test_a_stopped_run_says_what_stopped_it(workers: Workers) -> None:
    watch = Watch(workers.run, 1, 2, job=JOB, console="none")
    workers.step(3)
    watch.finish("stopped", 130)
    assert watch.exit_note == "stopped after step 3 (Ctrl-C)"


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
    watch._sinks.append(console)
    for number in range(1, 8):
        workers.step(number)
        watch.poll()
        console.poll(now=100.0 + number)
    workers.step(8)
    watch.finish("finished", 0)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1", "3", "5", "7", "8"]
    assert stream.getvalue().splitlines()[0] == "step 1  loss 10"  # its speed says nothing about the others
    assert stream.getvalue().splitlines()[1].endswith("data 1% compute 86% comm 8% optim 3% other 2%  idle 0:8% 1:8%")


def test_a_plain_line_says_how_far_the_run_is_to_go_and_counts_epochs_from_one(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=Job(tensorboard=False, max_steps=90), stream=stream)
    workers.step(1)
    watch.poll()
    workers.emit(StreamOpened(name="train", num_samples=80, epochs=3, last_step=30))
    workers.step(25, epoch=2)
    watch.finish("finished", 0)
    assert stream.getvalue().startswith("step 1 of 90  loss 10\nstep 25 of 30  epoch 3 of 3  loss 0.4  ")


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
    assert sorted(path.name for path in workers.run.iterdir()) == [".lock", "attempt_1", "run.json"]  # the head's


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
    assert (facts["steps"], facts["exit_code"]) == (3, 1), "the run is whole, but its files are not"
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
        Watch(workers.run, 1, 2, job=JOB, console="fancy")  # type: ignore[arg-type]  # that is refused


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


@pytest.mark.parametrize(
    ("is_head", "says"),
    [
        (True, "none of this attempt is complete, 1 step is lost: --save-every STEPS"),
        (False, "none by this host's workers: the first host's table has"),
    ],
)
def test_a_host_that_follows_a_head_does_not_say_that_the_run_has_no_checkpoint(
    is_head: bool, says: str, workers: Workers
) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream, record=is_head)
    workers.step(1)
    watch.finish("stopped", 75)
    (row,) = [line for line in stream.getvalue().splitlines() if line.startswith("  checkpoint ")]
    assert row.split(maxsplit=1)[1].startswith(says)


def test_the_table_of_a_run_without_anything_optional_is_short(workers: Workers) -> None:
    watch = Watch(workers.run, 1, 2, job=JOB, console="none")
    workers.step(1, loss=None, seconds={})
    table = closing_table(watch.finish("finished", 0))
    assert "loss" not in table and "checkpoint" not in table and "communication  0.0%" in table
