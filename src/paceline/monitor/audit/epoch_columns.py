"""The positions that the valid steps of one epoch used, as rows; a block of steps is one row where it leaves no gap.

At each step of a block the workers' parts follow each other without gap or overlap, and the next step begins where
they end. So the whole block covers its positions once, however many steps it has: that is proved at its first step.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.logs.ledger_runs import Run

__all__ = ["EpochColumns", "StepBlock", "StreamHeader", "block_of"]

MERGED = -1  # the worker of a row that is a block


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamHeader:
    """What a worker said when it opened a stream."""

    samples: int | None  # None: an iterable, whose length is unknown
    batch: int
    seed: int
    shuffle: bool
    drop_last: bool
    weights: str = ""  # the name of an order that is no shuffle, such as "weights 1a2b"; "": each comes once
    staleness: int | None = None  # by how many others an update may be behind; None: there is no bound


class StepBlock(NamedTuple):
    """`num` steps, each `stride` after the one before, of which each covers the next `size` positions, once."""

    step: int
    num: int
    stride: int
    base: int
    size: int
    parts: tuple[tuple[int, int, int], ...]  # start, stop, worker: of the first step, from the base on

    @property
    def last_step(self) -> int:
        return self.step + (self.num - 1) * self.stride

    @property
    def stop(self) -> int:
        return self.base + self.num * self.size

    def part(self, begin: int, end: int) -> StepBlock:
        """Steps `begin` to `end` - 1."""
        step, base = self.step + begin * self.stride, self.base + begin * self.size
        return self._replace(step=step, base=base, num=end - begin)


@dataclasses.dataclass(kw_only=True, slots=True)
class EpochColumns:
    """The position ranges that the valid steps of one epoch used: row i is [starts[i], stops[i])."""

    begins_at: int = 0  # the positions before it were used by another run
    # Distinct ones, by their last appearance.
    streams: list[StreamHeader] = dataclasses.field(default_factory=list["StreamHeader"])
    starts: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    stops: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    steps: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    workers: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    blocks: dict[int, StepBlock] = dataclasses.field(default_factory=dict[int, StepBlock])  # by row
    first_step: int | None = None
    last_step: int = 0
    skipped_steps: set[int] = dataclasses.field(default_factory=set[int])
    num_dropped: int = 0  # positions whose gradients came too late for their steps

    def note(self, stream: StreamHeader, run: Run) -> None:
        """Note the stream of a run's steps, and which steps these are."""
        if not self.streams or self.streams[-1] is not stream:  # a batch size may come back
            self.streams[:] = [*(one for one in self.streams if one != stream), stream]
        if self.first_step is None or run.step < self.first_step:
            self.first_step = run.step
        if (last := run.last_step) > self.last_step:
            self.last_step = last

    def note_outcome(self, run: Run) -> None:
        """Note which steps changed no weights, and how many samples came too late."""
        if run.shape.skipped:
            self.skipped_steps.update(range(run.step, run.last_step + 1, run.stride))
        if run.shape.dropped:
            self.num_dropped += run.num * sum(stop - start for start, stop in run.shape.dropped)

    def add_block(self, block: StepBlock) -> None:
        """Add a block as one row."""
        self.blocks[len(self.starts)] = block
        self._row(block.base, block.stop, block.step, MERGED)

    def add_ranges(self, run: Run, worker: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Add a row for each step of a run and each range, which count from its base."""
        if run.num == 1:
            for start, stop in ranges:
                self._row(run.base + start, run.base + stop, run.step, worker)
            return
        index = np.arange(run.num, dtype=np.int64)
        for start, stop in ranges:
            self.starts.frombytes((run.base + start + index * run.shift).tobytes())
            self.stops.frombytes((run.base + stop + index * run.shift).tobytes())
            self.steps.frombytes((run.step + index * run.stride).tobytes())
            self.workers.frombytes(np.full(run.num, worker, dtype=np.int64).tobytes())

    def unfolded(self, places: Sequence[tuple[int, int]]) -> EpochColumns:
        """The same with a row for each part of each step that touches one of these ranges of positions."""
        result = EpochColumns(begins_at=self.begins_at)
        for row in range(len(self.starts)):
            block = self.blocks.get(row)
            if block is None:
                result._row(self.starts[row], self.stops[row], self.steps[row], self.workers[row])
                continue
            for begin, end, is_near in _pieces(block, places):
                if is_near:
                    result._unfold(block.part(begin, end))
                else:
                    result.add_block(block.part(begin, end))
        return result

    def _unfold(self, block: StepBlock) -> None:
        for index in range(block.num):
            one = block.part(index, index + 1)
            for start, stop, worker in block.parts:
                self._row(one.base + start, one.base + stop, one.step, worker)

    def _row(self, start: int, stop: int, step: int, worker: int) -> None:
        self.starts.append(start)
        self.stops.append(stop)
        self.steps.append(step)
        self.workers.append(worker)


def block_of(pieces: Sequence[tuple[int, Run]]) -> StepBlock | None:
    """The block that workers' runs of the same steps are together; None where it is not sure that each position comes
    once."""
    used = [(worker, run) for worker, run in pieces if run.shape.ranges]
    if not used:
        return None
    run = used[0][1]
    if any((each.shift, each.epoch) != (run.shift, run.epoch) for _, each in used):
        return None
    ranges = sorted((each.base + a, each.base + b, worker) for worker, each in used for a, b in each.shape.ranges)
    base, reached = ranges[0][0], ranges[0][0]
    for start, stop, _ in ranges:
        if start != reached or stop <= start:
            return None
        reached = stop
    if run.num > 1 and reached - base != run.shift:
        return None
    parts = tuple((start - base, stop - base, worker) for start, stop, worker in ranges)
    return StepBlock(run.step, run.num, run.stride, base, reached - base, parts)


def _pieces(block: StepBlock, places: Sequence[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """Cut a block into steps that lie near one of the places, and others: first, end, near."""
    near: list[tuple[int, int]] = []
    for start, stop in sorted(places):
        begin = max((start - block.base) // block.size - 1, 0)
        end = min((stop - block.base) // block.size + 2, block.num)
        if begin < end:
            if near and begin <= near[-1][1]:
                near[-1] = near[-1][0], max(near[-1][1], end)
            else:
                near.append((begin, end))
    pieces: list[tuple[int, int, bool]] = []
    done = 0
    for begin, end in near:
        pieces += [(done, begin, False)] if done < begin else []
        pieces.append((begin, end, True))
        done = end
    return pieces + ([(done, block.num, False)] if done < block.num else [])
