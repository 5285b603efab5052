"""Reads a worker's micro-batches from the lanes of a stream: in this process, or divided among loader processes.

It opens only the lanes that its micro-batches come from. A lane is read forwards; where another worker has read a part
of it meanwhile, that part is passed over. Random state is seeded for each item by its lane and number, so what a reader
draws is the same wherever and whenever it is read.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.sharded_stream import LaneSource, OpenLane
from paceline.schedule.lane_deal import LaneBlock
from paceline.schedule.micro_batches import MicroBatch, split_evenly
from paceline.worker.data import random_state
from paceline.worker.data.data_loading import ReadOptions, StepItems
from paceline.worker.data.lane_table import LaneKey, LaneState, LaneTable, StepDeal
from paceline.worker.data.state_probe import StateProbe

__all__ = ["LaneItems", "LaneReader", "Shares"]

ITEM, COLLATE = 5, 2  # among the uses of random state that are seeded by a stream's seed

Shares = Callable[[int, int], Sequence[MicroBatch]]  # the micro-batches of the step [start, stop) that are read


@dataclasses.dataclass(frozen=True, slots=True)
class LaneItems(StepItems):
    """What was read of a step: its data, lanes that ended in it, and the states that lanes had before it."""

    ends: Mapping[tuple[int, int, int], int] = dataclasses.field(default_factory=dict[tuple[int, int, int], int])
    states: Mapping[LaneKey, LaneState] = dataclasses.field(default_factory=dict[LaneKey, LaneState])


class LaneReader(IterableDataset[Any]):
    """Reads steps from a position on, until a lane is found to end before its share: the step is then divided again."""

    def __init__(
        self,
        reading: ReadOptions,
        sources: Sequence[LaneSource],
        table: LaneTable,
        *,
        size: int,
        drop_last: bool,
        epoch: int,
        position: int,
        mine: Shares,
        reads_all: bool,
        keeps_state: Callable[[int], bool],
        num_parts: int,
    ) -> None:
        """`reads_all`: all lanes, also those of others' micro-batches. `keeps_state(start)`: whether the states before
        the step from there on are wanted. `num_parts`: loader processes."""
        self._reading, self._sources, self._table = reading, sources, table
        self._size, self._drop_last, self._epoch, self._position = size, drop_last, epoch, position
        self._mine, self._reads_all, self._keeps_state = mine, reads_all, keeps_state
        self._num_parts = num_parts
        self._open: dict[LaneKey, OpenLane] = {}
        self._states: Mapping[LaneKey, LaneState] = {}
        self._probe: tuple[LaneKey, StateProbe] | None = None
        self._is_tried = False  # a state of a lane was

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self._reading.dataset

    def __iter__(self) -> Iterator[LaneItems]:
        part = _be_one_reader()
        start, self._states = self._position, self._table.states_for(self._epoch, self._position)
        progress = self._table.progress_at(self._epoch, start, self._size)
        try:
            while True:
                step = self._table.deal_from(progress, self._epoch, start, self._size)
                if not step.num_samples or (self._drop_last and step.num_samples < self._size):
                    yield LaneItems(0, ())  # the end of the epoch
                    return
                items = self._step(step, part)
                yield items
                if items.ends:
                    return
                start, progress = step.stop, step.after
        finally:
            for lane in self._open.values():
                lane.close()
            self._open.clear()

    def _step(self, step: StepDeal, part: int) -> LaneItems:
        micros = self._mine(step.start, step.stop)
        own = split_evenly(len(micros), self._num_parts)[part]
        micros = micros[own.start : own.stop]
        wanted = [(micro.start - step.start, micro.stop - step.start) for micro in micros]
        own_places = {place for start, stop in wanted for place in range(start, stop)}
        found: dict[int, Any] = {}  # the wanted items, by their place in the step
        ends: dict[tuple[int, int, int], int] = {}
        states: dict[LaneKey, LaneState] = {}
        needs_all, keeps = self._reads_all and part == 0, self._keeps_state(step.start)
        with random_state.PreservedRandomState():
            for block, places in step.blocks:
                if needs_all or not own_places.isdisjoint(places):
                    items = self._block(block, states if keeps else None)
                    if len(items) < block.count:
                        ends[block.source, block.epoch, block.lane] = block.first + len(items)
                    elif not ends:
                        found.update(
                            (place, item) for place, item in zip(places, items, strict=True) if place in own_places
                        )
        if ends:
            return LaneItems(step.num_samples, (), ends=ends, states=states)
        data = [
            self._collated([found[place] for place in range(start, stop)], micro)
            for (start, stop), micro in zip(wanted, micros, strict=True)
        ]
        return LaneItems(step.num_samples, tuple(data), states=states)

    def _block(self, block: LaneBlock, states: dict[LaneKey, LaneState] | None) -> list[Any]:
        """The items of a block, as far as the lane has them; with `states`, note its state before them, once a step."""
        lane = self._at(block)
        key = block.source, block.lane
        if states is not None and key not in states:
            states[key] = block.epoch, lane.count, lane.state()
            self._begin_probe(key, states[key])
        items: list[Any] = []
        while lane.count < block.first + block.count:
            number = lane.count
            item = self._next(lane, block)
            if item is _END:
                break
            if number >= block.first:
                items.append(item)
        return items

    def _at(self, block: LaneBlock) -> OpenLane:
        """The block's lane, opened where that is needed, at its first item at most."""
        key = block.source, block.lane
        lane = self._open.get(key)
        if lane is None or lane.epoch != block.epoch or lane.count > block.first:
            if lane is not None:
                lane.close()
            epoch, count, state = self._states.get(key, (block.epoch, 0, None))
            if epoch != block.epoch or count > block.first:
                count, state = 0, None
            self._seed(block, count)
            lane = self._sources[block.source].open(block.lane, block.epoch, count, state)
            self._open[key] = lane
        while lane.count < block.first and self._next(lane, block) is not _END:
            pass
        return lane

    def _next(self, lane: OpenLane, block: LaneBlock) -> Any:
        self._seed(block, lane.count)
        item = next(lane, _END)
        if self._probe is not None and self._probe[0] == (block.source, block.lane):
            probe = self._probe[1]
            if item is _END or probe.note(item):
                self._probe = None
                probe.require_same(self._read_again(block, probe), block.lane)
        return item

    def _begin_probe(self, key: LaneKey, state: LaneState) -> None:
        """Try the first state that a lane has."""
        if not self._is_tried and state[2] is not None and self._sources[key[0]].opens_copies:
            self._is_tried, self._probe = True, (key, StateProbe(*state))

    def _read_again(self, block: LaneBlock, probe: StateProbe) -> list[Any]:
        """What a second copy of the lane gives, from the probe's state on."""
        self._seed(block, probe.count)
        again = self._sources[block.source].open(block.lane, probe.epoch, probe.count, copy.deepcopy(probe.state))
        items: list[Any] = []
        for _ in probe.given:
            self._seed(block, again.count)
            items.append(next(again, _END))
        again.close()
        return items

    def _seed(self, block: LaneBlock, count: int) -> None:
        random_state.seed_all(self._reading.seed, ITEM, block.source, block.epoch, block.lane, count)

    def _collated(self, items: list[Any], micro: MicroBatch) -> Any:
        with random_state.PreservedRandomState():
            random_state.seed_all(self._reading.seed, COLLATE, self._epoch, micro.start)
            return self._reading.collate(items)


_END = object()


def _be_one_reader() -> int:
    """The number of this loader process. From now on a dataset finds itself read by one only: many datasets would give
    each loader process another part, and the lane is a part already."""
    info = get_worker_info()
    if info is None:
        return 0
    number = info.id
    object.__setattr__(info, "num_workers", 1)
    object.__setattr__(info, "id", 0)
    return number
