"""Parameters that a forward changes or registers are refused by name, at any step; what changes nothing goes on."""

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
        self.code = nn.Parameter(torch.ones(6), requires_grad=False)
        self.is_late = False  # set by the loop
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
            elif self.way == "late, through .data" and self.is_late:
                self.scale.data.mul_(0.9)
            elif self.way == "late, a view of .data" and self.is_late:
                self.scale.data[:2] = x[0, :2]
            elif self.way == "late, .data set" and self.is_late:
                self.scale.data = self.scale.data * 0.9
            elif self.way == "a frozen codebook" and self.is_late:
                self.code.data.lerp_(x.mean(0), 0.1)
            elif self.way == "a parameter in its place" and self.is_late:
                self.scale = nn.Parameter(x.std(0))
            elif self.way == "same values":
                self.scale.copy_(self.scale.clone())
                self.scale.data.clamp_(-100, 100)
            elif self.way == "same values, then others":
                self.scale.clamp_(-100, 0.1 if self.is_late else 100)
            elif self.way == "a read" and self.is_late:
                self.seen = float(self.scale.data.norm())
        self.is_ready = True
        return self.layer(x * self.scale * self.code)


LATE = 11  # steps; in the first ten passes digests are compared


def first_steps(worker: Any, way: str, steps: int = 4) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    model = worker.prepare(Writing(way))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.mse_loss)
    inputs = torch.randn(8 * steps, 6, generator=torch.Generator().manual_seed(1))
    losses: list[float] = []
    try:
        for batch in worker.batches(TensorDataset(inputs, inputs.flip(1)), name=way):
            model.is_late = len(losses) >= LATE
            losses.append(float(step(batch)))
    except PlanError as error:
        return str(error), losses
    return "", losses


PLAN = Plan(batch=Batch(size=8, micro=2), compute=Compute(precision="fp64"))
AT_ONCE = ["projection", "data-dependent", "through .data", "late parameter", "late module"]
LATER = ["late, through .data", "late, a view of .data", "late, .data set", "a frozen codebook"]
LATER += ["a parameter in its place", "same values, then others"]


def each(worker: Any) -> dict[str, tuple[str, list[float]]]:
    at_once, goes_on = AT_ONCE, ["same values", "a read"]
    later = LATER
    if worker.plan.layout.shard > 1:  # rows are gathered: a write to the gathered copy is lost, also of the same values
        at_once, goes_on, later = [*AT_ONCE, "same values"], ["a read"], LATER[:-1]
    found = {way: first_steps(worker, way) for way in at_once}
    return {**found, **{way: first_steps(worker, way, 14) for way in (*later, *goes_on)}}


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(shard=2)], ids=str)
def test_a_forward_that_changes_parameters_is_refused_before_the_step(world: World, layout: Layout) -> None:
    alone = world.one_process(
        lambda worker: {way: first_steps(worker, way, 14) for way in ("same values", "a read")}, PLAN
    )
    plan = Plan(layout=layout, batch=PLAN.batch, compute=PLAN.compute)
    for found in world(each, 2, plan, save_at_end=False):
        for way, (said, losses) in found.items():
            if way in alone and not said:
                assert losses == pytest.approx(alone[way][1], rel=1e-9), way
                continue
            assert len(losses) == (LATE if way in LATER else 0), (way, said)
            what = "registered or removed" if "parameter" in way or "module" in way else "was changed"
            assert what in said, (way, said)
            assert "before worker.prepare(model)" in said, way
        assert not found["a read"][0] and (layout.shard > 1 or not found["same values"][0])


def test_one_worker_alone_is_one_process(world: World) -> None:
    said, losses = world.one_process(lambda worker: first_steps(worker, "projection"), PLAN)
    assert not said and len(losses) == 4
