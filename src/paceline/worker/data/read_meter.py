"""Measures how long the data of a stream takes to read, in this process or in loader processes.

The time comes with the data, so it counts where the data is used, however far it was read ahead.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

__all__ = ["ReadMeter", "TimedItem", "timed"]


@dataclasses.dataclass(slots=True)
class TimedItem:
    """What a reader gave, and how long that took."""

    data: Any
    read_s: float

    def pin_memory(self) -> TimedItem:
        """Return the same in page-locked memory; torch's DataLoader calls it for pinned memory."""
        return TimedItem(pin_memory(self.data), self.read_s)


class ReadMeter:
    """Adds up what was read of one stream since it was asked last."""

    def __init__(self) -> None:
        self.read_s, self.num_bytes = 0.0, 0
        self.counts_bytes = True

    def take(self) -> tuple[float, int]:
        """Return the seconds of all readers together, and the bytes of the tensors, and begin anew."""
        found = self.read_s, self.num_bytes
        self.read_s, self.num_bytes = 0.0, 0
        return found

    def data_of(self, items: Iterator[TimedItem]) -> Iterator[Any]:
        """The data of timed items, which are noted as they are taken."""
        return _Noted(self, items)

    def note(self, item: TimedItem) -> None:
        """Add one."""
        self.read_s += item.read_s
        if self.counts_bytes:
            data = getattr(item.data, "data", item.data)  # of a step's items
            self.num_bytes += _num_bytes(data)


class _Noted(Iterator[Any]):
    """Keeps no item, as a generator would: batches are large."""

    def __init__(self, meter: ReadMeter, items: Iterator[TimedItem]) -> None:
        self._meter, self._items = meter, items

    def __next__(self) -> Any:
        item = next(self._items)
        self._meter.note(item)
        return item.data


def _num_bytes(data: Any) -> int:
    """Of the tensors in a batch of the usual forms."""
    if isinstance(data, Tensor):
        return data.numel() * data.element_size()
    if isinstance(data, Mapping):
        return sum(map(_num_bytes, data.values()))
    return sum(map(_num_bytes, data)) if isinstance(data, (list, tuple)) else 0


def timed(reader: Any) -> Dataset[TimedItem]:
    """Return a reader that tells how long each item took."""
    return _TimedStream(reader) if isinstance(reader, IterableDataset) else _TimedReader(reader)


class _TimedReader(Dataset[TimedItem]):
    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getitem__(self, request: Any) -> TimedItem:
        began = time.perf_counter()
        data = self._reader[request]
        return TimedItem(data, time.perf_counter() - began)


class _TimedStream(IterableDataset[TimedItem]):
    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __iter__(self) -> Iterator[TimedItem]:
        items = iter(self._reader)
        while True:
            began = time.perf_counter()
            try:
                yield TimedItem(next(items), time.perf_counter() - began)
            except StopIteration:
                return
