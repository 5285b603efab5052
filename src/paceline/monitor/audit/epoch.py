"""Judges one epoch of an audit: was each of its positions used once, and does the order name every sample?

Gaps between ranges and overlaps of ranges are found by sorting.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.monitor.audit.epoch_columns import EpochColumns, StreamHeader
from paceline.monitor.audit.ledger_reader import MOST_LISTED, Rollback

__all__ = [
    "MOST_LISTED",
    "Coverage",
    "EpochAudit",
    "MissingRange",
    "RepeatedRange",
    "UndoneRange",
    "as_array",
    "audit_epoch",
]

MOST_INDICES = 8  # samples named for a range
MOST_PERMUTED = 10_000_000
CHUNK = 1 << 20

Samples = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MissingRange:
    """Positions [start, stop) that no step used; they lie between the positions of these two steps."""

    start: int
    stop: int
    after_step: int | None
    before_step: int | None
    samples: Samples  # dataset indices of the first of them


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedRange:
    """Positions [start, stop) that were used more than once: two of the (step, worker) pairs that did."""

    start: int
    stop: int
    steps: tuple[int, int]
    workers: tuple[int, int]
    samples: Samples  # dataset indices of the first of them


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UndoneRange:
    """Positions [start, stop) whose steps a rollback has undone: used once, and not used again."""

    start: int
    stop: int
    first_step: int
    last_step: int
    to_step: int  # whose state came back
    samples: Samples  # dataset indices of the first of them


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpochAudit:
    """The verdict on one epoch of one stream.

    state: "exact": each sample was used once. "continued": each from `begins_at` on; what came before is in another
    run. "unfinished": each once so far; it is the last epoch, or of an iterable, whose end is not known. "broken":
    samples were lost or repeated, or the ledgers contradict themselves.
    """

    stream: str
    epoch: int
    state: str
    num_samples: int  # that the epoch consists of: without what drop_last drops; 0: not known (an iterable)
    begins_at: int  # the positions before it were used by another run, from whose checkpoint this one went on
    num_used: int  # distinct positions
    first_step: int
    last_step: int
    num_missing: int
    num_repeated: int  # uses beyond the first
    missing: tuple[MissingRange, ...]  # the first ones
    repeated: tuple[RepeatedRange, ...]  # the first ones
    skipped_steps: tuple[int, ...]  # used their samples without changing the weights
    num_dropped: int  # came too late for their steps: handed out once, and without effect on the weights
    undone: tuple[UndoneRange, ...]
    is_permutation: bool | None  # None: not tried
    weights: str  # the name of an order that is no shuffle, such as "weights 1a2b"; "": each sample comes once
    says: tuple[str, ...]  # what is wrong, in words


def audit_epoch(
    name: str, epoch: int, columns: EpochColumns, rollbacks: list[Rollback], *, is_last: bool, tries_order: bool = True
) -> EpochAudit:
    """Return the verdict on an epoch of the stream `name`; its last epoch need not be finished. `tries_order`: whether
    the order of its samples is a permutation is tried."""
    stream = columns.streams[-1]
    cover = _cover(columns)
    samples, is_endless = stream.samples or 0, stream.samples is None
    total, is_finished = _end_of_epoch(columns, cover.end)
    missing, repeated = list(_gaps(cover, columns.begins_at)), list(cover.overlaps())
    is_short = not is_finished and not is_last and not is_endless
    if is_short:
        missing.append((cover.end, total, cover.last_holder, None))
    num_missing = sum(stop - start for start, stop, _, _ in missing)
    says = [*_contradictions(columns, cover.end, total), *_beyond_rollback(name, epoch, cover, rollbacks)]
    if num_missing:
        says.append(f"{num_missing:,} samples were not used")
    if cover.num_repeated:
        says.append(f"{cover.num_repeated:,} uses too many")
    if is_short:
        says.append(f"it ends at position {cover.end:,} though a later epoch has begun")
    is_permutation = None
    if tries_order and is_finished and not says and samples <= MOST_PERMUTED and not stream.weights:
        is_permutation = _is_permutation(stream, epoch, samples)
        if not is_permutation:
            says.append("its order is not a permutation of the dataset")
    named = functools.partial(_first_indices, stream, epoch)
    return EpochAudit(
        stream=name,
        epoch=epoch,
        state="broken" if says else _state(is_finished, columns.begins_at),
        num_samples=0 if is_endless else total,
        begins_at=columns.begins_at,
        num_used=cover.num_used,
        first_step=columns.first_step or 0,
        last_step=columns.last_step,
        num_missing=num_missing,
        num_repeated=cover.num_repeated,
        missing=tuple(_missing(cover, gap, named(*gap[:2])) for gap in missing[:MOST_LISTED]),
        repeated=tuple(_repeated(cover, overlap, named(*overlap[:2])) for overlap in repeated[:MOST_LISTED]),
        skipped_steps=tuple(sorted(columns.skipped_steps)),
        num_dropped=columns.num_dropped,
        undone=tuple(_undone(cover, rollbacks, named)),
        is_permutation=is_permutation,
        weights=stream.weights,
        says=tuple(says),
    )


def _cover(columns: EpochColumns) -> Coverage:
    """The cover of an epoch; where something is wrong, the blocks around it are shown step by step."""
    cover = Coverage(columns)
    if not columns.blocks:
        return cover
    places = [(start, stop) for start, stop, *_ in (*cover.gaps(), *cover.overlaps())]
    places.append((cover.end, cover.end))
    return Coverage(columns.unfolded(places))


def _state(is_finished: bool, begins_at: int) -> str:
    if not is_finished:
        return "unfinished"
    return "continued" if begins_at else "exact"


def _gaps(cover: Coverage, begins_at: int) -> Iterator[tuple[int, int, int | None, int | None]]:
    """The cover's gaps, without what another run had used before."""
    for start, stop, after, before in cover.gaps():
        if stop > begins_at:
            yield max(start, begins_at), stop, after, before


def _missing(cover: Coverage, gap: tuple[int, int, int | None, int | None], samples: Samples) -> MissingRange:
    start, stop, *rows = gap
    after, before = (None if row is None else int(cover.steps[row]) for row in rows)  # no blocks: they are unfolded
    return MissingRange(start=start, stop=stop, after_step=after, before_step=before, samples=samples)


def _repeated(cover: Coverage, overlap: tuple[int, int, int, int], samples: Samples) -> RepeatedRange:
    start, stop, *rows = overlap
    one, other = sorted((int(cover.steps[row]), int(cover.workers[row])) for row in rows)
    return RepeatedRange(start=start, stop=stop, steps=(one[0], other[0]), workers=(one[1], other[1]), samples=samples)


def _undone(cover: Coverage, rollbacks: list[Rollback], named: Callable[[int, int], Samples]) -> Iterator[UndoneRange]:
    """What each rollback has undone of an epoch; a later one that went back as far has undone that, too."""
    for number, rollback in enumerate(rollbacks):
        if any(later.to_step <= rollback.to_step for later in rollbacks[number + 1 :]):
            continue
        span = cover.span(after_step=rollback.to_step, until_step=rollback.from_step)
        if span is not None:
            start, stop, first_step, last_step = span
            yield UndoneRange(
                start=start,
                stop=stop,
                first_step=first_step,
                last_step=last_step,
                to_step=rollback.to_step,
                samples=named(start, stop),
            )


def _beyond_rollback(name: str, epoch: int, cover: Coverage, rollbacks: list[Rollback]) -> Iterator[str]:
    """Say where a rollback undid other samples than its own line in the ledger says."""
    for rollback in rollbacks:
        span = cover.span(after_step=rollback.to_step, until_step=rollback.from_step)
        told = [(begin, end) for stream, begin, end in rollback.skips if stream == name]
        if span is not None and not any(begin <= (epoch, span[0]) and (epoch, span[1]) <= end for begin, end in told):
            yield (
                f"the rollback from step {rollback.from_step} to step {rollback.to_step} does not say that positions "
                f"{span[0]:,}-{span[1] - 1:,} are passed over"
            )


def _end_of_epoch(columns: EpochColumns, reached: int) -> tuple[int, bool]:
    """Return how many positions the epoch has, and whether its steps reached the last."""
    stream, samples = columns.streams[-1], columns.streams[-1].samples
    if samples is None:
        return reached, False
    if not stream.drop_last:
        return samples, reached >= samples
    if len({each.batch for each in columns.streams}) == 1 and columns.begins_at % stream.batch == 0:
        total = samples // stream.batch * stream.batch
        return total, reached >= total
    if samples - reached < stream.batch:  # the batch was changed between attempts: no other full one fits
        return min(reached, samples), True
    return reached + (samples - reached) // stream.batch * stream.batch, False


def _contradictions(columns: EpochColumns, reached: int, total: int) -> Iterator[str]:
    orders = {(stream.samples, stream.seed, stream.shuffle, stream.weights) for stream in columns.streams}
    if len(orders) > 1:
        told = ", ".join(
            f"{samples} samples, seed {seed}, shuffle {shuffle}" + (f", in the order of {weights}" if weights else "")
            for samples, seed, shuffle, weights in sorted(orders, key=str)
        )
        yield f"its steps do not share one order of samples ({told}): dataset or seed were changed between attempts"
    if reached > total:
        yield f"positions up to {reached:,} were used, beyond the end"
    first = min(columns.starts, default=columns.begins_at)
    if first < columns.begins_at:
        yield (
            f"positions from {first:,} on were used, but the checkpoint of another run that it went on from stands at "
            f"{columns.begins_at:,}: those before were used there"
        )


def _is_permutation(stream: StreamHeader, epoch: int, samples: int) -> bool:
    seen = np.zeros(samples, dtype=np.bool_)
    for start in range(0, samples, CHUNK):
        indices = _indices(stream, epoch, np.arange(start, min(start + CHUNK, samples)))
        if indices.min() < 0 or indices.max() >= samples:
            return False
        seen[indices] = True
    return bool(seen.all())


def _indices(stream: StreamHeader, epoch: int, positions: NDArray[Any]) -> NDArray[np.int64]:
    from paceline.schedule import sample_order

    return sample_order.sample_indices(
        seed=stream.seed, epoch=epoch, num_samples=stream.samples or 0, positions=positions, shuffle=stream.shuffle
    )


def _first_indices(stream: StreamHeader, epoch: int, start: int, stop: int) -> Samples:
    if stream.weights:
        return ()  # the ledger has only a checksum of the order
    end = min(stop, start + MOST_INDICES, stream.samples or 0)
    return tuple(_indices(stream, epoch, np.arange(start, end)).tolist()) if end > start else ()


class Coverage:
    """The ranges of an epoch in the order of their positions, with the furthest position reached before each."""

    def __init__(self, columns: EpochColumns) -> None:
        starts, stops, steps = as_array(columns.starts), as_array(columns.stops), as_array(columns.steps)
        last_steps = steps.copy()
        for row, block in columns.blocks.items():
            last_steps[row] = block.last_step
        chosen = np.lexsort((steps, starts))
        chosen = chosen[stops[chosen] > starts[chosen]]
        self._starts, self._stops = starts[chosen], stops[chosen]
        self.steps, self.workers = steps[chosen], as_array(columns.workers)[chosen]
        self._last_steps = last_steps[chosen]
        reached = np.maximum.accumulate(self._stops)
        # Reached before range i.
        self._before = np.concatenate([np.zeros(min(1, len(reached)), np.int64), reached[:-1]])
        rows = np.arange(len(reached))
        self._holder = np.maximum.accumulate(np.where(self._stops >= reached, rows, 0))  # which range reached it
        self.end = int(reached[-1]) if len(reached) else 0
        num_missing = int(np.maximum(self._starts - self._before, 0).sum())
        self.num_used = self.end - num_missing
        self.num_repeated = int((self._stops - self._starts).sum()) - self.num_used

    @property
    def last_holder(self) -> int | None:
        return int(self._holder[-1]) if len(self._holder) else None

    def span(self, *, after_step: int, until_step: int) -> tuple[int, int, int, int] | None:
        """Return where the ranges of steps (after_step, until_step] begin and end, and the first and last of these
        steps; None where there is none."""
        rows = (self.steps > after_step) & (self.steps <= until_step)  # no block reaches over either
        if not rows.any():
            return None
        first, last = int(self.steps[rows].min()), int(self._last_steps[rows].max())
        return int(self._starts[rows].min()), int(self._stops[rows].max()), first, last

    def gaps(self) -> Iterator[tuple[int, int, int | None, int | None]]:
        """Yield (start, stop, row before, row after) of what no range covers, before the end."""
        for row in np.flatnonzero(self._starts > self._before).tolist():
            yield int(self._before[row]), int(self._starts[row]), int(self._holder[row - 1]) if row else None, row

    def overlaps(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (start, stop, earlier row, later row) of what two ranges cover."""
        for row in np.flatnonzero(self._starts < self._before).tolist():
            stop = min(int(self._stops[row]), int(self._before[row]))
            yield int(self._starts[row]), stop, int(self._holder[row - 1]), row


def as_array(values: array[int]) -> NDArray[np.int64]:
    """View a column of 64-bit integers as an array."""
    return np.frombuffer(values, dtype=np.int64) if len(values) else np.zeros(0, np.int64)
