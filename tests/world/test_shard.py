"""Replicas that are split over several workers (ZeRO) train like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forked import World
from paceline.comm.split import whole
from paceline.plan import Batch, Compute, Layout, Plan

EXACT = Compute(precision="fp64")
PLAN = Plan(batch=Batch(size=16, micro=3), compute=EXACT)  # 6 micro-batches; the last step of an epoch has 1

LAYOUTS = [
    pytest.param(Layout(shard=2, zero=1), id="shard2-zero1"),
    pytest.param(Layout(shard=2, zero=2), id="shard2-zero2"),
    pytest.param(Layout(shard=2, zero=3), id="shard2-zero3"),
    pytest.param(Layout(shard=4, zero=1), id="shard4-zero1"),
    pytest.param(Layout(shard=4, zero=3), id="shard4-zero3"),
    pytest.param(Layout(replicas=2, shard=2, zero=1), id="2x2-zero1"),
    pytest.param(Layout(replicas=2, shard=2, zero=2), id="2x2-zero2"),
    pytest.param(Layout(replicas=2, shard=2, zero=3), id="2x2-zero3"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks with dropout and batch norm, two tied layers, one that is never used, and rows that do not divide."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(6, width, bias=False)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.tied = nn.Linear(width, width)
        self.tied_again = nn.Linear(width, width)
        self.tied_again.weight = self.tied.weight
        self.head = nn.Linear(width, 4)
        self.idle = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.tied_again(torch.relu(self.tied(x)))))


def dataset(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def by_stepper(worker: Any) -> dict[str, Any]:
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=0.5)
    losses, norms = [], []
    for batch in worker.batches(dataset(), epochs=2):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    found = worker.evaluate(model, dataset(23), F.cross_entropy)
    return {"losses": losses, "norms": norms, "evaluated": found["loss"], "state": state_of(model)}


def by_plain_loop(worker: Any) -> dict[str, Any]:
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    losses, norms = [], []
    for batch in worker.batches(dataset(), epochs=2):
        total, count = 0.0, 0
        for x, y in batch:
            loss = F.cross_entropy(model(x), y)
            worker.backward(loss)
            if not batch.is_void:
                total, count = total + float(loss.detach()) * len(x), count + len(x)
        norms.append(float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        optim.step()
        optim.zero_grad()
        losses.append(float(worker.average(total)) / float(worker.average(float(count))))
    found = worker.evaluate(model, dataset(23), F.cross_entropy)
    return {"losses": losses, "norms": norms, "evaluated": found["loss"], "state": state_of(model)}


def assert_same(results: list[dict[str, Any]], oracle: dict[str, Any], tolerance: float = 1e-9) -> None:
    for result in results:
        for key in ("losses", "norms", "evaluated"):
            assert result[key] == pytest.approx(oracle[key], rel=tolerance), key
        for name, value in oracle["state"].items():
            torch.testing.assert_close(
                result["state"][name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def workers_of(layout: Layout) -> int:
    return (layout.replicas if isinstance(layout.replicas, int) else 1) * layout.shard


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return World(tmp_path_factory.mktemp("oracle")).one_process(by_stepper, PLAN)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loop", [by_stepper, by_plain_loop])
def test_every_layout_trains_like_one_process(world: World, oracle: dict[str, Any], layout: Layout, loop: Any) -> None:
    plan = Plan(layout=layout, batch=PLAN.batch, compute=EXACT)
    assert_same(world(loop, workers_of(layout), plan), oracle)
