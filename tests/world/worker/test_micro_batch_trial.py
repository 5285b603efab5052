"""A run that measures several sizes of micro-batches takes so many steps in each, on all workers, with equal losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forked import World
from paceline import environment
from paceline.monitor.audit.audit import audit
from paceline.plan import Batch, Plan
from step_programs import EXACT, dataset, plain_net


def sizes_and_losses(worker: Any) -> list[tuple[list[int], float]]:
    torch.manual_seed(2)
    model = worker.prepare(plain_net())
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), F.cross_entropy)
    found: list[tuple[list[int], float]] = []
    for batch in worker.batches(dataset(), epochs=2):
        found.append(([micro.num_samples for micro in batch.micros], float(step(batch))))
    return found


def test_each_size_has_its_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(batch=Batch(size=16, micro=4), compute=EXACT)
    plain = world(sizes_and_losses, 2, plan)
    apart = World(world.run_dir.parent / "apart")
    apart.run_dir.parent.mkdir()
    monkeypatch.setenv(environment.MICRO_TRIAL, "4:2,8:1,1:2")
    found = apart(sizes_and_losses, 2, plan)
    whole = [[size for one in steps for size in one[0]] for steps in zip(*found, strict=True)]
    assert whole == [[4] * 4, [4] * 4, [8] * 2, [1] * 2, [1] * 16, *[[1] * 16] * 2, [1] * 2], "the last size stays"
    assert [one for _, one in found[0]] == pytest.approx([one for _, one in plain[0]], rel=1e-9)
    assert not audit(apart.run_dir).problems
