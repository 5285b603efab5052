"""A worker is lost while gradients are shared out for Adasum: the step is done again, and all stay equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_runs import LIMIT_S, trained
from paceline.monitor.audit.audit import audit

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_a_step_that_lost_a_worker_is_combined_anew_by_those_who_are_left(tmp_path: Path) -> None:
    plan = "replicas=2-4+allreduce(op=adasum,bucket_bytes=600)+batch(size=20,micro=2)"
    job = {"max_steps": 10, "save_every": None, "workers": 3}
    run = trained(tmp_path / "a", {"worker": 1, "step": 4, "where": "backward"}, plan=plan, job=job)
    assert run.code == 0, run.output
    assert [event["rank"] for event in run.events("WorkerLost")] == [1]
    assert [row["step"] for row in run.metrics()] == list(range(1, 11))
    assert run.weights() != 0, "all have the same"
    assert run.losses()[-1] < run.losses()[0]
    assert audit(run.run_dir).is_clean
