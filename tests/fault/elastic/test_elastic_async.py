"""Replicas that do not wait for each other, while workers are lost, come and leave: each sample once, nobody waits."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_runs import LIMIT_S, Run, finish, reached, resized, servers_of, start, trained
from paceline.monitor.audit.audit import audit

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def plan(staleness: int | None, *, least: int = 2, most: int = 4) -> str:
    told = str(staleness).lower()
    return (
        f"replicas={least}-{most}+parameterserver(servers=2,staleness={told})+batch(size=20,micro=2)"
        "+compute(precision=fp64)"
    )


def assert_each_sample_once(run: Run, *, steps: int, untold: int = 0) -> list[dict[str, Any]]:
    """All steps are in the ledgers, and told but for those whose worker could not; returns what was told."""
    assert run.code == 0, run.output
    told = run.metrics()
    numbers = [row["step"] for row in told]
    assert sorted(set(numbers)) == sorted(numbers) and steps - untold <= len(numbers) <= steps, run.output
    assert run.weights() > 0, "all have the same"
    judged = audit(run.run_dir)
    assert judged.verdict == "clean", judged
    assert not servers_of(run.run_dir)
    return told


def test_killed_at_any_point_of_a_batch_a_worker_stops_nobody(tmp_path: Path) -> None:
    faults = [
        {"worker": 0, "step": 6, "where": "save"},
        {"worker": 1, "step": 14, "where": "half"},
        {"worker": 2, "step": 22, "where": "applied"},
        {"worker": 3, "step": 30, "where": "evaluate"},
    ]
    run = trained(tmp_path / "a", *faults, plan=plan(None), turns=True, pause_s=0.05, job={"max_steps": 70})
    assert_each_sample_once(run, steps=70, untold=len(faults))  # what each would have told of its last step
    assert sorted(one["rank"] for one in run.events("WorkerLost")) == [0, 1, 2, 3]


def test_the_bound_holds_while_workers_are_lost_and_come(tmp_path: Path) -> None:
    faults = [
        {"worker": 2, "step": 6, "where": "half"},
        {"worker": 0, "step": 12, "where": "permitted"},
        {"worker": 1, "step": 20, "where": "backward"},
    ]
    run = trained(tmp_path / "a", *faults, plan=plan(3), turns=True, pause_s=0.05, job={"max_steps": 50})
    told = assert_each_sample_once(run, steps=50)
    assert max(row["behind"] for row in told) <= 3


def pids(run_dir: Path) -> dict[int, int]:
    """The newest process of each worker."""
    found: dict[int, int] = {}
    for path in sorted(run_dir.glob("attempt_1/worker_*/events.jsonl")):
        for event in map(json.loads, path.read_text().splitlines()):
            if event["event"] == "WorkerStarted":
                found[event["rank"]] = event["pid"]
    return found


def comes(run: Path, name: str, count: int) -> None:
    """Return when there are so many events of a kind in a run's record."""
    deadline = time.monotonic() + LIMIT_S
    while (run / "attempt_1" / "events.jsonl").read_text().count(f'"{name}"') < count:
        if time.monotonic() > deadline:
            raise AssertionError(f"{name} did not come {count} times")
        time.sleep(0.02)


def test_workers_leave_and_come_on_purpose_and_then_all_save_and_leave(tmp_path: Path) -> None:
    options: dict[str, Any] = {"plan": plan(None), "turns": True, "pause_s": 0.05}
    process = start(tmp_path / "a", **options, job={"workers": 3, "max_steps": 10_000})
    run_dir = tmp_path / "a" / "run"
    reached(run_dir, 6, process)
    os.kill(pids(run_dir)[0], signal.SIGTERM)
    comes(run_dir, "WorkerLeft", 1)
    assert resized(run_dir, 4) == (0, "it will have 4 replicas")
    comes(run_dir, "WorkerJoined", 2)
    assert resized(run_dir, 2) == (0, "it will have 2 replicas")
    comes(run_dir, "WorkerLeft", 3)
    process.send_signal(signal.SIGTERM)
    first = finish(tmp_path / "a", process)
    assert first.code == 75, first.output
    assert not first.events("WorkerLost"), first.output
    assert [one["resized"] for one in first.events("WorkerLeft")] == [False, True, True]
    stands = max(row["step"] for row in first.metrics())
    assert (run_dir / "checkpoints" / f"step_{stands:08}").is_dir(), first.output
    then = trained(tmp_path / "a", **options, job={"workers": 3, "max_steps": stands + 20})
    assert_each_sample_once(then, steps=stands + 20)


def test_who_comes_in_a_later_loop_takes_part_there_and_saves(tmp_path: Path) -> None:
    fault = {"worker": 0, "step": 8, "where": "half"}  # an epoch has five steps
    options: dict[str, Any] = {"plan": plan(None, most=3), "turns": True, "pause_s": 0.05, "loops": 2}
    process = start(tmp_path / "a", fault, **options, job={"workers": 3, "max_steps": 10_000, "save_every": 10})
    run_dir = tmp_path / "a" / "run"
    reached(run_dir, 6, process)
    comes(run_dir, "WorkerJoined", 1)
    reached(run_dir, len((run_dir / "metrics.jsonl").read_text().splitlines()) + 12, process)  # one is saved at least
    process.send_signal(signal.SIGTERM)
    first = finish(tmp_path / "a", process)
    assert first.code == 75, first.output
    assert [one["rank"] for one in first.events("WorkerLost")] == [0], first.output
    stands = max(row["step"] for row in first.metrics())
    then = trained(tmp_path / "a", **options, job={"workers": 3, "max_steps": stands + 10})
    assert_each_sample_once(then, steps=stands + 10)


def test_below_the_minimum_nobody_takes_a_batch_and_in_the_end_all_is_saved(tmp_path: Path) -> None:
    faults = [{"worker": worker, "step": 6, "where": "forward"} for worker in (1, 2)]
    options: dict[str, Any] = {"plan": plan(None, least=3), "turns": True, "pause_s": 0.02}
    first = trained(tmp_path / "a", *faults, no_joins=True, job={"patience_s": 1.0, "max_steps": 400}, **options)
    assert first.code == 76, first.output
    stands = max(row["step"] for row in first.metrics())
    assert (first.run_dir / "checkpoints" / f"step_{stands:08}").is_dir(), first.output
    held = next(one for one in first.events("Regrouped") if one["holds"])  # all who are left know it
    later = [row["step"] for row in first.metrics() if row["time"] > held["time"]]
    # Each has ended the batch that it had, and those of the lost ones are done before all save.
    assert len(later) <= len(held["members"]) + len(faults), first.output
    then = trained(tmp_path / "a", *faults, **options, job={"max_steps": stands + 10})
    assert_each_sample_once(then, steps=stands + 10)
