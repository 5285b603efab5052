"""Modules that change what others do (hooks, computed weights) or hold weights twice (LSTM) train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from forked import World
from layout_runs import EXACT, LENGTH, RESUME, WORDS, Text, next_word
from paceline.plan import Batch, Layout, Plan

WIDTH = 8


class Computed(nn.Module):
    """Weights are made of other parameters, and of a buffer that each forward in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, 24))
        self.down = parametrizations.spectral_norm(nn.Linear(24, WIDTH))
        self.of_hooks = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.of_hooks(x))))


def doubled(_: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def halved(_: nn.Module, __: Any, output: Any) -> Any:
    return output * 0.5


class Hooked(nn.Module):
    """Hooks change a layer's input, its output, and the gradient that comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.up.register_forward_pre_hook(doubled)
        self.up.register_forward_hook(halved)
        self.down.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Recurrent(nn.Module):
    """Layers of torch that keep a second list of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = (kind(WIDTH, WIDTH, batch_first=True) for kind in (nn.LSTM, nn.GRU))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(self.lstm(x)[0])[0]


def train(worker: Any) -> list[float]:
    torch.manual_seed(3)
    blocks = [Computed(), Hooked(), Recurrent(), Hooked()]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))
    model = worker.prepare(model, sample=(torch.ones(2, LENGTH, dtype=torch.int64),))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    step = worker.stepper(model, optim, next_word, clip_norm=0.5)
    return [float(step(batch)) for batch in worker.batches(Text(32))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return World(tmp_path_factory.mktemp("alone")).one_process(train, Plan(batch=RESUME, compute=EXACT))


@pytest.mark.parametrize(
    "layout", [Layout(shard=2), Layout(shard=2, zero=1), Layout(tensor=2), Layout(stages=2)], ids=str
)
def test_they_train_as_in_one_process(world: World, alone: list[float], layout: Layout) -> None:
    for found in world(train, 2, Plan(layout=layout, batch=RESUME, compute=EXACT)):
        assert found == pytest.approx(alone, rel=1e-9)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


def scripted(worker: Any) -> list[float]:
    torch.manual_seed(3)
    traced: Any = torch.jit.trace(nn.Linear(WIDTH, WIDTH).double(), torch.ones(2, WIDTH, dtype=torch.float64))
    model = worker.prepare(nn.Sequential(torch.jit.script(Scripted().double()), traced, nn.Linear(WIDTH, 1)))
    step = worker.stepper(model, worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02)), F.mse_loss)
    inputs = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :1].sin())
    return [float(step(batch)) for batch in worker.batches(data, epochs=2)]


def test_scripted_and_traced_modules_train_as_in_one_process(world: World) -> None:
    plan = Plan(batch=Batch(size=16, micro=4), compute=EXACT)
    expected = world.one_process(scripted, plan)
    for found in world(scripted, 2, plan, save_at_end=False):
        assert found == pytest.approx(expected, rel=1e-9)
