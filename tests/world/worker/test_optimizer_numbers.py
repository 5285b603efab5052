"""Learning rates and the norm of the gradients are in the record of each step, under each layout as in one process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quick
import staged_net
from forked import World
from layout_runs import BATCH, EXACT, ROWS, Net, Text, beside, next_word
from paceline.plan import Batch, Layout, LocalSGD, ParameterServer, Plan

Numbers = list[dict[str, float]]


def numbers_of(world: World, rank: int) -> Numbers:
    """What the steps of a worker's newest attempt say of the optimizer."""
    lines = (world.worker_dir(rank) / "events.jsonl").read_text().splitlines()
    return [event["optimizer"] for event in map(json.loads, lines) if event["event"] == "StepDone"]


def scheduled(worker: Any, net: nn.Module | None = None, data: Any = None, loss: Any = next_word) -> list[float]:
    """Two groups, of which a scheduler lets one fall; returns the norms that the stepper gives."""
    torch.manual_seed(3)
    model = worker.prepare(net or Net())
    flat = [p for p in model.parameters() if p.ndim == 1]
    others = [p for p in model.parameters() if p.ndim > 1]
    optim = worker.prepare(torch.optim.AdamW([{"params": others, "lr": 0.02}, {"params": flat, "lr": 0.02}]))
    falls = worker.prepare(torch.optim.lr_scheduler.LambdaLR(optim, [lambda step: 0.5**step, lambda _: 1.0]))
    step = worker.stepper(model, optim, loss, clip_norm=0.05)
    found: list[float] = []
    for batch in worker.batches(data or Text(ROWS), epochs=1):
        step(batch)
        falls.step()
        found.append(float(step.grad_norm))
    return found


def staged(worker: Any) -> list[float]:
    torch.manual_seed(3)
    return scheduled(worker, staged_net.Net(), staged_net.Text(ROWS), staged_net.mean_loss)


def undropped(worker: Any) -> list[float]:
    """Without dropout, which draws other numbers on each slice of a sequence than one process would."""
    torch.manual_seed(3)
    return scheduled(worker, Net(0.0))


LAYOUTS = [
    (scheduled, Layout(replicas=2)),
    (scheduled, Layout(shard=2)),
    (scheduled, Layout(tensor=2)),
    (staged, Layout(stages=2)),
    quick.further(scheduled, Layout(shard=2, zero=1)),
    quick.further(scheduled, Layout(replicas=2, tensor=2)),
    quick.further(undropped, Layout(context=2)),
]


@pytest.mark.parametrize(("train", "layout"), LAYOUTS, ids=lambda one: getattr(one, "__name__", None) or str(one))
def test_a_step_has_its_rates_and_its_norm_under_each_layout(
    world: World, tmp_path: Path, train: Any, layout: Layout
) -> None:
    one = beside(tmp_path)
    (expected,) = one(train, 1, Plan(batch=BATCH, compute=EXACT), save_at_end=False)
    alone = numbers_of(one, 0)
    assert [step["lr"] for step in alone] == [0.02, 0.01, 0.005], "that with which the step was taken"
    assert [step.get("lr/1") for step in alone] == [None, 0.02, 0.02], "it is told from the step on at which it differs"
    assert [step["grad_norm"] for step in alone] == pytest.approx(expected, rel=1e-6) and min(expected) > 0.05
    workers = (layout.replicas if isinstance(layout.replicas, int) else 1) * layout.workers_each
    world(train, workers, Plan(batch=BATCH, compute=EXACT, layout=layout), save_at_end=False)
    for rank in range(workers):
        found = numbers_of(world, rank)
        assert [sorted(step) for step in found] == [sorted(step) for step in alone]
        for step, other in zip(found, alone, strict=True):
            assert step == pytest.approx(other, rel=1e-6), rank


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def data(rows: int = 24) -> TensorDataset:
    source = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(rows, 3, generator=source), torch.randn(rows, 1, generator=source))


def plain(worker: Any, kind: str) -> None:
    """A plain loop with two optimizers and their schedulers, a closure, or a GradScaler; one step of a batch."""
    torch.manual_seed(3)
    model = worker.prepare(Small())
    if kind == "closure":
        optims = [worker.prepare(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3))]
    else:
        optims = [worker.prepare(torch.optim.SGD(part.parameters(), lr=rate))
                  for part, rate in ((model.first, 0.1), (model.second, torch.tensor(0.2)))]  # fmt: skip
    falls = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optims]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1) if kind == "scaler" else None
    for batch in worker.batches(data(), epochs=1):

        def run(batch: Any = batch) -> torch.Tensor:
            for one in optims:
                one.zero_grad()
            loss = torch.zeros(())
            for x, y in batch:
                loss = nn.functional.mse_loss(model(x), y)
                worker.backward(loss if scaler is None else scaler.scale(loss))
            return loss

        if kind == "closure":
            optims[0].step(run)
        else:
            run()
            for one in optims:
                if scaler is None:
                    one.step()
                else:
                    scaler.step(one)
            if scaler is not None:
                scaler.update()
        for one in falls:
            one.step()


@pytest.mark.parametrize("kind", ["two", "closure", "scaler"])
def test_plain_loops_have_the_same_numbers_on_two_workers(world: World, tmp_path: Path, kind: str) -> None:
    plan = Plan(batch=Batch(size=8, micro=2), compute=EXACT)
    one = beside(tmp_path)
    one(functools.partial(plain, kind=kind), 1, plan, save_at_end=False)
    alone = numbers_of(one, 0)
    if kind == "closure":
        assert [step["lr"] for step in alone] == [0.5, 0.25, 0.125] and "lr/1" not in alone[0]
    else:
        assert [step["lr"] for step in alone] == [0.1, 0.05, 0.025]
        assert [step["lr/1"] for step in alone] == pytest.approx([0.2, 0.1, 0.05])
    assert all(0 < step["grad_norm"] < 20 for step in alone), "of unscaled losses"
    world(functools.partial(plain, kind=kind), 2, plan, save_at_end=False)
    for rank in range(2):
        for step, other in zip(numbers_of(world, rank), alone, strict=True):
            assert step == pytest.approx(other, rel=1e-6), rank


def test_a_scaler_changes_no_norm(world: World, tmp_path: Path) -> None:
    plan = Plan(batch=Batch(size=8, micro=2), compute=EXACT)
    other = beside(tmp_path)
    other(functools.partial(plain, kind="two"), 1, plan, save_at_end=False)
    world(functools.partial(plain, kind="scaler"), 1, plan, save_at_end=False)
    assert [step["grad_norm"] for step in numbers_of(world, 0)] == pytest.approx(
        [step["grad_norm"] for step in numbers_of(other, 0)], rel=1e-6
    )


def by_stepper(worker: Any) -> list[float]:
    torch.manual_seed(3)
    model = worker.prepare(Small())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, nn.functional.mse_loss)
    norms: list[float] = []
    for batch in worker.batches(data(), epochs=1):
        step(batch)
        norms.append(float(step.grad_norm))
    return norms


@pytest.mark.parametrize("sync", [ParameterServer(), LocalSGD(every=2)], ids=["servers", "rounds"])
def test_other_ways_to_agree_have_them_too(world: World, sync: Any) -> None:
    plan = Plan(layout=Layout(replicas=2), sync=sync, batch=Batch(size=8, micro=2), compute=EXACT)
    for rank, norms in enumerate(world(by_stepper, 2, plan, save_at_end=False)):
        found = numbers_of(world, rank)
        assert [step["lr"] for step in found] == [0.1] * 3
        assert [step["grad_norm"] for step in found] == pytest.approx(norms, rel=1e-6)
