"""A small Transformer, and what a run of it brings, for tests that compare layouts with one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from forked import World
from paceline.plan import Batch, Compute, Layout, Plan

__all__ = [
    "EXACT",
    "HELD_OUT",
    "LENGTH",
    "RESUME",
    "ROWS",
    "WORDS",
    "Net",
    "Text",
    "assert_same",
    "beside",
    "by_plain_loop",
    "by_stepper",
    "in_one_epoch",
    "next_word",
    "plan_of",
    "prepared",
    "train",
    "twice",
    "used_in",
    "without_dropout",
    "workers_of",
]

EXACT = Compute(precision="fp64")
BATCH = Batch(size=16, micro=3)  # 6 micro-batches; the last step of an epoch has 1
RESUME = Batch(size=16, micro=4)
ROWS, HELD_OUT = 34, 14  # three steps in an epoch, the last one of two rows; micro-batches of both, the last one uneven
WORDS, LENGTH, WIDTH, INNER = 47, 8, 16, 61  # words and inner features divide among no number of workers


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.before(x)).split(width, dim=2)
        query, key, value = (part.view(samples, length, 4, width // 4).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(samples, length, width)))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Net(nn.Module):
    """Tied embeddings, fused projections, dropout between blocks, a buffer that changes, a layer that is never used."""

    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(drop) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.idle = nn.Linear(2, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(0.1 * words.float().mean())
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int = 50) -> None:
        self.words = torch.randint(WORDS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.words[number, :-1], self.words[number, 1:]


def next_word(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def prepared(worker: Any, *, drop: float = 0.1) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = worker.prepare(Net(drop), buffers={"seen": "mean"})  # finding the rule by trial has tests of its own
    return model, worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))


def without_dropout(worker: Any) -> dict[str, Any]:
    return by_stepper(worker, drop=0.0)


def in_one_epoch(worker: Any) -> dict[str, Any]:
    return by_stepper(worker, drop=0.0, epochs=1)


def by_stepper(worker: Any, *, drop: float = 0.1, epochs: int = 2) -> dict[str, Any]:
    model, optim = prepared(worker, drop=drop)
    step = worker.stepper(model, optim, next_word, clip_norm=0.5)
    losses, norms = [], []
    for batch in worker.batches(Text(ROWS), epochs=epochs):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    found = worker.evaluate(model, Text(HELD_OUT), next_word)
    return {"losses": losses, "norms": norms, "evaluated": found["loss"], "seen": float(model.seen)}


def by_plain_loop(worker: Any, *, drop: float = 0.1) -> dict[str, Any]:
    model, optim = prepared(worker, drop=drop)
    losses, norms = [], []
    for batch in worker.batches(Text(ROWS), epochs=2):
        total = 0.0
        for x, y in batch:
            loss = next_word(model(x), y)
            worker.backward(loss)
            if not batch.is_void:
                total += float(loss.detach()) * len(x) / batch.num_samples
        norms.append(float(worker.clip_gradients(0.5)))
        optim.step()
        optim.zero_grad()
        # Each of those who cut layers, or share sequences, has the same micro-batches as the others.
        layout = worker.plan.layout
        losses.append(float(worker.average(total)) * worker.workers / (layout.tensor * layout.context))
    found = worker.evaluate(model, Text(HELD_OUT), next_word)
    return {"losses": losses, "norms": norms, "evaluated": found["loss"], "seen": float(model.seen)}


def beside(tmp_path: Path) -> World:
    """Another place for runs."""
    (tmp_path / "one").mkdir()
    return World(tmp_path / "one")


def workers_of(layout: Layout) -> int:
    return (layout.replicas if isinstance(layout.replicas, int) else 1) * layout.workers_each


def plan_of(layout: Layout, **compute: Any) -> Plan:
    return Plan(layout=layout, batch=BATCH, compute=Compute(**{"precision": "fp64", **compute}))


def assert_same(results: list[dict[str, Any]], oracle: dict[str, Any], tolerance: float = 1e-9) -> None:
    for result in results:
        for key, value in oracle.items():
            assert result[key] == pytest.approx(value, rel=tolerance), key


def twice(worker: Any) -> None:
    """Take two steps on each batch."""
    model = worker.prepare(Net())
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)
    for batch in worker.batches(Text()):
        step(batch)
        step(batch)


def train(worker: Any, *, drop: float = 0.1) -> dict[int, float]:
    """Steps, and their losses, of this attempt."""
    model, optim = prepared(worker, drop=drop)
    step = worker.stepper(model, optim, next_word)
    losses: dict[int, float] = {}
    for batch in worker.batches(Text(), epochs=6):  # 24 steps
        loss = float(step(batch))
        losses[worker.step] = loss
    return losses


def lines_of(world: World, workers: int, name: str) -> list[dict[str, Any]]:
    paths = [world.worker_dir(rank) / name for rank in range(workers)]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def used_in(world: World, workers: int) -> dict[int, tuple[int, list[int]]]:
    """Of each step its epoch and the positions whose gradients count, by the ledgers."""
    used: dict[int, tuple[int, list[int]]] = {}
    for line in lines_of(world, workers, "ledger.jsonl"):
        if "step" in line:
            dropped = {place for start, stop in line.get("dropped", ()) for place in range(start, stop)}
            places = [place for place in range(*line["whole"]) if place not in dropped]
            assert used.setdefault(line["step"], (line["epoch"], places)) == (line["epoch"], places)
            ran = {place for start, stop in line["ranges"] for place in range(start, stop)}
            assert ran <= set(places)
    return used
