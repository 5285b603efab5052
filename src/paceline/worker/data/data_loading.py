"""Reads micro-batches with torch's DataLoader: the dataset and sampler that run in this process or in loader processes.

A `MicroBatchRequest` names a micro-batch by numbers; the reader turns it into data. Random state is seeded from the
request, so augmentation in a dataset's `__getitem__` gives the same sample wherever and whenever it is read.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from paceline.comm.messages.socket_directory import loader_directory
from paceline.schedule.micro_batches import MicroBatch
from paceline.schedule.sample_order import IndexOrder, sample_indices
from paceline.worker.data import random_state
from paceline.worker.data.read_meter import ReadMeter, timed

__all__ = [
    "MicroBatchRequest",
    "ReadOptions",
    "StepItems",
    "StreamReader",
    "fetch_samples",
    "open_loader",
    "require_fit",
]

Collate = Callable[[list[Any]], Any]
BLOCK = 1024  # positions whose order is computed at once
PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatchRequest:
    """A micro-batch of a map-style dataset."""

    epoch: int
    micro: MicroBatch


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a data stream reads, and how."""

    dataset: Any
    collate: Collate = default_collate
    num_samples: int = 0
    seed: int = 0
    shuffle: bool = True
    draws: IndexOrder | None = None  # None: each sample once an epoch, shuffled or not


class MapReader(Dataset[Any]):
    """Turns a `MicroBatchRequest` into collated data. It seeds the global random state, so a worker preserves its
    own.
    """

    def __init__(self, reading: ReadOptions) -> None:
        self._reading = reading
        self._block: tuple[int, int, list[int]] | None = None  # epoch, number, dataset indices

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self._reading.dataset

    def __getitem__(self, request: MicroBatchRequest) -> Any:
        reading, micro = self._reading, request.micro
        indices = [self._index(request.epoch, position) for position in range(micro.start, micro.stop)]
        random_state.seed_all(reading.seed, 1, request.epoch, micro.start)
        return reading.collate(fetch_samples(reading.dataset, indices))

    def _index(self, epoch: int, position: int) -> int:
        """The dataset index at a position; the order is computed for a block of positions at a time."""
        number, offset = divmod(position, BLOCK)
        if self._block is None or self._block[:2] != (epoch, number):
            reading = self._reading
            positions = np.arange(number * BLOCK, min((number + 1) * BLOCK, reading.num_samples))
            if reading.draws is not None:
                indices = reading.draws.indices(seed=reading.seed, epoch=epoch, positions=positions)
            else:
                indices = sample_indices(
                    seed=reading.seed,
                    epoch=epoch,
                    num_samples=reading.num_samples,
                    positions=positions,
                    shuffle=reading.shuffle,
                )
            self._block = (epoch, number, indices.tolist())
        return self._block[2][offset]


class DataReader(Protocol):
    """Reads micro-batches in a loader process, or in this one."""

    @property
    def dataset(self) -> Any:
        """The user's."""
        ...


class RequestList(Sampler[MicroBatchRequest]):
    """Hands an endless or finite iterable of requests to the DataLoader."""

    def __init__(self, requests: Callable[[], Iterator[MicroBatchRequest]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[MicroBatchRequest]:
        return self._requests()


@dataclasses.dataclass(frozen=True, slots=True)
class StepItems:
    """From an iterable dataset: how many items the whole step has, and the data of this worker's micro-batches."""

    num_samples: int
    data: tuple[Any, ...]

    def pin_memory(self) -> StepItems:
        """Return the same in page-locked memory; torch's DataLoader calls it for pinned memory."""
        return dataclasses.replace(self, data=tuple(map(pin_memory, self.data)))


class StreamReader(IterableDataset[Any]):
    """Reads the whole of an iterable dataset and collates this worker's micro-batches of each step.

    Every worker reads every item, so the steps are the same at any number of workers, provided that the dataset
    gives the same items in the same order everywhere.
    """

    def __init__(
        self,
        reading: ReadOptions,
        *,
        size: int,
        micro: int,
        drop_last: bool,
        first_epoch: int,
        epochs: int,
        position: int,
        mine: Callable[[int, int], Sequence[MicroBatch]],
    ) -> None:
        self._reading = reading
        self._size, self._micro, self._drop_last = size, micro, drop_last
        self._first_epoch, self._epochs, self._position = first_epoch, epochs, position
        self._mine = mine

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self._reading.dataset

    def __iter__(self) -> Iterator[StepItems]:
        for epoch in range(self._first_epoch, self._epochs):
            position = self._position if epoch == self._first_epoch else 0
            yield from self._epoch(epoch, position)
            yield StepItems(0, ())  # the end of an epoch

    def _epoch(self, epoch: int, position: int) -> Iterator[StepItems]:
        reading = self._reading
        set_epoch = getattr(reading.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        with random_state.PreservedRandomState():
            random_state.seed_all(reading.seed, 2, epoch)
            items = iter(reading.dataset)
            for _ in range(position):
                next(items, None)
            state = random_state.capture_random_state()
        while True:
            with random_state.PreservedRandomState():
                random_state.restore_random_state(state)
                step = [item for _, item in zip(range(self._size), items, strict=False)]
                state = random_state.capture_random_state()
            if not step or (len(step) < self._size and self._drop_last):
                return
            mine = self._mine(position, position + len(step))
            data = [self._collated(step[m.start - position : m.stop - position], epoch, m) for m in mine]
            yield StepItems(len(step), tuple(data))
            position += len(step)

    def _collated(self, items: list[Any], epoch: int, micro: MicroBatch) -> Any:
        """Collate a micro-batch with random state of its own, the same on every worker."""
        with random_state.PreservedRandomState():
            random_state.seed_all(self._reading.seed, 2, epoch, micro.start)
            return self._reading.collate(items)


def require_fit(draws: IndexOrder, stream: str, *, num_samples: int, shuffle: bool) -> None:
    """Raise ValueError where a stream's samples cannot come in this order. `num_samples`: 0 for an iterable."""
    option = "lengths=" if draws.name.startswith("lengths") else "weights="
    if not num_samples:
        raise ValueError(
            f"{option} for stream {stream!r}, whose dataset has no samples by number: use a dataset with len() and []"
        )
    if draws.num_indices != num_samples:
        raise ValueError(
            f"{option} has {draws.num_indices} numbers, and the dataset of stream {stream!r} has {num_samples} "
            "samples: give one number for each sample"
        )
    if not shuffle:
        raise ValueError(
            f"{option} takes the samples of stream {stream!r} at random, and Batch(shuffle=False) keeps their order: "
            "leave out one of them"
        )


def fetch_samples(dataset: Any, indices: list[int]) -> list[Any]:
    """Return the samples with these numbers, at once where the dataset has torch's `__getitems__`."""
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


def open_loader(
    reader: DataReader,
    requests: Iterable[MicroBatchRequest] | None,
    *,
    loaders: int,
    prefetch: int,
    pin: bool,
    timeout_s: float,
    begin: Callable[[int], Any] | None = None,
    meter: ReadMeter | None = None,
) -> Iterator[Any]:
    """Start reading ahead; `loaders` processes (0: in this process), each `prefetch` micro-batches ahead. `begin`:
    called in each process first, with its number. `meter`: notes how long reading takes."""
    loader = DataLoader(
        cast("Dataset[Any]", reader) if meter is None else timed(reader),
        batch_size=None,  # requests are whole micro-batches already
        sampler=None if requests is None else RequestList(lambda: iter(requests)),
        collate_fn=_as_is,
        num_workers=loaders,
        prefetch_factor=prefetch if loaders else None,
        pin_memory=pin,
        worker_init_fn=_beginning(reader, begin) if loaders else None,
        generator=torch.Generator(),  # its own: the user's random state is not touched
        timeout=timeout_s if loaders else 0,
    )
    return iter(loader) if meter is None else meter.data_of(iter(loader))


def _as_is(data: Any) -> Any:
    return data


def _beginning(reader: DataReader, begin: Callable[[int], Any] | None) -> Callable[[int], None]:
    return functools.partial(_begin_loader, str(loader_directory()), reader.dataset, begin)


def _begin_loader(directory: str, dataset: Any, begin: Callable[[int], Any] | None, number: int) -> None:
    """Set up a loader process: it exits with its worker, ignores the terminal's Ctrl-C, and uses one thread. The
    sockets through which it passes on memory lie in `directory`."""
    # Where multiprocessing looks for its directory before it makes one; there is no public way.
    multiprocessing.current_process()._config["tempdir"] = directory  # pyright: ignore[reportAttributeAccessIssue]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    info = get_worker_info()
    if begin is not None and info is not None:
        object.__setattr__(
            info, "dataset", dataset
        )  # the user's, whose files a worker_init_fn may open, not our reader
        begin(number)
