"""Which items of a stream's lanes a step has: a pure function of how far the lanes have come, and of known ends.

A stream without random access is cut into lanes, each of which can only be read forwards. A step takes as many items
from each lane that still has some, as far as that divides. So a worker that runs a part of the step's micro-batches
reads a part of the lanes, and which one reads which lane does not change the samples.

How many items a lane has is known when somebody has read its end. Until then it is treated as if it had enough. Where
it had too few, the same step is divided again, with that end known. A later end changes no step before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from paceline.schedule.micro_batches import split_evenly

__all__ = ["LaneBlock", "LaneEnds", "SourceProgress", "deal", "num_left"]

LaneEnds = Mapping[tuple[int, int, int], int]  # by source, its epoch and lane: how many items the lane has then


@dataclasses.dataclass(frozen=True, slots=True)
class LaneBlock:
    """Items [first, first + count) of one lane, in one pass over its source."""

    source: int
    epoch: int
    lane: int
    first: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class SourceProgress:
    """How far a source has come: the items that were taken of each lane, in this epoch of its own."""

    epoch: int
    counts: tuple[int, ...]
    first: int = 0  # its own epoch in which the stream's epoch began, of a mixture
    before: int = 0  # items that were taken of it in earlier epochs, of a mixture
    is_over: bool = False  # it gives nothing any more in the stream's epoch, of a mixture that goes on without it

    @property
    def num_taken(self) -> int:
        """Items that were taken of it in all epochs, of a mixture."""
        return self.before + sum(self.counts)

    @classmethod
    def begin(cls, num_lanes: int, *, epoch: int = 0) -> SourceProgress:
        """Nothing is taken."""
        return cls(epoch, (0,) * num_lanes)


def deal(
    source: int, progress: SourceProgress, ends: LaneEnds, need: int
) -> tuple[tuple[LaneBlock, ...], SourceProgress]:
    """Return where the next `need` items of a source are, in order, and how far it has come then.

    Where all lanes are known to end before that, there are fewer.
    """
    blocks: list[LaneBlock] = []
    epoch, counts = progress.epoch, list(progress.counts)
    while need > 0:
        left = [ends.get((source, epoch, lane), counts[lane] + need) - counts[lane] for lane in range(len(counts))]
        active = [lane for lane, count in enumerate(left) if count > 0][:need]
        if not active:
            break
        for lane, count in zip(active, _shares([left[lane] for lane in active], need), strict=True):
            blocks.append(LaneBlock(source, epoch, lane, counts[lane], count))
            counts[lane] += count
            need -= count
    return tuple(blocks), dataclasses.replace(progress, counts=tuple(counts))


def num_left(source: int, progress: SourceProgress, ends: LaneEnds) -> int | None:
    """How many items a source has left in its epoch; None where an end is not known yet."""
    known = [ends.get((source, progress.epoch, lane)) for lane in range(len(progress.counts))]
    if any(end is None for end in known):
        return None
    return sum(end or 0 for end in known) - sum(progress.counts)


def _shares(left: Sequence[int], need: int) -> list[int]:
    """Divide `need` items evenly over lanes of which each has so many left; what one lacks, the others give.

    Lanes that have less than an even share give all. That can only raise the shares of the others, so a lane that had
    enough in the end had enough all the time: knowing its length would have changed nothing.
    """
    shares, free = [0] * len(left), list(range(len(left)))
    while free:
        even = [len(part) for part in split_evenly(need, len(free))]
        short = {lane for lane, share in zip(free, even, strict=True) if left[lane] < share}
        if not short:
            for lane, share in zip(free, even, strict=True):
                shares[lane] = share
            break
        for lane in short:
            shares[lane] = left[lane]
            need -= left[lane]
        free = [lane for lane in free if lane not in short]
    return shares
