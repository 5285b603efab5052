"""A stream in shards that follows the protocol of a Hugging Face `IterableDataset`, and counts what is read of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

__all__ = ["COUNTS", "ShardStream"]


COUNTS = {"read": 0}  # items, of all streams of a process


class ShardStream(IterableDataset[Any]):
    """Shard k of lengths [n0, n1, ...] gives k * 1000 + 0, 1, ...; in later epochs half a number more."""

    def __init__(self, lengths: Sequence[int], *, shards: Sequence[int] | None = None, noisy: bool = False) -> None:
        self.lengths, self.noisy = lengths, noisy
        self.shards = list(range(len(lengths))) if shards is None else list(shards)
        self.epoch = 0
        self._state = {"shard": 0, "given": 0}

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> ShardStream:
        return ShardStream(self.lengths, shards=self.shards[index::num_shards], noisy=self.noisy)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._state = dict(state)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self._state["shard"] < len(self.shards):
            shard = self.shards[self._state["shard"]]
            while self._state["given"] < self.lengths[shard]:
                number = self._state["given"]
                self._state["given"] += 1
                COUNTS["read"] += 1
                noise = float(torch.rand(())) / 10 if self.noisy else 0.0
                yield torch.tensor([shard * 1000.0 + number + self.epoch / 2 + noise]), torch.tensor([0.0])
            self._state = {"shard": self._state["shard"] + 1, "given": 0}
