"""The warm parent is stopped (SIGSTOP) while its workers run: it is continued once they wait for it, and named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from elastic_runs import happened
from paceline.launch.fork.parent_watch import ANSWER_S, LIMIT_S, TURN_S, ParentWatch
from paceline.processes import process_state
from programs import GONE_S, PACELINE, TRAIN, Announcements, Program, checkpoints, command, losses, write_program

CONTINUED = "is stopped (SIGSTOP, or a debugger), and workers wait for it: it is continued"
TELL = "            tell(worker)\n"
WAIT = '            open(f"go_{worker.rank}").read()\n'  # a named pipe: until the test opens it
LONG = ("--epochs", "5000")  # it ends by Ctrl-C
ELASTIC = ("--plan", "replicas=1-2+batch(size=12,micro=3)")


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Announcements]:
    announcements = Announcements(tmp_path / "pipe")
    for rank in range(2):
        os.mkfifo(tmp_path / f"go_{rank}")
    yield announcements
    announcements.close()


def started(folder: Path, *options: str, args: Sequence[str] = ()) -> tuple[str | Path, ...]:
    program = write_program(folder, text=TRAIN.replace(TELL, TELL + WAIT))
    own = ("--tell", "pipe", "--tell-at", "3", *args)
    return (*PACELINE, "run", program, "--run-dir", "run", *options, "--", *own)


def stop_parent(program: Program) -> int:
    """Stop the warm parent and return its pid, when it is stopped."""
    (parent,) = psutil.Process(program.process.pid).children()
    parent.suspend()
    until_stopped(parent.pid)
    return parent.pid


def until_stopped(pid: int) -> None:
    deadline = time.monotonic() + GONE_S
    while process_state(pid) != "stopped":
        assert time.monotonic() < deadline, "the signal has not arrived"
        os.sched_yield()  # nobody tells when it is no child of ours


def go_on(folder: Path, ranks: Sequence[int] = (0, 1)) -> None:
    """Let the workers that wait go on."""
    for rank in ranks:
        with open(folder / f"go_{rank}", "w"):
            pass


def test_a_run_whose_warm_parent_is_stopped_comes_to_its_end(tmp_path: Path, pipe: Announcements) -> None:
    with command(*started(tmp_path), cwd=tmp_path) as program:
        program.told(pipe, 2)
        parent = stop_parent(program)
        go_on(tmp_path)
        code, output = program.end(limit_s=4 * GONE_S)
        assert program.left() == []
    assert code == 0, output
    assert f"the process that workers are forked from (paceline-warm, pid {parent}) {CONTINUED}" in output
    assert len(losses(tmp_path / "run")) == 8 and output.count("continued") == 1


def test_ctrl_c_saves_and_leaves_though_the_warm_parent_is_stopped(tmp_path: Path, pipe: Announcements) -> None:
    with command(*started(tmp_path, args=LONG), cwd=tmp_path) as program:
        program.told(pipe, 2)
        stop_parent(program)
        os.kill(program.process.pid, signal.SIGINT)
        go_on(tmp_path)
        code, output = program.end(limit_s=4 * GONE_S)
    assert code == 75, output
    assert CONTINUED in output and checkpoints(tmp_path / "run")


def test_a_worker_that_is_lost_under_a_stopped_warm_parent_is_replaced(tmp_path: Path, pipe: Announcements) -> None:
    with command(*started(tmp_path, *ELASTIC, args=LONG), cwd=tmp_path) as program:
        told = {one["rank"]: one["pid"] for one in program.told(pipe, 2)}
        stop_parent(program)
        os.kill(told[1], signal.SIGKILL)
        go_on(tmp_path, [0])
        happened(tmp_path / "run", "WorkerJoined", program.process)
        os.kill(program.process.pid, signal.SIGINT)
        code, output = program.end(limit_s=4 * GONE_S)
    assert code == 75, output
    assert CONTINUED in output and "said nothing" not in output
    assert f"worker 1 (pid {told[1]}) killed by signal 9 after step" in " ".join(output.split()), output


class Asked:
    """A watch on a process of this test, in a time of the test's own."""

    def __init__(self, pid: int) -> None:
        self.questions, self.said, self.now = 0, list[str](), 0.0
        self.watch = ParentWatch(pid, self.ask)

    def ask(self) -> None:
        self.questions += 1

    def pass_time(self, seconds: float, *, owes: bool = True, is_ready: bool = True) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TURN_S / 4
            self.watch.tick(self.now, owes=owes, is_ready=is_ready, say=self.said.append)


@pytest.fixture
def child() -> Iterator[psutil.Popen]:
    with psutil.Popen(["sleep", "600"]) as process:
        yield process
        if process.poll() is None:
            process.kill()


def test_one_that_is_stopped_again_is_killed(child: psutil.Popen) -> None:
    asked = Asked(child.pid)
    for _ in range(2):
        child.suspend()
        until_stopped(child.pid)
        asked.pass_time(ANSWER_S + TURN_S)
    assert CONTINUED in asked.said[0] and "is stopped again: it is killed" in asked.said[1]
    assert child.wait(GONE_S) == -signal.SIGKILL and asked.questions == 1


def test_one_that_runs_has_longer_and_one_that_imports_has_no_limit(child: psutil.Popen) -> None:
    asked = Asked(child.pid)
    asked.pass_time(2 * LIMIT_S, is_ready=False)
    assert asked.said == []
    asked.pass_time(2 * TURN_S)  # its imports are done, and the answer is on its way
    assert asked.said == []
    asked.watch.answered()
    asked.pass_time(LIMIT_S)
    assert asked.said == []
    asked.pass_time(2 * TURN_S)
    assert "has not answered for 30 s: it is killed" in asked.said[0]
    assert child.wait(GONE_S) == -signal.SIGKILL


def test_one_that_owes_nothing_is_not_asked_and_one_that_answers_is_asked_again(child: psutil.Popen) -> None:
    asked = Asked(child.pid)
    asked.pass_time(10 * TURN_S, owes=False)
    assert asked.questions == 0
    for _ in range(3):
        asked.pass_time(2 * TURN_S)
        asked.watch.answered()
    assert asked.questions == 3 and not asked.said


def test_time_in_which_the_supervisor_was_stopped_does_not_count(child: psutil.Popen) -> None:
    asked = Asked(child.pid)
    asked.pass_time(TURN_S)
    asked.now += 10 * LIMIT_S
    asked.pass_time(TURN_S)
    assert not asked.said and child.is_running()
