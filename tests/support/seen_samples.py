"""Data whose samples are their own numbers, and which of them each step of a run was given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

__all__ = ["Lines", "Numbers", "joined", "merged", "seen"]


class Numbers:
    """Map-style without torch: only len and []."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return torch.tensor([float(index)]), torch.tensor([0.0])


class Lines(IterableDataset[Any]):
    """The same items in the same order, each time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.count):
            yield torch.tensor([float(index)]), torch.tensor([0.0])


def seen(worker: Any, dataset: Any, **options: Any) -> dict[tuple[int, int], list[float]]:
    """(epoch, step) -> the inputs that this worker ran."""
    model = worker.prepare(nn.Linear(1, 1))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    found: dict[tuple[int, int], list[float]] = {}
    for batch in worker.batches(dataset, **options):
        for x, y in batch:
            found.setdefault((batch.epoch, batch.step), []).extend(x[:, 0].tolist())
            worker.backward(F.mse_loss(model(x), y))
        optim.step()
    return found


def joined(parts: Iterable[list[float]]) -> list[float]:
    return [value for part in parts for value in part]


def merged(results: list[dict[Any, list[float]]]) -> dict[Any, list[float]]:
    """Workers hold contiguous parts, in order."""
    keys = sorted({key for result in results for key in result})
    return {key: joined(result.get(key, []) for result in results) for key in keys}
