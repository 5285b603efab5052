"""Which micro-batches a step has, and which of them each worker runs.

The list of micro-batches depends on the batch alone; the number of workers only decides which worker runs which.
Contiguous ranges keep a worker's reads close together and its ledger lines short.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence

__all__ = [
    "MicroBatch",
    "WorkerShare",
    "micro_batches",
    "split_among_replicas",
    "split_by_speed",
    "split_evenly",
    "step_ranges",
]


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch: number `index` of its step, positions [start, stop) of its epoch's order."""

    index: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerShare:
    """What one worker runs of a step: its own micro-batches, and void runs up to `num_runs`.

    The workers of a replica exchange tensors in each forward and backward, so all of them make the same number of runs.
    A void run repeats a micro-batch without effect: the worker's own last one or, if it has none, `spare`.
    """

    own: range  # places in the step's list
    num_runs: int
    spare: int | None = None  # a place in the step's list

    @property
    def reads(self) -> range:
        """The micro-batches whose data are needed."""
        return self.own if self.spare is None else range(self.spare, self.spare + 1)


def step_ranges(*, num_samples: int, size: int, drop_last: bool, position: int = 0) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of each remaining step of an epoch, from `position` on. The last may be short."""
    while position < num_samples and not (drop_last and position + size > num_samples):
        stop = min(position + size, num_samples)
        yield position, stop
        position = stop


def micro_batches(start: int, stop: int, micro: int, *, is_even: bool = True) -> tuple[MicroBatch, ...]:
    """Split positions [start, stop) into the fewest micro-batches of at most `micro` samples, whose sizes differ by at
    most one.

    Even sizes leave no last micro-batch of a single sample, on which batch norm would fail, and keep workers equally
    busy. With `is_even=False` all but the last have `micro` samples.
    """
    if not is_even:
        starts = range(start, stop, micro)
        return tuple(MicroBatch(index, first, min(first + micro, stop)) for index, first in enumerate(starts))
    parts = split_evenly(stop - start, -(-(stop - start) // micro))
    return tuple(MicroBatch(index, start + part.start, start + part.stop) for index, part in enumerate(parts))


def split_by_speed(num_micro: int, seconds: Sequence[float]) -> tuple[range, ...]:
    """Split 0..num_micro-1 into contiguous ranges so that the slowest worker finishes as early as possible.

    `seconds`: the time of one micro-batch on each worker. Each worker gets at least one, if there are enough, because a
    worker without any could no longer be measured. Each further one goes to the worker that would finish it first.
    """
    counts = [0] * len(seconds)
    waiting = [(0.0, place) for place in range(len(seconds))]  # by finishing time; workers without any come first
    for _ in range(num_micro):
        _, place = heapq.heappop(waiting)
        counts[place] += 1
        heapq.heappush(waiting, ((counts[place] + 1) * max(seconds[place], 1e-9), place))
    bounds = list(itertools.accumulate(counts, initial=0))
    return tuple(range(a, b) for a, b in itertools.pairwise(bounds))


def split_evenly(num_micro: int, num_shares: int) -> tuple[range, ...]:
    """Split 0..num_micro-1 into contiguous ranges whose lengths differ by at most one; some may be empty."""
    least, extra = divmod(num_micro, num_shares)
    bounds = [0]
    for share in range(num_shares):
        bounds.append(bounds[-1] + least + (share < extra))
    return tuple(range(a, b) for a, b in itertools.pairwise(bounds))


def split_among_replicas(num_micro: int, *, replicas: int, each: int) -> tuple[WorkerShare, ...]:
    """Split 0..num_micro-1 among replicas of `each` workers, with the fewest runs per worker and the fewest void runs.

    Rows of `each` micro-batches, one for each worker of a replica, are handed to the replicas. Only the last row may be
    short, so fewer than `each` runs are void. A replica without a row makes no run at all.
    """
    shares: list[WorkerShare] = []
    for rows in split_evenly(-(-num_micro // each), replicas):
        first, stop = rows.start * each, min(rows.stop * each, num_micro)
        for part in split_evenly(stop - first, each):
            own = range(first + part.start, first + part.stop)
            shares.append(WorkerShare(own, len(rows), spare=first if rows and not own else None))
    return tuple(shares)
