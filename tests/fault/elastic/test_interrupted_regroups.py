"""Ctrl-C while workers recover from the loss of another: the first finishes the step and saves, the second ends all."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

import warm
from elastic_runs import LIMIT_S, assert_unharmed, finish, start, trained, until
from paceline.launch.coordinator.job_end import STOP_S
from supervised_launch import Lines

# Worker 3 falls silent in the recovery from worker 1, which lasts until it is given up, 3 s later.
FAULTS: list[dict[str, Any]] = [
    {"worker": 1, "step": 6, "where": "forward"},
    {"worker": 3, "step": 6, "where": "regroup", "signal": int(signal.SIGSTOP)},
]
JOB = {"silence_s": 3.0}

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def in_a_regroup(folder: Path) -> warm.Process:
    """A run in whose recovery the others wait for a silent worker now."""
    process = start(folder, *FAULTS, job=JOB, no_joins=True)
    until((folder / "fault_1").exists, process, "no worker was lost in the recovery")
    return process


def test_the_first_ctrl_c_in_a_regroup_has_the_step_finished_and_saved(tmp_path: Path) -> None:
    process = in_a_regroup(tmp_path / "a")
    process.send_signal(signal.SIGINT)
    run = finish(tmp_path / "a", process)
    assert run.code == 75, run.output
    assert "everything is saved" in run.output and "go on with: " in run.output
    steps = [row["step"] for row in run.metrics()]
    assert steps == list(range(1, len(steps) + 1)) and 6 <= len(steps) < 12
    assert (run.run_dir / "checkpoints" / f"step_{len(steps):08}").is_dir()
    assert_unharmed(trained(tmp_path / "a", *FAULTS, job=JOB))


def test_the_second_ctrl_c_in_a_regroup_ends_the_run_at_once_and_the_newest_checkpoint_is_whole(tmp_path: Path) -> None:
    process = in_a_regroup(tmp_path / "a")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    Lines(process.stdout.fileno()).until("Ctrl-C came: finishing the step in hand", limit_s=LIMIT_S)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    run = finish(tmp_path / "a", process)
    assert run.code == 130, run.output
    assert time.monotonic() - began < STOP_S, "the stopped worker did not wait for SIGKILL"
    assert "go on with: " in run.output
    assert not list((run.run_dir / "checkpoints").glob("*partial*"))
    assert_unharmed(trained(tmp_path / "a", *FAULTS, job=JOB))
