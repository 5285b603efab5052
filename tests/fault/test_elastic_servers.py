"""Parameter servers while workers are lost and come: the same losses, no sample lost or used twice, no server left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from fault.elastic_runs import LIMIT_S, assert_unharmed, finish, reached, start, trained
from paceline.monitor.audit import audit

pytestmark = pytest.mark.timeout(LIMIT_S + 20)

PLAN = "replicas=2-4+parameterserver(servers=2,bucket_bytes=400)+batch(size=20,micro=2)+compute(precision=fp64)"


@pytest.mark.parametrize(("worker", "where"), [(0, "backward"), (1, "vote"), (3, "committed")])
def test_a_worker_killed_in_a_step_costs_no_step(tmp_path: Path, worker: int, where: str) -> None:
    run = trained(tmp_path / "a", {"worker": worker, "step": 6, "where": where}, plan=PLAN, pause_s=0.05)
    assert_unharmed(run)
    (lost,) = run.events("WorkerLost")
    assert lost["rank"] == worker
    assert (run.run_dir / "checkpoints" / "step_00000012").is_dir()


def test_replicas_that_take_turns_leave_together_and_any_sync_goes_on(tmp_path: Path) -> None:
    turns = "replicas=3+parameterserver(servers=2,staleness=none)+batch(size=20,micro=2)+compute(precision=fp64)"
    options = {"turns": True, "pause_s": 0.05, "plan": turns}
    process = start(tmp_path / "a", **options, job={"workers": 3, "max_steps": 10_000})
    reached(tmp_path / "a" / "run", 12, process)
    process.send_signal(signal.SIGTERM)
    first = finish(tmp_path / "a", process)
    assert first.code == 75, first.output
    stands = max(row["step"] for row in first.metrics())
    assert (first.run_dir / "checkpoints" / f"step_{stands:08}").is_dir(), first.output
    whole = "replicas=2+batch(size=20,micro=2)+compute(precision=fp64)"
    then = trained(tmp_path / "a", turns=True, plan=whole, job={"workers": 2, "max_steps": stands + 20})
    assert then.code == 0, then.output
    judged = audit(then.run_dir)
    assert judged.verdict == "clean", judged


def test_no_server_outlives_a_run_whose_supervisor_is_killed(tmp_path: Path) -> None:
    plan = "replicas=2+parameterserver(servers=2)+batch(size=20,micro=2)"
    process = start(tmp_path / "a", plan=plan, job={"workers": 2, "max_steps": 10_000}, pause_s=0.02)
    reached(tmp_path / "a" / "run", 2, process)
    there = servers_of(tmp_path / "a" / "run")
    assert len(there) == 2
    process.send_signal(signal.SIGKILL)
    finish(tmp_path / "a", process)
    deadline = time.monotonic() + 20
    while (left := servers_of(tmp_path / "a" / "run")) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def servers_of(run_dir: Path) -> list[int]:
    """The servers that write to the logs of this run's workers."""
    found: list[int] = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            is_server = (one / "comm").read_text().strip() == "paceline-server"
            if is_server and (one / "fd" / "2").readlink().is_relative_to(run_dir):
                found.append(int(one.name))
        except OSError:  # it has gone meanwhile
            continue
    return found


def test_a_replacement_meets_the_servers_and_works(tmp_path: Path) -> None:
    run = trained(
        tmp_path / "a", {"worker": 2, "step": 4, "where": "forward"}, plan=PLAN, pause_s=0.2, job={"max_steps": 16}
    )
    assert run.code == 0, run.output
    (joined,) = run.events("WorkerJoined")
    assert joined["rank"] == 2 and run.workers() == [0, 1, 2, 3]
    assert run.weights() > 0, "all have the same"
