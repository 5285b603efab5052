"""A small model that stages are tested on as layouts, its data, and trainings of it that say what came of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from forked import World
from paceline.plan import Batch, Compute, Layout, Plan

EXACT = Compute(precision="fp64")
BATCH = Batch(size=16, micro=3)  # 6 micro-batches; the last step of an epoch has 1
WORDS, LENGTH, WIDTH = 24, 6, 8
RESUME = Batch(size=16, micro=4)


class Block(nn.Module):
    """A Transformer's block, with statistics of its own that its training moves."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(drop)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(self.before(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        x = self.batch(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.between(x))


class Net(nn.Module):
    """Tied embeddings, a mask for all blocks, a buffer of the root that changes, a layer that is never used."""

    seen: Tensor

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.idle = nn.Linear(2, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(0.1 * words.float().mean())
        places = torch.arange(words.shape[1])
        x = first = self.words(words) + self.places(places)
        for block in self.blocks:
            x = block(x, places[:, None] >= places)
        return self.head(self.norm(x + 0.1 * first))


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Words and the words after them; some of these count for nothing."""

    def __init__(self, count: int = 50) -> None:
        self.words = torch.randint(WORDS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        target = self.words[number, 1:].clone()
        target[: number % LENGTH] = -100
        return self.words[number, :-1], target


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def sum_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total, (target != -100).sum()


def prepared(worker: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3 + worker.rank)  # the first worker's weights count
    model = worker.prepare(Net())
    return model, worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))


def run(worker: Any, loss: Any = mean_loss) -> dict[str, Any]:
    model, optim = prepared(worker)
    step = worker.stepper(model, optim, loss, clip_norm=0.5)
    losses, norms = [], []
    for batch in worker.batches(Text(), epochs=2):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    found = worker.evaluate(
        model, Text(23), {"loss": loss, "first": lambda o, y: (o[:, 0].argmax(1) == 3).double().mean()}
    )
    return {"losses": losses, "norms": norms, **found, "seen": float(model.seen)}


def by_sums(worker: Any) -> dict[str, Any]:
    return run(worker, sum_loss)


def workers_of(layout: Layout) -> int:
    return (layout.replicas if isinstance(layout.replicas, int) else 1) * layout.workers_each


def plan_of(layout: Layout, **compute: Any) -> Plan:
    return Plan(layout=layout, batch=BATCH, compute=Compute(**{"precision": "fp64", **compute}))


def beside(tmp_path: Path) -> World:
    """Another place for runs."""
    (tmp_path / "one").mkdir(parents=True)
    return World(tmp_path / "one")


def assert_same(results: list[dict[str, Any]], oracle: dict[str, Any], tolerance: float = 1e-9) -> None:
    for result in results:
        for key, value in oracle.items():
            assert result[key] == pytest.approx(value, rel=tolerance), key


def train(worker: Any) -> dict[int, float]:
    """Steps, and their losses, of this attempt."""
    model, optim = prepared(worker)
    step = worker.stepper(model, optim, mean_loss)
    losses: dict[int, float] = {}
    for batch in worker.batches(Text(), epochs=4):  # 16 steps
        loss = float(step(batch))
        losses[worker.step] = loss
    return losses
