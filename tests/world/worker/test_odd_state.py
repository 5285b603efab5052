"""What modules keep beside parameters and ordinary buffers goes on as well: with a checkpoint, with another's state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forked import World
from paceline.plan import Batch, Compute, Layout, Plan

SIZE, STEPS, STOP = 12, 6, 3
BATCH, EXACT = Batch(size=SIZE, micro=3), Compute(precision="fp64")


class Odd(nn.Module):
    """Has a tensor as extra state, and a buffer that its first forward fills."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = torch.ones(4, dtype=torch.float64)
        self.mean: Tensor | None
        self.register_buffer("mean", None)

    def get_extra_state(self) -> Tensor:
        return self.scale

    def set_extra_state(self, state: Tensor) -> None:
        self.scale = state

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            here = x.detach().mean(0)
            self.mean = here if self.mean is None else 0.5 * self.mean + 0.5 * here
        return self.layer(self.scale * (x if self.mean is None else x - self.mean))


def data() -> TensorDataset:
    inputs = torch.randn(STEPS * SIZE, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(worker: Any, *, states: list[Any] | None = None) -> tuple[dict[int, float], Any]:
    """Return the losses of steps, and what this worker had after the third."""
    if states is not None:
        worker._consensus._holder.fill(states[worker.rank])
    torch.manual_seed(1)
    model = worker.prepare(nn.Sequential(nn.Linear(4, 4), Odd(), nn.Linear(4, 1)))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    step = worker.stepper(model, optim, F.mse_loss)
    losses, state = dict[int, float](), None
    for batch in worker.batches(data()):
        if worker.step == STOP:  # between two steps
            state = copy.deepcopy(worker._consensus._holder.snapshot())
        losses[batch.step] = float(step(batch))
        model[1].scale *= 0.9
    return losses, state


@pytest.mark.parametrize("layout", [Layout(), Layout(shard=2)], ids=["replicas", "shard"])
def test_it_goes_on_after_a_stop_and_for_who_comes_later(world: World, layout: Layout) -> None:
    plan = Plan(layout=layout, batch=BATCH, compute=EXACT)
    whole = world(train, 2, plan, max_steps=STEPS, save_at_end=False)
    for losses, _ in whole:
        assert losses == pytest.approx(world.one_process(train, Plan(batch=BATCH, compute=EXACT))[0], rel=1e-9)
    later = {step: loss for step, loss in whole[0][0].items() if step > STOP}

    states = [state for _, state in whole]
    for losses, _ in world(lambda worker: train(worker, states=states), 2, plan, save_at_end=False):
        assert losses == later

    world(train, 2, plan, max_steps=STOP)
    for losses, _ in world(train, 2, plan):
        assert losses == pytest.approx(later, rel=1e-9)
