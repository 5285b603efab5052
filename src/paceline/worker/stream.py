"""A stream of steps from one dataset: where it stands, which steps come next, and this worker's part of each.

The position is two numbers (epoch, samples into it); the next step follows from them alone, so a restore costs the same
anywhere in an epoch. Map-style datasets (`len` and `[]`) are read in the order of `schedule.order`. Iterable datasets
are passed over by every worker, which keeps its own micro-batches: exact at any number of workers as long as the
dataset gives the same items in the same order everywhere, which is checked at each step by count; a restore passes over
the items before the position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.comm.group import WorkerGroup, total
from paceline.errors import SyncError
from paceline.plan import Batch
from paceline.schedule.share import Micro, deal, micro_batches, step_ranges
from paceline.worker.batch import StepBatch
from paceline.worker.reading import Collate, Counted, MapReader, Reading, Request, StreamReader, open_loader

__all__ = ["Cursor", "Source", "is_map_style"]


@dataclasses.dataclass(slots=True)
class Cursor:
    """Where a stream stands: `position` samples of `epoch` are committed."""

    epoch: int = 0
    position: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What `worker.batches` was asked for."""

    dataset: Any
    epochs: int
    collate: Collate
    loaders: int
    prefetch: int
    pin: bool
    name: str


def is_map_style(dataset: Any) -> bool:
    """Whether samples can be asked for by number."""
    is_iterable_kind = isinstance(dataset, torch.utils.data.IterableDataset)
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_iterable_kind


class Stream:
    """Yields the remaining steps of a source as StepBatch objects, from the cursor on; commits move the cursor."""

    def __init__(
        self,
        source: Source,
        batch: Batch,
        *,
        cursor: Cursor,
        group: WorkerGroup,
        walk: Callable[[StepBatch], Iterator[Any]],
        timeout_s: float,
    ) -> None:
        self.source, self.cursor = source, cursor
        self._batch, self._group, self._walk, self._timeout_s = batch, group, walk, timeout_s
        self.num_samples = len(source.dataset) if is_map_style(source.dataset) else 0
        self._check()

    def about(self) -> dict[str, Any]:
        """For the ledger: what is read and how."""
        b = self._batch
        return {
            "samples": self.num_samples,
            "batch": b.size,
            "micro": b.resolved_micro,
            "seed": b.seed,
            "shuffle": b.shuffle and self.num_samples > 0,
            "drop_last": b.drop_last,
        }

    def last_step(self, done: int) -> int | None:
        """The number of the step at which the stream ends, when `done` steps were made before it; None: not known."""
        if not self.num_samples:
            return None
        b = self._batch
        per_epoch = self.num_samples // b.size if b.drop_last else -(-self.num_samples // b.size)
        begun = -(-self.cursor.position // b.size)
        return done + per_epoch * (self.source.epochs - self.cursor.epoch) - begun

    def steps(self, next_step: Callable[[], int]) -> Iterator[StepBatch]:
        """Yield the remaining steps; `next_step()` gives the number of the step to come."""
        yield from self._map_steps(next_step) if self.num_samples else self._iterable_steps(next_step)

    def mine(self, start: int, stop: int) -> tuple[Micro, ...]:
        """This worker's micro-batches of the step that has positions [start, stop)."""
        micros = micro_batches(start, stop, self._batch.resolved_micro)
        share = deal(len(micros), self._group.size)[self._group.index]
        return micros[share.start : share.stop]

    def _end_of_epoch(self) -> int:
        """The position at which an epoch of a map-style dataset ends."""
        return self.num_samples - (self.num_samples % self._batch.size if self._batch.drop_last else 0)

    def _map_steps(self, next_step: Callable[[], int]) -> Iterator[StepBatch]:
        begin = Cursor(self.cursor.epoch, self.cursor.position)  # the loader runs ahead, while the cursor moves
        requests = (
            Request(epoch, micro) for epoch, start, stop in self._plan(begin) for micro in self.mine(start, stop)
        )
        items = self._open(MapReader(self._reading()), requests)
        for epoch, start, stop in self._plan(begin):
            batch = StepBatch(
                stream=self.source.name,
                step=next_step(),
                epoch=epoch,
                start=start,
                stop=stop,
                micros=self.mine(start, stop),
                ends_epoch=stop == self._end_of_epoch(),
                fetch=lambda: next(items),
                walk=self._walk,
            )
            yield batch
            batch.drain()

    def _plan(self, begin: Cursor) -> Iterator[tuple[int, int, int]]:
        """(epoch, start, stop) of each step from `begin` on."""
        b = self._batch
        for epoch in range(begin.epoch, self.source.epochs):
            position = begin.position if epoch == begin.epoch else 0
            for first, stop in step_ranges(
                num_samples=self.num_samples, size=b.size, drop_last=b.drop_last, position=position
            ):
                yield epoch, first, stop

    def _iterable_steps(self, next_step: Callable[[], int]) -> Iterator[StepBatch]:
        b, epoch, position = self._batch, self.cursor.epoch, self.cursor.position
        reader = StreamReader(
            self._reading(),
            size=b.size,
            micro=b.resolved_micro,
            drop_last=b.drop_last,
            first_epoch=epoch,
            epochs=self.source.epochs,
            position=position,
            mine=self.mine,
        )
        items = self._open(reader, None)
        while epoch < self.source.epochs:
            counted: Counted = next(items)
            self._agree_on_count(counted.num_samples, epoch, position)
            if counted.num_samples == 0:
                epoch, position = epoch + 1, 0
                continue
            parts = iter(counted.data)
            yield StepBatch(
                stream=self.source.name,
                step=next_step(),
                epoch=epoch,
                start=position,
                stop=position + counted.num_samples,
                micros=counted.micros,
                ends_epoch=None,
                fetch=lambda parts=parts: next(parts),
                walk=self._walk,
            )
            position += counted.num_samples

    def _agree_on_count(self, count: int, epoch: int, position: int) -> None:
        """Raise on all workers when they did not all read the same number of items for this step."""
        if self._group.size == 1:
            return
        size = self._group.size
        sums = total(self._group, [count, count * count], what="the item count of an iterable dataset")
        if size * sums[1] != sums[0] ** 2:
            raise SyncError(
                f"the iterable dataset of stream {self.source.name!r} gave worker {self._group.index} {count} "
                "items after position "
                f"{position} of epoch {epoch}, but {sums[0] / size:.1f} on average: it must give the same items "
                "in the same order on every worker. "
                "Seed it, sort its files, and do not split it by worker yourself"
            )

    def _open(self, reader: MapReader | StreamReader, requests: Iterator[Request] | None) -> Iterator[Any]:
        s = self.source
        return open_loader(
            reader, requests, loaders=s.loaders, prefetch=s.prefetch, pin=s.pin, timeout_s=self._timeout_s
        )

    def _reading(self) -> Reading:
        b = self._batch
        return Reading(self.source.dataset, self.source.collate, self.num_samples, b.seed, b.shuffle)

    def _check(self) -> None:
        s = self.source
        if not is_map_style(s.dataset):
            if not hasattr(s.dataset, "__iter__"):
                raise TypeError(
                    f"worker.batches() got a {type(s.dataset).__name__}: a dataset needs len() and [], or must be "
                    "iterable"
                )
            if hasattr(s.dataset, "__next__"):
                raise TypeError(
                    "worker.batches() got an iterator, which can be read only once; pass the iterable that makes it"
                )
            if s.loaders > 1:
                raise ValueError(
                    f"loaders={s.loaders}: an iterable dataset is read by one loader process at most; use "
                    "loaders=1 or 0"
                )
        elif self.num_samples == 0:
            raise ValueError(f"the dataset of stream {s.name!r} is empty")
        elif self.cursor.position > self.num_samples:
            raise ValueError(
                f"the checkpoint stands at sample {self.cursor.position} of epoch {self.cursor.epoch} of stream "
                f"{s.name!r}, but the dataset "
                f"has {self.num_samples} samples now: it is another dataset. Use another run_dir, or fresh=True"
            )
