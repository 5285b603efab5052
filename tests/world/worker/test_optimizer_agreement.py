"""What a script does to an optimizer on one worker alone ends the run, with the option and the workers named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from forked import WorkersFailed, World
from paceline.plan import Batch, Layout, Plan

Way = Callable[[Any, Any, float], None]


def train(worker: Any, way: Way) -> float:
    """A plain loop in which `way` is called after each step, with this worker's own loss."""
    torch.manual_seed(0)
    model = worker.prepare(nn.Linear(6, 3))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.randn(96, 6)
    for batch in worker.batches(TensorDataset(x, x[:, :3].argmax(1)), epochs=2):
        own = 0.0
        for inputs, targets in batch:
            loss = F.cross_entropy(model(inputs), targets)
            worker.backward(loss)
            own += float(loss)
        if way is not skips:
            optim.step()
        way(worker, optim, own)
        optim.zero_grad()
    return float(model.bias.detach().sum())


def plateau(worker: Any, optim: Any, loss: float) -> None:
    if not hasattr(plateau, "scheduler"):
        plateau.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optim, patience=0, factor=0.3)  # type: ignore[attr-defined]
    plateau.scheduler.step(loss)  # type: ignore[attr-defined]


def plateau_of_all(worker: Any, optim: Any, loss: float) -> None:
    plateau(worker, optim, worker.average(loss))


def rate(worker: Any, optim: Any, loss: float) -> None:
    optim.param_groups[0]["lr"] = 0.1 * loss


def tensor_rate(worker: Any, optim: Any, loss: float) -> None:
    optim.param_groups[0]["lr"] = torch.tensor(0.1 * loss)


def skips(worker: Any, optim: Any, loss: float) -> None:
    if worker.rank == 0 or worker.step % 2 == 0:
        optim.step()


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(replicas=1, shard=2)], ids=str)
@pytest.mark.parametrize(
    ("way", "says"),
    [
        (plateau, r"lr of 'optimizer' is .* on worker 0, .* on worker 1"),
        (rate, r"lr of 'optimizer' is .* on worker 0, .* on worker 1"),
        (tensor_rate, r"lr of 'optimizer' is .* on worker 0, .* on worker 1"),
        (skips, r"'optimizer' has stepped so often since the last pass: 1 on worker 0, 0 on worker 1"),
    ],
)
def test_what_parts_the_replicas_is_refused(world: World, layout: Layout, way: Way, says: str) -> None:
    plan = Plan(layout=layout, batch=Batch(size=16, micro=4))
    with pytest.raises(WorkersFailed, match=says) as failed:
        world(lambda worker: train(worker, way), 2, plan, save_at_end=False)
    assert "worker.average(x)" in str(failed.value)


def test_what_is_equal_on_all_goes_on(world: World) -> None:
    plan = Plan(layout=Layout(replicas=2), batch=Batch(size=16, micro=4))
    one, other = world(lambda worker: train(worker, plateau_of_all), 2, plan, save_at_end=False)
    assert one == other
