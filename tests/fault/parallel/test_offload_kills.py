"""A worker whose optimizer state is on a disk is killed: its replacement gets the state, and the disk is free again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_runs import LIMIT_S, trained, undisturbed

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_a_newcomer_gets_state_that_is_on_a_disk_and_a_kill_leaves_no_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    compute = f"compute(precision=fp64,offload=optimizer,offload_path={disk})"
    run = trained(
        tmp_path / "a",
        {"worker": 2, "step": 4, "where": "forward"},
        plan=f"replicas=2-4+batch(size=20,micro=2)+{compute}",
        whole=[6, 4],
        job={"max_steps": 16},
    )
    assert run.code == 0, run.output
    (lost,) = run.events("WorkerLost")
    assert "killed by signal 9" in lost["reason"]
    (joined,) = run.events("WorkerJoined")
    assert joined["step"] > 4
    assert run.workers() == [0, 1, 2, 3]
    assert run.weights() > 0, "all have the same, and the same optimizer state"
    assert run.losses()[:12] == pytest.approx(undisturbed().losses(), rel=1e-9)
    assert os.listdir(disk) == []
