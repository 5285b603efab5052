"""A worker is lost while replicas mix their weights: those who are left mix with each other, and lose no sample."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from elastic_runs import LIMIT_S, trained
from paceline.monitor.audit.audit import audit

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_those_who_are_left_mix_go_on_and_end_with_the_same_weights(tmp_path: Path) -> None:
    plan = "replicas=2-4+gossip(average_every=5)+batch(size=20,micro=2)"
    job = {"max_steps": 13, "save_every": None, "workers": 4}
    run = trained(tmp_path / "a", {"worker": 1, "step": 8, "where": "vote"}, plan=plan, job=job)
    assert run.code == 0, run.output
    assert [event["rank"] for event in run.events("WorkerLost")] == [1]
    assert [row["step"] for row in run.metrics()] == list(range(1, 14))
    assert audit(run.run_dir).is_clean
    assert math.isfinite(run.weights()), "all have the same"
    assert run.losses()[-1] < run.losses()[0]
