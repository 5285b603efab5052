"""Streams in lanes when workers are killed: each step has the samples that it has in one process."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import quick
from elastic_runs import finish, start
from paceline.monitor.audit.audit import audit

PROGRAM = Path(__file__).parents[2] / "support" / "lane_program.py"
BATCH = "batch(size=10,micro=2)+compute(precision=fp64)"


@pytest.mark.parametrize(("loaders", "is_mixed"), [(0, False), quick.further(2, False), quick.further(0, True)])
def test_the_samples_of_each_step_stay_the_same_when_workers_are_killed(
    tmp_path: Path, loaders: int, is_mixed: bool
) -> None:
    run = functools.partial(start, program=PROGRAM, loaders=loaders, is_mixed=is_mixed)
    alone = run(tmp_path / "alone", plan=BATCH, job={"workers": 1})
    faults = [
        {"worker": 2, "step": 3, "where": "forward"},
        {"worker": 1, "step": 7, "where": "vote"},
        {"worker": 0, "step": 12, "where": "data" if not loaders else "sum"},
    ]
    there = run(tmp_path / "lost", *faults, plan=f"replicas=1-3+{BATCH}", pause_s=0.1, job={"workers": 3})
    expected, found = finish(tmp_path / "alone", alone), finish(tmp_path / "lost", there)
    assert expected.code == 0 and found.code == 0, expected.output + found.output
    assert found.losses() == pytest.approx(expected.losses(), rel=1e-12) and len(found.losses()) == (
        46 if is_mixed else 32
    )
    assert len(found.events("WorkerLost")) == 3
    assert audit(found.run_dir).is_clean
    if is_mixed:
        told = audit(found.run_dir).drawn["train"]
        assert told.counts == {"a": 314, "b": 138} and told.until_step == 46
