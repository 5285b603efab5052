"""Tables on servers while a worker is lost and another one comes: the same losses, and no table on any worker."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

import elastic_runs
from elastic_runs import LIMIT_S, finish, start
from paceline.monitor.audit.audit import audit

pytestmark = pytest.mark.timeout(LIMIT_S + 20)

PROGRAM = elastic_runs.PROGRAM.with_name("table_program.py")
BATCH = "batch(size=20,micro=2)+compute(precision=fp64)"
MOST = 60  # steps, until those who have come are waited for no longer
SERVED = f"replicas=2-3+parameterserver(servers=2,bucket_bytes=400)+{BATCH}"


def test_a_killed_worker_costs_no_step_and_its_successor_needs_no_table(tmp_path: Path) -> None:
    run = functools.partial(start, program=PROGRAM)
    alone = run(tmp_path / "alone", plan=BATCH, sparse=False, job={"workers": 1, "max_steps": MOST})
    evaluating, voting = {"worker": 0, "step": 4, "where": "forward"}, {"worker": 1, "step": 9, "where": "vote"}
    job = {"workers": 3, "save_every": 5, "max_steps": MOST}
    there = run(tmp_path / "served", evaluating, voting, plan=SERVED, pause_s=0.1, until=[12, 3], job=job)
    expected, found = finish(tmp_path / "alone", alone), finish(tmp_path / "served", there)
    assert expected.code == 0 and found.code == 0, expected.output + found.output
    losses, held_out = found.losses(), found.held_out()
    assert losses == pytest.approx(expected.losses()[: len(losses)], rel=1e-9) and len(losses) >= 12
    assert held_out == pytest.approx(expected.held_out()[: len(held_out)], rel=1e-9) and held_out
    told = json.loads((tmp_path / "served" / "told.json").read_text())
    assert {event["rank"] for event in found.events("WorkerJoined")} == {0, 1} and [rank for rank, _, _ in told] == [
        0,
        1,
        2,
    ]
    assert all(is_away for _, is_away, _ in told) and len({total for _, _, total in told}) == 1
    assert (found.run_dir / "checkpoints" / "step_00000010").is_dir()
    assert audit(found.run_dir).verdict == "clean"


def test_where_nobody_waits_a_killed_worker_and_its_successor_leave_tables_that_all_agree_on(tmp_path: Path) -> None:
    plan = f"replicas=2-3+parameterserver(servers=2,staleness=none)+{BATCH}"
    killed = {"worker": 1, "step": 4, "where": "forward"}
    job = {"workers": 3, "max_steps": 40}
    found = finish(tmp_path, start(tmp_path, killed, program=PROGRAM, plan=plan, held_at=12, job=job))
    assert found.code == 0, found.output
    told = json.loads((tmp_path / "told.json").read_text())
    assert found.events("WorkerJoined") and [rank for rank, _, _ in told] == [0, 1, 2]
    assert all(is_away for _, is_away, _ in told) and len({total for _, _, total in told}) == 1
    assert found.held_out()[-1] < found.held_out()[0]
    assert audit(found.run_dir).verdict == "clean"
