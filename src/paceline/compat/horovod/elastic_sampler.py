"""A sampler that knows which samples of an epoch are done, and shares out the others among the workers of now."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from paceline.compat.horovod import session as sessions

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Like DistributedSampler; after a reset the samples that are left are shared out anew.

    Put it into the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.
    `seed` must be equal on all workers.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.rank = self.num_replicas = self.num_samples = self.total_size = 0
        self.remaining_indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, of which no sample is done."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Take note that each worker has done so many more samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out the samples that are left among the workers of now."""
        session = sessions.current_session()
        self.num_replicas, self.rank = session.size, session.rank
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        if not left:
            return iter(())
        times = -(-self.total_size // len(left))  # so that each worker has the same number
        return iter((left * times)[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
