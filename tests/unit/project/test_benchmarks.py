"""What the benchmarks judge by: losses side by side, who is there and has the run's state, how far a save had come."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("driving.runs")


@pytest.fixture
def save_kills(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("save_kills")


@pytest.fixture
def asleep() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for the end of its input."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def metrics(folder: Path, losses: list[tuple[int, float]], *, rest: str = "") -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in losses]
    (folder / "metrics.jsonl").write_text("".join(lines) + rest)
    return folder


def test_the_largest_relative_difference_of_a_loss_is_found_with_its_step(runs: Any, tmp_path: Path) -> None:
    plain = metrics(tmp_path / "plain", [(1, 2.0), (2, 1.0), (3, 0.5)])
    hit = metrics(tmp_path / "hit", [(1, 2.0), (2, 1.01), (3, 0.501)])
    found = runs.compared(hit, plain, judged=False)
    assert (found.num_steps, found.at_step) == (3, 2)
    assert found.largest == pytest.approx(0.01)
    assert found.of_last == pytest.approx(0.002)


def test_runs_of_other_steps_are_not_compared(runs: Any, tmp_path: Path) -> None:
    plain = metrics(tmp_path / "plain", [(1, 2.0), (2, 1.0)])
    with pytest.raises(SystemExit, match=r"missing \[2\]"):
        runs.compared(metrics(tmp_path / "hit", [(1, 2.0)]), plain, judged=False)


def test_of_a_step_that_was_taken_again_the_newer_loss_counts_and_a_torn_line_does_not(
    runs: Any, tmp_path: Path
) -> None:
    folder = metrics(tmp_path / "run", [(1, 2.0), (2, 9.0), (2, 1.0)], rest='{"step": 3, "lo')
    assert runs.losses_of(folder) == {1: 2.0, 2: 1.0}


def test_who_has_committed_nothing_or_is_stopped_or_was_killed_does_not_hold_the_state(
    runs: Any, tmp_path: Path, asleep: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stand = runs.Run(tmp_path), tmp_path / "stand_2"
    stand.write_text(f"{asleep.pid:>10} {0:>10}\n")
    assert [(one.rank, one.pid, one.holds_state) for one in run.stands()] == [(2, asleep.pid, False)]
    stand.write_text(f"{asleep.pid:>10} {7:>10}\n")
    assert run.step() == 7
    assert run.stands()[0].holds_state
    asleep.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, asleep.pid, os.WSTOPPED | os.WNOWAIT)
    assert not run.stands()[0].holds_state
    assert run.kill(run.stands()[0])
    monkeypatch.setattr(runs, "state_of", lambda pid: "R")  # the system shows it for some more milliseconds
    assert run.stands() == []


def test_the_remains_of_a_save_tell_how_far_it_had_come(save_kills: Any, tmp_path: Path) -> None:
    def stage() -> str:
        return save_kills.where(tmp_path, 24, {"step_00000024.partial-1"})

    (tmp_path / "step_00000024.partial-1").mkdir()  # of a process before
    assert stage() == "before the first file"
    partial = tmp_path / "step_00000024.partial-2"
    partial.mkdir()
    assert stage() == "being written"
    (partial / save_kills.COMMIT_MARKER).write_text('{"step": 24}')
    assert stage() == "committed, without its name"
    assert save_kills.marked_step(tmp_path) == 24
    final = partial.rename(tmp_path / "step_00000024")
    assert stage() == "committed, and over"
    final.rename(tmp_path / "step_00000024.removed-2")
    assert save_kills.marked_step(tmp_path) == 0


DRIVER = """\
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from driving.runs import Run

run = Run(Path(sys.argv[2]))
run.start()
print(run.pid, flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not tell")
def test_a_run_ends_with_the_benchmark_that_drives_it(tmp_path: Path) -> None:
    words = [sys.executable, "-c", DRIVER, str(BENCHMARKS), str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        watched = os.pidfd_open(pid)
        driver.kill()
    try:
        has_ended, _, _ = select.select([watched], [], [], 10)
        assert has_ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(watched, signal.SIGKILL)
        os.close(watched)


STEPPING = """\
import sys, time
sys.path.insert(0, {programs!r})
from measured import Measured

steps, out, name, seconds = int(sys.argv[1]), *sys.argv[2:4], float(sys.argv[4])
measured = Measured()
for step in range(steps):
    with open("order", "a") as order:
        order.write(name)
    if seconds < 0:
        raise SystemExit("no step at all")
    time.sleep(seconds)  # computes
    measured.step()
measured.write(out, 0)
"""


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Make a job of one worker, by its name and the seconds of its steps."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPPING.format(programs=str(BENCHMARKS / "programs")))
    turns = importlib.import_module("driving.interleaved")

    def job(name: str, seconds: float) -> Any:
        words = [sys.executable, "steps.py"]
        return turns.Job(command=lambda steps, out: [*words, str(steps), out, name, str(seconds)], workers=1)

    return job


def test_jobs_take_turns_of_so_many_steps_and_stand_still_meanwhile(stepping: Any, tmp_path: Path) -> None:
    turns = importlib.import_module("driving.interleaved")
    quick, slow = turns.interleaved([stepping("a", 0.001), stepping("b", 0.05)], turns=3, block=2)
    assert (tmp_path / "order").read_text()[4:] == "aabbbbaaaabb"
    assert len(quick) == len(slow) == 3
    assert min(slow) >= 50
    assert min(quick) >= 1


def test_a_job_that_ends_ends_the_measurement_with_what_it_said(stepping: Any) -> None:
    turns = importlib.import_module("driving.interleaved")
    with pytest.raises(SystemExit, match=r"(?s)steps.py .* b -1: .*no step at all"):
        turns.interleaved([stepping("a", 0.001), stepping("b", -1)], turns=3, block=2)
