"""On a terminal a block at the bottom tells how the run stands, with lines above it."""

from __future__ import annotations

import os
import pty
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_run_files import JOB, SECONDS, Workers, lose
from paceline.events import (
    CheckpointSaved,
    Evaluated,
    EventLog,
    StreamOpened,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
)
from paceline.monitor.console.live import LiveConsole
from paceline.monitor.watch import Watch
from paceline.plan.job import Job


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path / "run")
    yield workers
    workers.close()


class Terminal:
    """A pseudo-terminal; `text` collects what was written to it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115  # closed by close()
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
    watch._screen.poll(time.monotonic() + 2.0)
    assert "starting the workers" in terminal.read()  # nobody has read yet that they are there
    workers.step(1)
    workers.step(5, metrics={"lr": 0.5})
    workers.emit(Evaluated(step=5, num_samples=30, metrics={"accuracy": 0.75}, duration_s=0.5))
    workers.write(0, "stdout", "\x1b[31mred\x1b[0m text\n50%\r100%\n")
    watch.poll()
    watch._screen.poll(time.monotonic() + 5.0)
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
        watch._screen.poll(time.monotonic() + after_s)
        shown = r"workers  ([●○✗✓·]+  \d(?:, \d has left)?(?:  \d lost so far)?)"
        return re.findall(shown, plain(terminal.read()))[-1]

    workers.start()
    workers.step(1)
    assert marks(2.0) == "●●  2"
    lose(supervisor, 1, 1, members=[0])
    assert marks(4.0) == "●✗  2  1 lost so far"
    workers.start_one(1)
    assert marks(6.0) == "●○  2  1 lost so far"
    supervisor.emit(WorkerJoined(rank=1, step=2, after_s=0.2))
    assert marks(8.0) == "●●  2  1 lost so far"
    supervisor.emit(WorkerLeft(rank=1, host="a", step=3, reason="SIGTERM", members=[0]))
    workers.logs[1].emit(WorkerFinished(rank=1, step=3, peak_memory_bytes=1))  # whichever file is read first
    assert marks(10.0) == "●·  1, 1 has left  1 lost so far"
    workers.start_one(1)
    assert marks(12.0) == "●○  2  1 lost so far"
    supervisor.close()
    watch.finish("finished", 0)


NUMBERS = (
    "1234 of 20000", "6%", "epoch 3 of 40", "1.9876", "lr 0.0001234", "grad_norm 12.35", "samples/s", "a step",
    "data 1%", "compute 86%", "comm 8%", "optim 3%", "other 2%", "accuracy 0.9876", "top5_accuracy 0.9988",
    "loss 0.1235", "at step 1230", "step 1000", "12.0 MiB", "0:8%", "1:8%",
)  # fmt: skip


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120])
def test_no_number_of_the_block_is_cut_at_any_width(
    workers: Workers, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    job = Job(tensorboard=False)
    console = LiveConsole(terminal.stream, run_dir=workers.run, workers=2, local=range(2), max_steps=None)
    watch = Watch(workers.run, 1, 2, job=job, console="none")
    watch._sinks.append(console)
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
    assert (len(below_title) > 8) == (columns < 80)  # with room, each has its own single line


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
    watch._screen.poll(time.monotonic() + 5.0)
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
