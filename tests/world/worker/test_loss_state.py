"""State that a loss keeps outside of buffers and reads again is refused by name; a loss that is prepared has rules."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forked import World
from paceline.errors import PlanError
from paceline.plan import Batch, Compute, Layout, Plan

DATA = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BATCH, COMPUTE = Batch(size=8, micro=2), Compute(precision="fp64")
CENTER = torch.zeros(6, dtype=torch.float64)
SEEN: list[float] = []


class Centered(nn.Module):
    """As self-distillation without labels (DINO) has it: the center of outputs is a buffer of the loss."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(6, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output - self.center, target)
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return loss


class Normalized:
    """A loss that is divided by its running mean, in an object that is no module."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss / self.mean

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        return self(output, target)


def with_a_global(output: Tensor, target: Tensor) -> Tensor:
    global CENTER
    CENTER = 0.9 * CENTER + 0.1 * output.detach().mean(0)
    return F.mse_loss(output - CENTER, target)


def for_a_log(output: Tensor, target: Tensor) -> Tensor:
    loss = F.mse_loss(output, target)
    SEEN.append(float(loss.detach()))
    return loss


def with_a_closure() -> Any:
    center = torch.zeros(6, dtype=torch.float64)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal center
        center = 0.9 * center + 0.1 * output.detach().mean(0)
        return F.mse_loss(output - center, target)

    return lambda output, target: loss(output, target)


def scaled_loss(factor: list[float], output: Tensor, target: Tensor) -> Tensor:
    factor[0] *= 0.9
    return F.mse_loss(output, target) * factor[0]


LOSSES: dict[str, tuple[Any, str]] = {
    "a buffer of a loss": (Centered, "Centered: self.center"),
    "an object": (Normalized, "Normalized: self.mean"),
    "a method of an object": (lambda: Normalized().method, "Normalized: self.mean"),
    "a global": (lambda: with_a_global, "with_a_global: CENTER"),
    "a closure": (with_a_closure, "loss: center"),
    "an argument of a partial": (lambda: functools.partial(scaled_loss, [1.0]), "scaled_loss: argument 1"),
    "for a log": (lambda: for_a_log, ""),
}


def with_losses(worker: Any) -> dict[str, tuple[str, list[float]]]:
    found: dict[str, tuple[str, list[float]]] = {}
    for way, (make, _) in LOSSES.items():
        for is_prepared in (False, True) if (way, worker.plan.layout.stages) == ("a buffer of a loss", 1) else (False,):
            torch.manual_seed(0)
            model, loss = worker.prepare(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))), make()
            loss = worker.prepare(loss) if is_prepared else loss
            step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), loss)
            name, losses = f"{way}{', prepared' * is_prepared}", list[float]()
            try:
                for batch in worker.batches(TensorDataset(DATA, DATA.flip(1)), name=name):
                    losses.append(float(step(batch)))
            except PlanError as error:
                found[name] = str(error), losses
            else:
                found[name] = "", losses
    return found


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(shard=2), Layout(stages=2)], ids=str)
def test_state_of_a_loss_is_refused_too(world: World, layout: Layout) -> None:
    alone = world.one_process(with_losses, Plan(batch=BATCH, compute=COMPUTE))
    for found in world(with_losses, 2, Plan(layout=layout, batch=BATCH, compute=COMPUTE), save_at_end=False):
        for way, (said, losses) in found.items():
            if layout.stages > 1:  # some keep a tensor or number that most stages do not have
                assert said and not losses, way
                continue
            place = LOSSES[way][1] if way in LOSSES else ""
            assert bool(place) == bool(said) == (not losses), (way, said)
            assert said.startswith(place), (way, said)
            assert said or losses == pytest.approx(alone[way][1], rel=1e-9), way
