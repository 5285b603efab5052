"""The distributed sampler of a stream that is read in lanes: each worker opens only those that its micro-batches need.

Before each step all workers compare how much they read, and tell each other which lanes have ended; the step is then
divided again. Every few steps they exchange the states of their lanes. So any worker can go on with any lane: after a
resume, on another number of workers, or when a worker was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.comm.group import total
from paceline.data.lane_sources import lanes_name
from paceline.data.sharded_stream import LaneSource
from paceline.errors import SyncError
from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.data.batch_stream import BatchStream, StreamSource
from paceline.worker.data.data_loading import open_loader
from paceline.worker.data.lane_reading import LaneItems, LaneReader
from paceline.worker.data.lane_table import LaneKey, LaneState, LaneTable
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import StreamPosition

__all__ = ["LaneStream"]

LEAST_CHANGE = 1e-9  # of a share
STATE_STEPS = 8  # a reader that begins passes over the items of as many steps at most


class LaneStream(BatchStream):
    """Yields the remaining steps of a stream of lanes."""

    _table: LaneTable
    _lanes: Sequence[LaneSource]

    def __init__(self, source: StreamSource, *args: Any, cursor: StreamPosition, **parts: Any) -> None:
        """As for `BatchStream`; the source has lanes."""
        self._lanes = source.lanes
        super().__init__(source, *args, cursor=cursor, **parts)
        self._table = LaneTable([one.num_lanes for one in source.lanes], mixing=source.mixing, seed=self._order.seed)
        saved = cursor.lanes() if cursor.lanes is not None else cursor.saved_lanes
        is_there = (self.cursor.epoch, self.cursor.position) == (cursor.epoch, cursor.position)
        if saved is not None and is_there and cursor.of is not None and cursor.of.order == self._order.order:
            self._table.load_state_dict(saved, epoch=cursor.epoch, position=cursor.position)
            self._note_shares(saved.get("shares"))
        self._read_size = self._batch.size
        self.cursor.lanes = self._saved_lanes

    def _saved_lanes(self) -> dict[str, Any]:
        """For a checkpoint, as far as steps are committed."""
        found = self._table.state_dict(self.cursor.epoch, self.cursor.position, self._read_size)
        mixing = self.source.mixing
        return found if mixing is None else {**found, "shares": list(mixing.shares)}

    def drawn(self) -> dict[str, int] | None:
        """How many samples of each dataset are in committed steps, of a mixture."""
        mixing = self.source.mixing
        if mixing is None:
            return None
        return mixing.drawn(self._table.progress_at(self.cursor.epoch, self.cursor.position, self._read_size))

    def _note_shares(self, before: Sequence[float] | None) -> None:
        """Say where a mixture goes on with other weights: no lane loses its place by that."""
        mixing = self.source.mixing
        if mixing is None or before is None or len(before) != len(mixing.shares):
            return
        if any(abs(now - then) > LEAST_CHANGE for now, then in zip(mixing.shares, before, strict=True)):
            shown = ", ".join(
                f"{name} {now:.2%} (before: {then:.2%})"
                for name, now, then in zip(mixing.names, mixing.shares, before, strict=True)
            )
            self.notes.append(f"stream {self.source.name!r} goes on with other weights: {shown}")

    def reassign(self, batch: StepBatch) -> None:
        """Assign this worker's present share of a batch, for a step that is done again from its beginning."""
        share = self._share_fields(batch.start, batch.stop)
        self._open_lanes(batch.epoch, batch.start)
        items = self._next_items()
        self._require_same(items, batch)
        parts = iter(items.data)
        batch.reassign(lambda: next(parts), **share)

    def read(self, batch: StepBatch, micros: Sequence[MicroBatch]) -> Iterator[Any]:
        """The data of these micro-batches of a batch, which may be other workers'."""
        reader = self._reader(batch.epoch, batch.start, mine=lambda start, stop: tuple(micros), num_parts=1)
        items = next(iter(reader))
        self._require_same(items, batch)
        return iter(items.data)

    def _iterable_steps(self, next_step: Callable[[], int]) -> Iterator[StepBatch]:
        epoch, position = self.cursor.epoch, self.cursor.position
        while epoch < self.source.epochs:
            items = self._settled_items(epoch, position)
            if items.num_samples == 0:
                if (epoch, position) == (0, 0):
                    raise ValueError(self._empty_text())
                before = self._table.progress_at(epoch, position, self._batch.size)
                epoch, position = epoch + 1, 0
                self._table.begin_epoch(epoch, before)
                self.cursor.epoch, self.cursor.position = epoch, position
                self._is_stale = True
                continue
            stop = position + items.num_samples
            parts = iter(items.data)
            batch = StepBatch(
                stream=self.source.name,
                step=next_step(),
                epoch=epoch,
                start=position,
                stop=stop,
                **self._share_fields(position, stop),
                ends_epoch=None,
                fetch=lambda parts=parts: next(parts),
                run_pass=self._run_pass,
            )
            self._note_wait(batch)
            yield batch
            batch.let_go()
            position = stop

    def _settled_items(self, epoch: int, position: int) -> LaneItems:
        """What this worker reads of the step at this position, once no lane is found too short any more."""
        while True:
            items: list[LaneItems] = []  # of this worker's present share

            def read(items: list[LaneItems] = items) -> LaneItems:
                if self._is_stale:
                    self._open_lanes(epoch, position)
                    items.clear()
                if not items:
                    items.append(self._next_items())
                return items[0]

            read()  # before others are waited for
            ends, states = self._exchange(read, epoch, position)
            if not ends:
                if states:
                    progress = self._table.progress_at(epoch, position, self._batch.size)
                    self._table.note(epoch, position, progress, states)
                self._table.reached(epoch, position, self._batch.size)
                return items[0]
            self._table.ends.update(ends)
            self._is_stale = True

    def _exchange(
        self, read: Callable[[], LaneItems], epoch: int, position: int
    ) -> tuple[dict[tuple[int, int, int], int], dict[LaneKey, LaneState]]:
        """The ends that all workers have found, and, every few steps, the states of all lanes."""
        if self._group.size == 1 or self._replicas is not None:
            items = read()
            return dict(items.ends), dict(items.states)

        def told() -> list[tuple[Mapping[Any, Any], Mapping[Any, Any]]]:
            items = read()
            count, has_ended = items.num_samples, float(bool(items.ends))
            sums = total(
                self._group, [count, count * count, 1, has_ended], what="the item count of a stream that has lanes"
            )
            if sums[2] * sums[1] != sums[0] ** 2:
                raise SyncError(
                    f"the workers do not agree how many samples stream {self.source.name!r} has from {position} on: "
                    "each must be given the same stream, with as many shards"
                )
            if not sums[3] and not self._keeps_state(position):
                return []
            return self._group.gather_objects((dict(items.ends), dict(items.states)))

        ends: dict[tuple[int, int, int], int] = {}
        states: dict[LaneKey, LaneState] = {}
        for of_one, states_of_one in self._together(told):
            for key, count in of_one.items():
                if ends.setdefault(key, count) != count:
                    raise SyncError(
                        f"lane {key[2]} of stream {self.source.name!r} ended after {ends[key]} items on one worker and "
                        f"after {count} on another: a shard must give the same items wherever it is read. Seed it, and "
                        "sort its files"
                    )
            states.update(states_of_one)
        return ends, states

    def _keeps_state(self, position: int) -> bool:
        return position // self._batch.size % STATE_STEPS == 0

    def _open_lanes(self, epoch: int, position: int) -> None:
        """Read ahead from this position on."""
        loaders = self.source.loaders
        reader = self._reader(epoch, position, mine=self.mine, num_parts=max(1, loaders))
        s = self.source
        self._items = open_loader(
            reader,
            None,
            loaders=loaders,
            prefetch=s.prefetch,
            pin=s.pin,
            timeout_s=self._timeout_s,
            begin=s.begin_loader,
            meter=self.meter,
        )
        self._is_stale = False

    def _next_items(self) -> LaneItems:
        """The next step, of all loader processes."""
        parts: list[LaneItems] = [self._next_item() for _ in range(max(1, self.source.loaders))]
        ends = {key: count for part in parts for key, count in part.ends.items()}
        states = {key: state for part in parts for key, state in part.states.items()}
        data = () if ends else tuple(one for part in parts for one in part.data)
        return LaneItems(parts[0].num_samples, data, ends=ends, states=states)

    def _reader(
        self, epoch: int, position: int, *, mine: Callable[[int, int], Sequence[MicroBatch]], num_parts: int
    ) -> LaneReader:
        batch = self._batch
        return LaneReader(
            self._reading(),
            self._lanes,
            self._table,
            size=batch.size,
            drop_last=batch.drop_last,
            epoch=epoch,
            position=position,
            mine=mine,
            reads_all=self._replicas is not None,
            keeps_state=self._keeps_state,
            num_parts=num_parts,
        )

    def _require_same(self, items: LaneItems, batch: StepBatch) -> None:
        if items.ends or items.num_samples != batch.num_samples:
            raise SyncError(
                f"step {batch.step} is taken again, and the stream {self.source.name!r} gave other items for it than "
                "before: a shard must give the same items in the same order each time it is read. Seed it, and sort "
                "its files"
            )

    def _check(self) -> None:
        if self.source.draws is not None:
            super()._check()  # refuses it

    def _order_name(self) -> dict[str, str]:
        return {"draws": lanes_name(self.source.lanes, self.source.mixing)}
