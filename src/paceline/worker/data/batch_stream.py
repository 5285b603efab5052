"""The distributed sampler of one dataset: its position, the next steps, and this worker's share of each.

The position is two numbers (epoch, samples into it). The next step follows from them alone, so a restore costs the same
anywhere in an epoch. Map-style datasets (`len` and `[]`) are read in the order of `schedule.sample_order`. Every worker
reads all of an iterable dataset, and keeps its own micro-batches. This is exact at any number of workers as long as the
dataset gives the same items in the same order everywhere, which each step checks by count. A restore skips the items
before the position.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.comm.group import WorkerGroup, total
from paceline.data.sharded_stream import LaneSource
from paceline.errors import SyncError
from paceline.plan import Batch
from paceline.schedule.lane_mix import LaneMix
from paceline.schedule.micro_batches import (
    MicroBatch,
    WorkerShare,
    split_among_replicas,
    split_evenly,
    step_ranges,
)
from paceline.schedule.mixture_order import MixtureOrder
from paceline.schedule.sample_order import IndexOrder, WeightedDraws
from paceline.worker.data.data_loading import (
    Collate,
    MapReader,
    MicroBatchRequest,
    ReadOptions,
    StepItems,
    StreamReader,
    open_loader,
    require_fit,
)
from paceline.worker.data.data_request import is_map_style
from paceline.worker.data.load_balancing import LoadBalancer
from paceline.worker.data.micro_batch_size import MicroBatchSize
from paceline.worker.data.read_meter import ReadMeter
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import SampleOrder, StreamPosition, resume_position, stream_seed
from paceline.worker.membership.consensus import RunTogether
from paceline.worker.topology.parallel_groups import ParallelGroups, single_worker_replicas

__all__ = ["BatchStream", "StreamPosition", "StreamSource"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamSource:
    """The arguments of `worker.batches`."""

    dataset: Any
    epochs: int
    collate: Collate
    loaders: int
    prefetch: int
    pin: bool
    name: str
    draws: IndexOrder | None = None  # None: each sample once an epoch
    shuffle: bool | None = None  # None: as the plan says
    drop_last: bool | None = None  # the same
    takeover: str = ""  # what of a torch DataLoader is not the same here
    lanes: tuple[LaneSource, ...] = ()  # of a stream that is read in lanes: those of its datasets
    mixing: LaneMix | None = None  # of several
    begin_loader: Callable[[int], Any] | None = None  # called in each loader process first, with its number
    has_equal_runs: bool = False  # every worker runs as many micro-batches in a step; some are void
    is_endless: bool = False  # a program reads its own data: samples are numbers in order, and no epoch ends


class BatchStream:
    """Yields the remaining steps of a source as StepBatch objects, from the cursor on; commits move the cursor.

    `cursor` is the checkpoint's; changes since then are refused, or reported in `notes`.
    """

    def __init__(
        self,
        source: StreamSource,
        sizes: MicroBatchSize,
        *,
        cursor: StreamPosition,
        group: WorkerGroup,
        run_pass: Callable[[StepBatch], Iterator[Any]],
        together: RunTogether,
        balance: LoadBalancer,
        timeout_s: float,
        axes: ParallelGroups | None = None,
        replicas: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """`replicas()`: the numbers of the present replicas, in order, where they take steps by themselves."""
        self.source = source
        self._axes = single_worker_replicas(group) if axes is None else axes
        self._sizes, self._group, self._run_pass, self._timeout_s = sizes, group, run_pass, timeout_s
        self._together, self._balance, self._replicas = together, balance, replicas
        self._update_share()
        self._items: Iterator[Any] = iter(())
        self.meter = ReadMeter()
        self._wait_s = 0.0  # for the items of the next step, of an iterable
        self._is_stale = True  # what was read ahead is not this worker's present share
        self.num_samples = len(source.dataset) if is_map_style(source.dataset) else 0
        self._check()
        if source.draws is not None:
            self.num_samples = source.draws.num_samples
        batch = self._batch
        self._order = SampleOrder(
            samples=self.num_samples,
            seed=stream_seed(batch, source.name),
            shuffle=batch.shuffle and self.num_samples > 0 and not source.is_endless,
            batch=batch.size,
            micro=batch.resolved_micro,
            drop_last=batch.drop_last,
            **self._order_name(),
        )
        self.cursor, self.notes = resume_position(cursor, self._order, source.name)
        self.was_finished = self._is_finished()

    @property
    def _batch(self) -> Batch:
        batch, source = self._sizes.batch, self.source
        if source.shuffle is None and source.drop_last is None:
            return batch
        shuffle = batch.shuffle if source.shuffle is None else source.shuffle
        drop_last = batch.drop_last if source.drop_last is None else source.drop_last
        return dataclasses.replace(batch, shuffle=shuffle, drop_last=drop_last)

    def about(self) -> dict[str, Any]:
        """For the ledger: the order and the steps of the samples."""
        return self._order.to_dict()

    def drawn(self) -> dict[str, int] | None:
        """How many samples of each dataset are in committed steps, of a mixture; None for other streams."""
        order, at = self.source.draws, self.cursor
        if not isinstance(order, MixtureOrder):
            return None
        return order.drawn_before(seed=self._order.seed, epoch=at.epoch, position=at.position)

    def shares(self) -> dict[str, float]:
        """The shares that each dataset is to have, of a mixture."""
        order, mixing = self.source.draws, self.source.mixing
        if isinstance(order, MixtureOrder):
            return order.shares
        return {} if mixing is None else dict(zip(mixing.names, mixing.shares, strict=True))

    def _order_name(self) -> dict[str, str]:
        """The fields of a SampleOrder that name an order which is no shuffle."""
        draws = self.source.draws
        if draws is None:
            return {}
        return {"weights": draws.checksum} if isinstance(draws, WeightedDraws) else {"draws": draws.name}

    def last_step(self, done: int) -> int | None:
        """The number of the step at which the stream ends, when `done` steps were made before it; None: not known."""
        if not self.num_samples or self.source.is_endless:
            return None
        left = self.source.epochs - self.cursor.epoch
        if left <= 0:
            return done
        return done + self._order.num_steps(self.cursor.position) + self._order.num_steps(0) * (left - 1)

    def steps(self, next_step: Callable[[], int]) -> Iterator[StepBatch]:
        """Yield the remaining steps; `next_step()` gives the number of the next step."""
        try:
            yield from self._map_steps(next_step) if self.num_samples else self._iterable_steps(next_step)
        finally:
            self._items = iter(())  # the loaders end now: at the process's exit they would be killed, and leave files

    def mine(self, start: int, stop: int) -> tuple[MicroBatch, ...]:
        """The micro-batches that this worker reads of the step that has positions [start, stop)."""
        micros, share = self._share(start, stop)
        return micros[share.reads.start : share.reads.stop]

    def _share(self, start: int, stop: int) -> tuple[tuple[MicroBatch, ...], WorkerShare]:
        """A step's micro-batches, and which of them are this worker's."""
        micros = self._sizes.cut(start, stop)
        return micros, self._shares(len(micros))[self._index_and_size[0]]

    def _shares(self, num_micro: int) -> Sequence[WorkerShare]:
        """What each worker runs, for the workers that run different micro-batches."""
        size, each = self._index_and_size[1], self._axes.micro_batch_peers.size
        if self.source.has_equal_runs and self._owners is None:
            return split_among_replicas(num_micro, replicas=1, each=size)
        if each > 1:
            return split_among_replicas(num_micro, replicas=size // each, each=each)
        return [WorkerShare(own, len(own)) for own in self._balance.shares(num_micro, size)]

    def _update_share(self) -> None:
        """Take over this worker's index among the present members."""
        self._index_and_size = self._axes.share_of(self._group)
        self._owners = None if self._replicas is None else tuple(self._replicas())

    def _share_fields(self, start: int, stop: int) -> dict[str, Any]:
        """The fields of a batch that describe this worker's share."""
        micros, share = self._share(start, stop)
        found: dict[str, Any] = {
            "micros": micros[share.own.start : share.own.stop],
            "num_runs": share.num_runs,
            "spare": None if share.spare is None else micros[share.spare],
        }
        if self._owners is not None:
            each, shares = self._axes.micro_batch_peers.size, self._shares(len(micros))
            of_each = [
                tuple(
                    micro
                    for share in shares[first : first + each]
                    for micro in micros[share.own.start : share.own.stop]
                )
                for first in range(0, len(shares), each)
            ]
            found["shares"] = dict(zip(self._owners, of_each, strict=True))
            found["num_here"] = sum(micro.num_samples for micro in of_each[self._index_and_size[0] // each])
        return found

    def read(self, batch: StepBatch, micros: Sequence[MicroBatch]) -> Iterator[Any]:
        """The data of these micro-batches of a batch, which may be other workers'."""
        if self.num_samples:
            return self._open(
                MapReader(self._reading()), (MicroBatchRequest(batch.epoch, micro) for micro in micros), loaders=0
            )
        counted: StepItems = next(self._items_from(batch.epoch, batch.start, mine=lambda start, stop: tuple(micros)))
        return iter(counted.data)

    def _is_finished(self) -> bool:
        """Whether no step is left. An iterable must be read to its end first."""
        return self.last_step(0) == 0 if self.num_samples else self.cursor.epoch >= self.source.epochs

    def _map_steps(self, next_step: Callable[[], int]) -> Iterator[StepBatch]:
        for epoch, start, stop in self._plan(StreamPosition(self.cursor.epoch, self.cursor.position)):
            if self._is_stale:
                self._open_map(epoch, start)
            batch = StepBatch(
                stream=self.source.name,
                step=next_step(),
                epoch=epoch,
                start=start,
                stop=stop,
                **self._share_fields(start, stop),
                ends_epoch=stop == self._order.end_of_epoch(start),
                fetch=lambda: next(self._items),
                run_pass=self._run_pass,
            )
            yield batch
            if not self._is_stale:
                batch.drain()
            batch.let_go()

    def num_left(self) -> int:
        """How many steps the stream has from where it began. Raises ValueError where its end is not known."""
        last = self.last_step(0)
        if last is None:
            raise ValueError(
                f"stream {self.source.name!r} is read from an iterable, whose end is not known: under "
                "ParameterServer(staleness=...) or (drop=...) batches are handed out by number. Use a dataset with "
                "len() and [], or staleness=0 and drop=0"
            )
        if self.source.loaders:
            raise ValueError(
                f"loaders={self.source.loaders} under ParameterServer(staleness=...) or (drop=...): which batch a "
                "replica gets is known only when it requests one, so nothing can be read ahead. Use loaders=0, or "
                "staleness=0 and drop=0"
            )
        return last

    def batch_at(self, number: int, *, begun: StreamPosition, step: int, share: tuple[int, int] = (0, 1)) -> StepBatch:
        """A batch, counted from `begun`; `share` is (index, count) of the share that this worker runs."""
        epoch, start = self._at(number, begun)
        stop = min(start + self._batch.size, self.num_samples)
        micros = self._sizes.cut(start, stop)
        (index, count), each = share, split_evenly(len(micros), share[1])
        own = micros[each[index].start : each[index].stop]
        reader, requests = MapReader(self._reading()), iter(own)
        return StepBatch(
            stream=self.source.name,
            step=step,
            epoch=epoch,
            start=start,
            stop=stop,
            micros=own,
            ends_epoch=stop == self._order.end_of_epoch(start),
            fetch=lambda: reader[MicroBatchRequest(epoch, next(requests))],
            run_pass=self._run_pass,
            shares={number: micros[some.start : some.stop] for number, some in enumerate(each)} if count > 1 else None,
        )

    def steps_of_epochs(self, begun: StreamPosition) -> tuple[int, int]:
        """How many steps are left of the epoch of `begun`, and how many a later one has."""
        return self._order.num_steps(begun.position), self._order.num_steps(0)

    def num_micros(self, begun: StreamPosition) -> tuple[int, int, int]:
        """How many micro-batches a step has, the last step of the epoch of `begun`, and that of a later epoch."""
        size, num_last = self._batch.size, [self._batch.size] * 2
        if not self._batch.drop_last:
            num_last = [left % size or size for left in (self.num_samples - begun.position, self.num_samples)]
        first, later = (len(self._sizes.cut(0, count)) for count in num_last)
        return self._batch.num_micro, first, later

    def stand_after(self, number: int, *, begun: StreamPosition) -> None:
        """Move the cursor to its position after this number of batches."""
        self.cursor.epoch, self.cursor.position = begun.epoch, begun.position
        if number:
            epoch, start = self._at(number - 1, begun)
            self.cursor.epoch, self.cursor.position = epoch, min(start + self._batch.size, self.num_samples)

    def _at(self, number: int, begun: StreamPosition) -> tuple[int, int]:
        """Epoch and first position of a batch, counted from `begun`."""
        in_first, size = self._order.num_steps(begun.position), self._batch.size
        if number < in_first:
            return begun.epoch, begun.position + number * size
        later, step = divmod(number - in_first, self._order.num_steps(0))
        return begun.epoch + 1 + later, step * size

    def cut_again(self) -> None:
        """Micro-batches have another size from the next step on; `reassign` cuts the present one again."""
        self._order = dataclasses.replace(self._order, micro=self._batch.resolved_micro)
        self.cursor.of, self._is_stale = self._order, True

    def members_changed(self) -> None:
        """From the next step on this worker has another share; `reassign` changes that of the present step."""
        self._is_stale = True
        self._update_share()

    @property
    def needs_reassignment(self) -> bool:
        """Whether the members, and with them the shares, have changed since the newest batch was assigned."""
        return self._is_stale

    def reassign(self, batch: StepBatch) -> None:
        """Assign this worker's present share of a batch, for a step that is done again from its beginning."""
        share = self._share_fields(batch.start, batch.stop)
        if self.num_samples:
            self._open_map(batch.epoch, batch.start)
            batch.reassign(lambda: next(self._items), **share)
            return
        self._open_iterable(batch.epoch, batch.start)
        counted: StepItems = next(self._items)
        if counted.num_samples != batch.num_samples:
            raise SyncError(
                f"step {batch.step} is taken again, and the iterable dataset of stream {self.source.name!r} gave "
                f"{counted.num_samples} items for it, not {batch.num_samples} as before: it must give the same items "
                "in the same order each time it is read. Seed it, and sort its files"
            )
        parts = iter(counted.data)
        batch.reassign(lambda: next(parts), **share)

    def _open_map(self, epoch: int, position: int) -> None:
        """Read ahead from this position on; the loader runs ahead of the cursor."""
        requests = (
            MicroBatchRequest(number, micro)
            for number, start, stop in self._plan(StreamPosition(epoch, position))
            for micro in self.mine(start, stop)
        )
        self._items, self._is_stale = self._open(MapReader(self._reading()), requests), False

    def _open_iterable(self, epoch: int, position: int) -> None:
        """Skip the items before this position, and read ahead from it on."""
        self._items, self._is_stale = self._items_from(epoch, position, mine=self.mine), False

    def _items_from(
        self, epoch: int, position: int, *, mine: Callable[[int, int], tuple[MicroBatch, ...]]
    ) -> Iterator[StepItems]:
        """The items of an iterable from a position on, step by step, of these micro-batches."""
        b = self._batch
        reader = StreamReader(
            self._reading(),
            size=b.size,
            micro=b.resolved_micro,
            drop_last=b.drop_last,
            first_epoch=epoch,
            epochs=self.source.epochs,
            position=position,
            mine=mine,
        )
        return self._open(reader, None)

    def _plan(self, begin: StreamPosition) -> Iterator[tuple[int, int, int]]:
        """(epoch, start, stop) of each step from `begin` on."""
        b = self._batch
        for epoch in range(begin.epoch, self.source.epochs):
            position = begin.position if epoch == begin.epoch else 0
            for first, stop in step_ranges(
                num_samples=self.num_samples, size=b.size, drop_last=b.drop_last, position=position
            ):
                yield epoch, first, stop

    def _iterable_steps(self, next_step: Callable[[], int]) -> Iterator[StepBatch]:
        epoch, position = self.cursor.epoch, self.cursor.position
        while epoch < self.source.epochs:
            if self._is_stale:
                self._open_iterable(epoch, position)
            counted: StepItems = self._next_item()
            self._compare_counts(counted.num_samples, epoch, position)
            if self._is_stale and counted.num_samples:  # a member was just lost: the same step, another share
                self._open_iterable(epoch, position)
                counted = self._next_item()
            if counted.num_samples == 0:
                if (epoch, position) == (0, 0):
                    raise ValueError(self._empty_text())
                epoch, position = epoch + 1, 0
                self.cursor.epoch, self.cursor.position = epoch, position
                continue
            parts = iter(counted.data)
            batch = StepBatch(
                stream=self.source.name,
                step=next_step(),
                epoch=epoch,
                start=position,
                stop=position + counted.num_samples,
                **self._share_fields(position, position + counted.num_samples),
                ends_epoch=None,
                fetch=lambda parts=parts: next(parts),
                run_pass=self._run_pass,
            )
            self._note_wait(batch)
            yield batch
            batch.let_go()
            position += counted.num_samples

    def _next_item(self) -> Any:
        """What the loader gives next, of an iterable; how long it takes counts as waiting for the step's data."""
        began = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self._wait_s += time.perf_counter() - began

    def _note_wait(self, batch: StepBatch) -> None:
        batch.data_s, self._wait_s = self._wait_s, 0.0

    def _compare_counts(self, count: int, epoch: int, position: int) -> None:
        """Raise on all workers when they did not all read the same number of items for this step."""
        group = self._group if self._replicas is None else self._axes.whole
        if group.size == 1:
            return

        def counted() -> list[float]:
            return total(group, [count, count * count, 1], what="the item count of an iterable dataset")

        sums = self._together(counted) if self._replicas is None else counted()
        size = int(sums[2])
        if size * sums[1] != sums[0] ** 2:
            raise SyncError(
                f"the iterable dataset of stream {self.source.name!r} gave worker {self._group.index} {count} "
                "items after position "
                f"{position} of epoch {epoch + 1}, but {sums[0] / size:.1f} on average: it must give the same items "
                "in the same order on every worker. "
                "Seed it, sort its files, and do not split it by worker yourself"
            )

    def _empty_text(self) -> str:
        b, name = self._batch, self.source.name
        if b.drop_last:
            return (
                f"the iterable dataset of stream {name!r} gave fewer than {b.size} items in its first epoch, and "
                f"Batch(size={b.size}, drop_last=True) drops them all: there is no step. Use drop_last=False, or a "
                "smaller size"
            )
        return f"the iterable dataset of stream {name!r} is empty: it gave no item in its first epoch, on any worker"

    def _open(
        self,
        reader: MapReader | StreamReader,
        requests: Iterator[MicroBatchRequest] | None,
        *,
        loaders: int | None = None,
    ) -> Iterator[Any]:
        s = self.source
        loaders = s.loaders if loaders is None else loaders
        return open_loader(
            reader,
            requests,
            loaders=loaders,
            prefetch=s.prefetch,
            pin=s.pin,
            timeout_s=self._timeout_s,
            begin=s.begin_loader,
            meter=self.meter,
        )

    def _reading(self) -> ReadOptions:
        s = self._order
        return ReadOptions(self.source.dataset, self.source.collate, s.samples, s.seed, s.shuffle, self.source.draws)

    def _check(self) -> None:
        s = self.source
        if s.draws is not None:
            require_fit(s.draws, s.name, num_samples=self.num_samples, shuffle=self._batch.shuffle)
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
        elif self._batch.drop_last and self.num_samples < self._batch.size:
            raise ValueError(
                f"the dataset of stream {s.name!r} has {self.num_samples} samples, which Batch(size="
                f"{self._batch.size}, drop_last=True) all drops: there would be no step. Use drop_last=False, or a "
                f"size of {self.num_samples} or less"
            )
