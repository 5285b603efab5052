"""The global batches of a run, read by one process: the same samples in the same micro-batches as on any workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from paceline.plan import Batch
from paceline.schedule.micro_batches import MicroBatch, micro_batches, step_ranges
from paceline.worker.data import random_state
from paceline.worker.data.data_loading import (
    Collate,
    MapReader,
    MicroBatchRequest,
    ReadOptions,
    StreamReader,
    require_fit,
)
from paceline.worker.data.data_request import DataRequest, is_map_style, read_request
from paceline.worker.data.lane_steps import lane_steps
from paceline.worker.data.stream_position import stream_seed

__all__ = ["BareBatch", "bare_batches"]


class BareBatch:
    """All micro-batches of one step; what `worker.batches` yields in the plain torch loop."""

    is_void = False

    def __init__(
        self,
        stream: str,
        epoch: int,
        micros: Sequence[MicroBatch],
        *,
        read: Callable[[MicroBatch], Any],
        run_pass: Callable[[BareBatch], Iterator[Any]],
        ends_epoch: bool | None,
    ) -> None:
        self.stream, self.epoch, self.micros, self.ends_epoch = stream, epoch, tuple(micros), ends_epoch
        self.start, self.stop = micros[0].start, micros[-1].stop
        self.num_samples = self.num_here = self.stop - self.start
        self.step = self.num_passes = 0
        self.is_committed = False
        self.loss: float | None = None  # of the first pass
        self._read, self._run_pass = read, run_pass
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.micros)

    def __iter__(self) -> Iterator[Any]:
        return self._run_pass(self)

    def read(self, micro: MicroBatch) -> Any:
        """The data of a micro-batch."""
        if micro.index not in self._kept:
            self._kept[micro.index] = self._read(micro)
        return self._kept[micro.index]


def bare_batches(
    dataset: Any,
    batch: Batch,
    *,
    stream: str,
    epochs: int,
    collate: Collate | None,
    weights: Sequence[float] | Tensor | None,
    lengths: Sequence[float] | Tensor | None = None,
    run_pass: Callable[[BareBatch], Iterator[Any]],
) -> Iterator[BareBatch]:
    """Yield the steps of a dataset with len() and [], of an iterable, or of a DataLoader. `weights` and `lengths`: as
    for `worker.batches`."""
    seed = stream_seed(batch, stream)
    request = read_request(dataset, batch, seed=seed, collate=collate, weights=weights, lengths=lengths)
    dataset, draws, is_map = request.dataset, request.draws, is_map_style(request.dataset)
    batch = request.within(batch)
    num_samples = len(dataset) if is_map else 0
    if draws is not None:
        require_fit(draws, stream, num_samples=num_samples, shuffle=batch.shuffle)
        num_samples = draws.num_samples
    reading = ReadOptions(dataset, request.collate, num_samples, seed, batch.shuffle and is_map, draws)
    if request.lanes:
        steps = _lane_steps(reading, request, batch, epochs)
    else:
        steps = _map_steps(reading, batch, epochs) if is_map else _iterable_steps(reading, batch, epochs)
    for epoch, micros, read, ends_epoch in steps:
        yield BareBatch(stream, epoch, micros, read=read, run_pass=run_pass, ends_epoch=ends_epoch)


Step = tuple[int, Sequence[MicroBatch], Callable[[MicroBatch], Any], bool | None]


def _map_steps(reading: ReadOptions, batch: Batch, epochs: int) -> Iterator[Step]:
    reader = MapReader(reading)
    for epoch in range(epochs):
        ranges = list(step_ranges(num_samples=reading.num_samples, size=batch.size, drop_last=batch.drop_last))
        for start, stop in ranges:

            def read(micro: MicroBatch, epoch: int = epoch) -> Any:
                with random_state.PreservedRandomState():
                    return reader[MicroBatchRequest(epoch, micro)]

            micros = micro_batches(start, stop, batch.resolved_micro)
            yield epoch, micros, read, stop == ranges[-1][1]


def _lane_steps(reading: ReadOptions, request: DataRequest, batch: Batch, epochs: int) -> Iterator[Step]:
    def cut(start: int, stop: int) -> Sequence[MicroBatch]:
        return micro_batches(start, stop, batch.resolved_micro)

    found = lane_steps(reading, request.lanes, request.mixing, batch=batch, epochs=epochs, mine=cut)
    for epoch, start, items in found:
        yield epoch, cut(start, start + items.num_samples), lambda micro, data=items.data: data[micro.index], None


def _iterable_steps(reading: ReadOptions, batch: Batch, epochs: int) -> Iterator[Step]:
    reader = StreamReader(
        reading,
        size=batch.size,
        micro=batch.resolved_micro,
        drop_last=batch.drop_last,
        first_epoch=0,
        epochs=epochs,
        position=0,
        mine=lambda start, stop: micro_batches(start, stop, batch.resolved_micro),
    )
    epoch = position = 0
    for items in reader:
        if not items.num_samples:
            epoch, position = epoch + 1, 0
            continue
        micros = micro_batches(position, position + items.num_samples, batch.resolved_micro)
        yield epoch, micros, lambda micro, data=items.data: data[micro.index], None
        position += items.num_samples
