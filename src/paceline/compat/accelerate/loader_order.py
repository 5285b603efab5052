"""The order in which a torch DataLoader reads its dataset: its own samplers say it, once in an epoch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from paceline.errors import PlanError

__all__ = [
    "OrderedDataset",
    "batches_of",
    "checksum_of",
    "is_iterable",
    "order_generator",
    "require_whole_batches",
    "restore_order",
    "seed_order",
]


class OrderedDataset(Dataset[Any]):
    """The samples of a dataset in the order of an epoch."""

    def __init__(self, dataset: Any, indices: Sequence[Any]) -> None:
        self._dataset, self._indices = dataset, indices
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._items

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> Any:
        return self._dataset[self._indices[position]]

    def _items(self, positions: Sequence[int]) -> Any:
        return self._dataset.__getitems__([self._indices[position] for position in positions])


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Whether a loader's samples have no numbers."""
    return isinstance(loader.dataset, IterableDataset)


def batches_of(loader: DataLoader[Any]) -> list[list[Any]]:
    """Draw the epoch's batches from the loader's samplers, and take from the random state what the loader itself would
    take. Raises PlanError for a loader that makes no batches."""
    if loader.batch_sampler is None:
        raise PlanError(
            "a DataLoader with batch_size=None was prepared: what it gives are no batches, so nothing tells how many "
            "samples each has. Give it a batch_size, or a batch_sampler."
        )
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the seed of the loader's processes
    return [list(batch) for batch in loader.batch_sampler]


def _sampler(loader: DataLoader[Any]) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def order_generator(loader: DataLoader[Any]) -> torch.Generator | None:
    """The generator of a loader's sampler; None: it draws from torch's own, or draws nothing."""
    found = getattr(_sampler(loader), "generator", None)
    return found if isinstance(found, torch.Generator) else None


def seed_order(loader: DataLoader[Any]) -> bool:
    """Give a shuffling loader a generator of its own, seeded from torch's, as Accelerate does for several processes: so
    the samples come in the same order as there. Returns whether it was given one."""
    sampler = _sampler(loader)
    if not isinstance(sampler, RandomSampler) or sampler.generator is not None:
        return False
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    sampler.generator = torch.Generator().manual_seed(seed)
    return True


def restore_order(loader: DataLoader[Any], state: torch.Tensor | None, *, is_seeded: bool) -> None:
    """Have the loader's own generator be where a saved loop had it. `is_seeded`: `seed_order` gave it this generator.

    A saved loop without one drew from torch's own, and so does a loader from then on that the program gave none.
    """
    generator = order_generator(loader)
    if generator is None:
        return
    if state is not None:
        generator.set_state(state)
    elif is_seeded:
        _sampler(loader).generator = None


def require_whole_batches(batches: Sequence[Sequence[Any]], micro: int) -> None:
    """Raise PlanError where batches other than the last have another size than `micro`."""
    wrong = next((batch for batch in batches[:-1] if len(batch) != micro), None)
    if wrong is None and batches and len(batches[-1]) > micro:
        wrong = batches[-1]
    if wrong is not None:
        raise PlanError(
            f"the batch sampler of a DataLoader that trains gave a batch of {len(wrong)} samples, and its batch_size "
            f"is {micro}: steps are counted in samples, so all batches but the last must have one size. Use a sampler= "
            "that groups the samples, with batch_size=."
        )


def checksum_of(indices: Sequence[Any]) -> int:
    """Equal for equal orders; of indices that are no numbers, by their text."""
    try:
        numbers = np.asarray(indices, dtype=np.int64)
    except (TypeError, ValueError):
        return zlib.crc32(repr(list(indices)).encode())
    return zlib.crc32(numbers.tobytes())
