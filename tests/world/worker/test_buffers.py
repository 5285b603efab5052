"""Buffers whose rule a trial finds where no worker runs a whole forward, and those of which it finds none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forked import World
from paceline.plan import Batch, Compute, Gossip, Layout, LocalSGD, Plan

PLAN = Plan(batch=Batch(size=8, micro=2), compute=Compute(precision="fp64"))
UNKNOWN = r"buffer \S+ of shape \[\d\] changed .* is not known: (in a trial|no trial)"


class Block(nn.Module):
    """Keeps an average of what comes, its sum, and perhaps its largest value."""

    average: Tensor
    total: Tensor
    largest: Tensor

    def __init__(self, *, is_largest_kept: bool) -> None:
        super().__init__()
        self.layer, self.is_largest_kept = nn.Linear(6, 6), is_largest_kept
        for name in ("average", "total", "largest"):
            self.register_buffer(name, torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.lerp_(x.mean(0), 0.1)
                self.total.add_(x.sum(0))
                if self.is_largest_kept:
                    torch.maximum(self.largest, x.amax(0), out=self.largest)
        return x + torch.tanh(self.layer(x))


def data() -> TensorDataset:
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs.flip(1))


def staged(*, is_largest_kept: bool = False) -> Callable[[Any], dict[str, Tensor]]:
    def run(worker: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        blocks = [Block(is_largest_kept=is_largest_kept) for _ in range(4)]
        model = worker.prepare(nn.Sequential(*blocks))
        step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), F.mse_loss)
        for batch in worker.batches(data()):
            step(batch)
        return {name: one.clone() for name, one in model.named_buffers() if not one.is_meta}

    return run


def by_hand(worker: Any) -> dict[str, Tensor]:
    """The model's own forward is never called; its average is written outside of any forward."""
    torch.manual_seed(0)
    model = worker.prepare(nn.Sequential(Block(is_largest_kept=False), Block(is_largest_kept=False)))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in worker.batches(data()):
        for x, y in batch:
            worker.backward(F.mse_loss(model[1](model[0](x)), y))
        optim.step()
    return {name: one.clone() for name, one in model.named_buffers()}


def written_outside(worker: Any) -> None:
    model = worker.prepare(Block(is_largest_kept=False).eval())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in worker.batches(data()):
        for x, y in batch:
            found = model(x)
            torch.maximum(model.largest, found.detach().amax(0), out=model.largest)
            worker.backward(F.mse_loss(found, y))
        optim.step()


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_rules_are_found_under_stages_and_where_a_models_own_forward_is_not_called(world: World) -> None:
    expected = world.one_process(staged(), PLAN)
    assert float(expected["3.total"].abs().max()) > 1.0
    halves = world(
        staged(), 2, Plan(layout=Layout(stages=2), batch=PLAN.batch, compute=PLAN.compute), save_at_end=False
    )
    assert sorted(name for one in halves for name in one) == sorted(expected)
    for one in halves:
        assert_alike(one, expected)
    plan = Plan(layout=Layout(replicas=2), batch=PLAN.batch, compute=PLAN.compute)
    alone = world.one_process(by_hand, PLAN)
    for one in world(by_hand, 2, plan):
        assert_alike(one, alone)


@pytest.mark.parametrize(
    ("program", "layout"),
    [(staged(is_largest_kept=True), Layout(stages=2)), (written_outside, Layout(replicas=2))],
    ids=["largest_of_a_stage", "written_in_the_loop"],
)
def test_what_no_trial_shows_is_asked_for(world: World, program: Any, layout: Layout) -> None:
    with pytest.raises(Exception, match=UNKNOWN):
        world(program, 2, Plan(layout=layout, batch=PLAN.batch, compute=PLAN.compute))


def apart(worker: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = worker.prepare(Block(is_largest_kept=False))
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0)), F.mse_loss)
    for batch in worker.batches(data()):
        step(batch)
    worker.save()  # here all replicas have agreed
    return {name: one.clone() for name, one in model.named_buffers()}


@pytest.mark.parametrize("sync", [LocalSGD(every=1), LocalSGD(every=2), Gossip(average_every=2)], ids=str)
def test_rules_hold_where_replicas_take_steps_by_themselves(world: World, sync: Any) -> None:
    """A sum has what all samples added, on whichever replica; an average is one value in the end."""
    found = world(apart, 2, Plan(layout=Layout(replicas=2), sync=sync, batch=PLAN.batch, compute=PLAN.compute))
    whole = data().tensors[0].sum(0)
    for one in found:
        torch.testing.assert_close(one["total"], whole, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one["average"], found[0]["average"], rtol=0, atol=0)
        assert float(one["average"].abs().max()) > 0.01


def without_statistics(worker: Any) -> list[float]:
    """Norms that keep no statistics have buffers that are None."""
    torch.manual_seed(0)
    layers = (
        nn.Linear(6, 6),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Unflatten(1, (2, 3)),
        nn.InstanceNorm1d(2),
    )
    model = worker.prepare(nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 6)))
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), F.mse_loss)
    return [float(step(batch)) for batch in worker.batches(data())]


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(replicas=1, shard=2), Layout(stages=2)], ids=str)
def test_norms_without_statistics_train(world: World, layout: Layout) -> None:
    alone = world.one_process(without_statistics, PLAN)
    for losses in world(without_statistics, 2, dataclasses.replace(PLAN, layout=layout), save_at_end=False):
        assert losses == pytest.approx(alone, rel=1e-9)
