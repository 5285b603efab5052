"""Programs of TensorFlow as its guides have them, unmodified: their losses, and what becomes of them when a task is
killed. Their imports alone take half a minute on a busy machine."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from programs import PACELINE, Program, command, record, run

PROGRAMS = Path(__file__).with_name("programs")
LIMIT_S = 600.0

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    yield


def started(name: str, *more: str) -> list[str]:
    return [*PACELINE, "run", "--for", "tensorflow", str(PROGRAMS / name), "--run-dir", "run", *more]


def alone(name: str, *more: str, folder: Path) -> dict[int, float]:
    """The losses of the program in one process of plain Python."""
    code, output = run(sys.executable, PROGRAMS / name, *more, cwd=folder, cold=True, limit_s=LIMIT_S)
    assert code == 0, output
    return losses(output)


def losses(output: str) -> dict[int, float]:
    return {int(epoch): float(loss) for epoch, loss in re.findall(r"^epoch (\d+) loss (\S+)", output, re.MULTILINE)}


def events(run_dir: Path, rank: int, *, attempt: int = 1) -> list[dict[str, Any]]:
    path = run_dir / f"attempt_{attempt}/worker_{rank}/events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def count(run_dir: Path, rank: int, kind: str) -> int:
    return sum(event["event"] == kind for event in events(run_dir, rank))


def said(run_dir: Path, rank: int = 0, *, attempt: int = 1) -> str:
    path = run_dir / f"attempt_{attempt}/worker_{rank}/stdout.log"
    return path.read_text() if path.exists() else ""


def until(is_so: Callable[[], bool], program: Program) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if program.process.poll() is not None or time.monotonic() > deadline:
            program.process.kill()
            raise AssertionError(program.end()[1])
        time.sleep(0.1)


def kill(run_dir: Path, rank: int) -> None:
    os.kill([one["pid"] for one in events(run_dir, rank) if one["event"] == "TaskStarted"][-1], signal.SIGKILL)


def test_a_loop_of_its_own_on_two_workers_has_the_losses_of_one_process(tmp_path: Path) -> None:
    expected = alone("multi_worker_loop.py", folder=tmp_path)
    code, output = run(*started("multi_worker_loop.py", "--workers", "2"), cwd=tmp_path, cold=True, limit_s=LIMIT_S)
    assert code == 0, output
    assert losses(output) == pytest.approx(expected, rel=1e-4) and len(expected) == 3
    assert [count(tmp_path / "run", rank, "TaskReady") for rank in range(2)] == [1, 1]


def test_keras_fit_whose_worker_is_killed_in_the_middle_goes_on_from_its_backup(tmp_path: Path) -> None:
    expected = alone("multi_worker_fit.py", folder=tmp_path)
    run_dir, more = tmp_path / "run", ["--workers", "2", "--backup", "backup", "--gate", "gate"]
    with command(*started("multi_worker_fit.py", *more), cwd=tmp_path, cold=True) as program:
        until(lambda: all("epoch 2 loss" in said(run_dir, rank) for rank in range(2)), program)
        kill(run_dir, 1)
        until(lambda: (run_dir / "attempt_2").exists(), program)
        (tmp_path / "gate").touch()
        code, output = program.end(limit_s=LIMIT_S)
    assert code == 0, output
    assert "killed by signal 9: all start again, and the program goes on from what it has saved" in output
    assert [attempt["state"] for attempt in record(run_dir)["attempts"]] == ["failed", "finished"]
    again = losses(said(run_dir, attempt=2))
    assert min(again) > 1, "it went on from its backup, and not from the beginning"
    assert losses(output) == pytest.approx(expected, rel=1e-4) and len(expected) == 4


def test_a_killed_worker_beside_servers_comes_back_and_the_chief_goes_on(tmp_path: Path) -> None:
    run_dir, more = tmp_path / "run", ["--workers", "2", "--servers", "1", "--epochs", "6", "--pause", "2"]
    with command(*started("parameter_server.py", *more), cwd=tmp_path, cold=True) as program:
        until(lambda: "epoch 2 loss" in said(run_dir), program)
        kill(run_dir, 1)
        code, output = program.end(limit_s=LIMIT_S)
    assert code == 0, output
    found = losses(output)
    assert sorted(found) == list(range(1, 7)) and found[6] < 0.27 < found[1], output
    assert "killed by signal 9: it is started again, and the others go on" in output
    assert [count(run_dir, rank, "TaskLost") for rank in range(4)] == [0, 1, 0, 0]
    assert [count(run_dir, rank, "WorkerFinished") for rank in range(4)] == [1, 1, 1, 1]
    assert len(record(run_dir)["attempts"]) == 1
    assert program.left() == []


def test_at_sigterm_a_run_ends_as_preempted_and_goes_on_at_its_next_start(tmp_path: Path) -> None:
    """TensorFlow keeps processes under this strategy from ending at SIGTERM."""
    run_dir, more = tmp_path / "run", ["--workers", "2", "--grace-s", "6", "--folder", "saved", "--epochs"]
    with command(*started("multi_worker_loop.py", *more, "100000"), cwd=tmp_path, cold=True) as program:
        until(lambda: "epoch 2 loss" in said(run_dir), program)
        os.kill(program.process.pid, signal.SIGTERM)
        code, output = program.end(limit_s=LIMIT_S)
    assert code == 75, output
    last = max(losses(output))
    code, output = run(*started("multi_worker_loop.py", *more, str(last + 2)), cwd=tmp_path, cold=True, limit_s=LIMIT_S)
    assert code == 0, output
    assert "goes on after epoch" in output and last + 2 in losses(output) and 1 not in losses(output)


def test_a_mirrored_strategy_is_one_process_without_a_cluster(tmp_path: Path) -> None:
    code, plain = run(sys.executable, PROGRAMS / "mirrored.py", cwd=tmp_path, cold=True, limit_s=LIMIT_S)
    assert code == 0, plain
    code, output = run(*started("mirrored.py", "--workers", "1"), cwd=tmp_path, cold=True, limit_s=LIMIT_S)
    assert code == 0 and "TF_CONFIG None" in output, output
    (losses_alone,) = re.findall(r"^losses .*", plain, re.MULTILINE)
    assert losses_alone in output


def test_keras_3_fit_on_several_workers_fails_in_tensorflow_and_is_told_once(tmp_path: Path) -> None:
    code, output = run(*started("keras3_fit.py", "--workers", "2"), cwd=tmp_path, cold=True, limit_s=LIMIT_S)
    assert code == 1 and "PerReplica" in output, output
    assert output.count("Traceback (most recent call last):") == 1
