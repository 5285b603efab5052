"""Parameters that a forward changes or registers are refused by name; what changes nothing goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forked import World
from paceline.errors import PlanError
from paceline.plan import Batch, Compute, Layout, Plan


class Writing(nn.Module):
    """Writes to its scale in forward, in the way that its name says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.is_ready = way, False
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.way == "projection":
                self.scale.div_(self.scale.norm())
            elif self.way == "data-dependent" and not self.is_ready:
                self.scale.copy_(x.std(0))
            elif self.way == "through .data" and not self.is_ready:
                self.scale.data.copy_(x.std(0))
            elif self.way == "late parameter" and not self.is_ready:
                self.late = nn.Parameter(torch.zeros(6))
            elif self.way == "late module" and not self.is_ready:
                self.add_module("late", nn.Linear(6, 6))
            elif self.way == "same values":
                self.scale.copy_(self.scale.clone())
        self.is_ready = True
        return self.layer(x * self.scale)


def first_steps(worker: Any, way: str, steps: int = 4) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    model = worker.prepare(Writing(way))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.mse_loss)
    inputs = torch.randn(8 * steps, 6, generator=torch.Generator().manual_seed(1))
    losses: list[float] = []
    try:
        for batch in worker.batches(TensorDataset(inputs, inputs.flip(1)), name=way):
            losses.append(float(step(batch)))
    except PlanError as error:
        return str(error), losses
    return "", losses


PLAN = Plan(batch=Batch(size=8, micro=4), compute=Compute(precision="fp64"))
REFUSED = ["projection", "data-dependent", "through .data", "late parameter", "late module"]


def only(way: str) -> Any:
    return lambda worker: first_steps(worker, way)


@pytest.mark.parametrize("way", REFUSED)
def test_a_forward_that_changes_parameters_is_refused_before_the_step(world: World, way: str) -> None:
    plan = Plan(layout=Layout(replicas=2), batch=PLAN.batch, compute=PLAN.compute)
    for said, losses in world(only(way), 2, plan):
        assert not losses
        assert ("'late'" in said) if way.startswith("late") else ("parameter model.scale was changed" in said)
        assert "before worker.prepare(model)" in said


def test_under_shard_a_write_that_would_be_lost_is_refused(world: World) -> None:
    plan = Plan(layout=Layout(shard=2), batch=PLAN.batch, compute=PLAN.compute)
    for said, losses in world(only("projection"), 2, plan):
        assert "scale was changed" in said and not losses


def test_a_write_of_the_same_values_and_one_worker_alone_go_on(world: World) -> None:
    plan = Plan(layout=Layout(replicas=2), batch=PLAN.batch, compute=PLAN.compute)
    alone = world.one_process(only("same values"), PLAN)
    for said, losses in world(only("same values"), 2, plan):
        assert not said and losses == pytest.approx(alone[1], rel=1e-12)
    said, losses = world.one_process(only("projection"), PLAN)
    assert not said and len(losses) == 4
