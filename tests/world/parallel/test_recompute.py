"""Selective recomputation on workers: with split state, bf16 and dropout it trains as without."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quick
from forked import World
from paceline.plan import Batch, Compute, Layout, Plan

BATCH = Batch(size=12, micro=3)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        dropped = 0.1 if self.training else 0.0
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=dropped)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_up(x)))))


def train(worker: Any) -> list[float]:
    torch.manual_seed(1)
    model = worker.prepare(nn.Sequential(nn.Linear(4, 8), nn.Sequential(Block(8), Block(8)), nn.Linear(8, 1)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    step = worker.stepper(model, optim, F.mse_loss, clip_norm=1.0)
    x = torch.randn(48, 5, 4, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.sum(-1, keepdim=True))
    losses = [float(step(batch)) for batch in worker.batches(data, epochs=2)]
    return [*losses, worker.evaluate(model, data, F.mse_loss)["loss"]]


class Speaks(nn.Module):
    """As models of transformers are by default: it keeps keys for generation also while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.blocks = nn.ModuleList([Remembers() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, [] if self.config.use_cache else None)
        return x


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: list[Tensor] | None) -> Tensor:
        key = self.key(x)
        if kept is not None:
            kept.append(key)
            key = torch.cat(kept, 1)
        return x + self.out(torch.tanh(key.mean(1, keepdim=True)))


def train_cached(worker: Any) -> tuple[list[float], bool]:
    torch.manual_seed(1)
    model = worker.prepare(Speaks())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    step = worker.stepper(model, optim, F.mse_loss)
    x = torch.randn(24, 5, 4, generator=torch.Generator().manual_seed(3))
    losses = [float(step(batch)) for batch in worker.batches(TensorDataset(x, x.flip(1)), epochs=1)]
    return losses, model.config.use_cache


class Skips(nn.Module):
    """A block that is left out at random (stochastic depth), and adds noise, by generators other than torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.normal(size=4)).to(x)
        return x + (random.random() > 0.3) * torch.tanh(self.linear(x * (1 + noise)))


def train_skipping(worker: Any) -> list[float]:
    torch.manual_seed(1)
    model = worker.prepare(nn.Sequential(*(Skips() for _ in range(4))))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.mse_loss)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(3))
    return [float(step(batch)) for batch in worker.batches(TensorDataset(x, x.flip(1)), epochs=2)]


@pytest.mark.parametrize("layout", [Layout(replicas=1), Layout(replicas=1, shard=2)], ids=str)
def test_a_block_draws_the_same_from_every_generator_when_it_runs_again(tmp_path: Path, layout: Layout) -> None:
    world = World(tmp_path)
    found = [
        world(
            train_skipping,
            layout.shard,
            Plan(layout=layout, batch=BATCH, compute=Compute(recompute=kind)),
            fresh=True,
            save_at_end=False,
        )
        for kind in ("none", "blocks", "selective")
    ]
    assert found[0] == found[1] == found[2]


def test_a_cache_for_generation_is_not_filled_twice_by_blocks_that_run_twice(tmp_path: Path) -> None:
    world = World(tmp_path)
    found = {
        kind: world(train_cached, 1, Plan(batch=BATCH, compute=Compute(recompute=kind)), fresh=True)[0]
        for kind in ("none", "blocks", "selective")
    }
    assert [use_cache for _, use_cache in found.values()] == [True, False, False]
    assert found["blocks"][0] == found["selective"][0] == pytest.approx(found["none"][0], rel=1e-6)


@pytest.mark.parametrize("precision", [quick.further("fp32"), "bf16"])
@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(shard=2), Layout(shard=2, zero=1)], ids=str)
def test_selective_recomputation_changes_no_bit(tmp_path: Path, layout: Layout, precision: Any) -> None:
    found: list[list[float]] = []
    for recompute in ("none", "selective"):
        (tmp_path / recompute).mkdir()
        plan = Plan(layout=layout, batch=BATCH, compute=Compute(precision=precision, recompute=recompute))
        found.append(World(tmp_path / recompute)(train, 2, plan)[0])
    kept, again = found
    assert again == kept and kept[-1] < 0.9 * kept[0]
