"""What is no part of any unit under stages: statistics of norms that learn nothing, and another model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forked import WorkersFailed, World
from layout_runs import EXACT, beside
from paceline.plan import Batch, Layout, Plan

INTERLEAVED = Layout(stages=2, schedule="interleaved", stages_per_worker=2)
LAYOUTS = [Layout(stages=2), Layout(replicas=2, stages=2), INTERLEAVED]


class Heads(nn.Module):
    """As in BYOL and SimSiam: norms that learn nothing stand between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8, affine=False, momentum=one) for one in (0.1, 0.2, None, 0.3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = F.relu(norm(layer(x)))
        return self.layers[-1](x)


def trained(worker: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = worker.prepare(Heads())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.roll(1, dims=1))
    step = worker.stepper(model, optim, F.mse_loss)
    losses = [float(step(batch)) for batch in worker.batches(data, epochs=2)]
    losses.append(worker.evaluate(model, data, F.mse_loss)["loss"])
    return {"losses": torch.tensor(losses), **worker.state_dict(model)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=["stages", "replicas", "interleaved"])
def test_statistics_of_norms_that_learn_nothing_are_those_of_one_process(
    world: World, tmp_path: Path, layout: Layout
) -> None:
    batch = Batch(size=16, micro=4)
    (alone,) = beside(tmp_path)(trained, 1, Plan(batch=batch, compute=EXACT), save_at_end=False)
    workers = layout.workers_each * (2 if layout.replicas else 1)
    found, *_ = world(trained, workers, Plan(batch=batch, compute=EXACT, layout=layout), save_at_end=False)
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: name + text)


def shared_norm(worker: Any) -> None:
    norm = nn.BatchNorm1d(8, affine=False)
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8), norm, nn.Linear(8, 8))
    worker.prepare(model, sample=torch.randn(4, 8))


def test_layers_between_which_one_norm_stands_twice_are_on_one_stage(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"updates the buffer 1\.running_mean, and so does an operation elsewhere"):
        world(shared_norm, 3, Plan(batch=Batch(size=16, micro=4), layout=Layout(stages=3)), save_at_end=False)


def distilled(worker: Any) -> dict[str, Tensor]:
    """A teacher, which is not prepared, is asked before and after the student, without gradients."""
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model = worker.prepare(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))

    def forward(student: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            first = teacher(batch[0])
        output = student(batch[0])
        with torch.no_grad():
            second = teacher(batch[0] * 2)
        return F.mse_loss(output, first) + F.l1_loss(output, second)

    teacher.double()
    step = worker.stepper(model, optim, forward=forward)
    losses = [float(step(batch)) for batch in worker.batches(torch.utils.data.TensorDataset(x), epochs=2)]
    return {"losses": torch.tensor(losses), **worker.state_dict(model)}


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=["stages", "replicas"])
def test_a_teacher_that_is_not_prepared_runs_on_every_stage(world: World, tmp_path: Path, layout: Layout) -> None:
    batch = Batch(size=16, micro=4)
    (alone,) = beside(tmp_path)(distilled, 1, Plan(batch=batch, compute=EXACT), save_at_end=False)
    workers = layout.workers_each * (2 if layout.replicas else 1)
    found, *_ = world(distilled, workers, Plan(batch=batch, compute=EXACT, layout=layout), save_at_end=False)
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: name + text)
