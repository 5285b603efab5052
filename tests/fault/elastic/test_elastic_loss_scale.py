"""The loss scale of fp16 outlives workers: of an elastic run, and of one that begins again from memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quick
from elastic_runs import LIMIT_S, Run, trained, undisturbed
from memory_restart_runs import restarts
from paceline.monitor.audit.audit import audit

# It begins too large: the first steps find it. Then it doubles every other step, until it is too large again.
FP16 = "batch(size=20,micro=2)+compute(precision=fp16,loss_scale_start=16777216.0,loss_scale_window=2)"

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def scales(run: Run) -> list[tuple[float, bool, float]]:
    return [(row["loss_scale"], row["skipped"], row["overflows"]) for row in run.metrics()]


def assert_unharmed(run: Run) -> None:
    like = undisturbed(json.dumps({"plan": f"replicas=4+{FP16}"}))
    assert run.code == 0, run.output
    assert scales(run) == scales(like), run.output
    assert run.losses() == pytest.approx(like.losses(), rel=5e-3)
    assert audit(run.run_dir).is_clean
    found = {scale for scale, _, _ in scales(like)}
    assert scales(like)[0][1] and not scales(like)[-1][1] and len(found) > 3, "it has moved down, and up"


@pytest.mark.parametrize("where", [quick.further("backward"), "vote"])
def test_a_worker_that_is_lost_and_replaced_changes_no_scale(tmp_path: Path, where: str) -> None:
    fault = {"worker": 2, "step": 4, "where": where}
    run = trained(tmp_path / "a", fault, plan=f"replicas=2-4+{FP16}", whole=[8, 4])
    assert_unharmed(run)
    assert [event["rank"] for event in run.events("WorkerJoined")] == [2]


def test_a_run_that_begins_again_from_memory_has_the_scale_of_then(tmp_path: Path) -> None:
    fault = {"worker": 0, "step": 8, "where": "forward"}
    job: dict[str, Any] = {"workers": 1, "save_every": None}
    plan = f"replicas=1-1+{FP16}+guard(snapshot_every=3)"
    run = trained(tmp_path / "a", fault, plan=plan, job=job)
    assert_unharmed(run)
    (only,) = restarts(run)
    assert (only["source"], only["step"]) == ("memory", 6), run.output
