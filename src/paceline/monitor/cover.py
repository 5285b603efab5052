"""Which positions of an epoch its ranges cover: the gaps between them and the overlaps, found by sorting."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from paceline.monitor.ledgers import EpochColumns

__all__ = ["Cover", "column"]


class Cover:
    """The ranges of an epoch in the order of their positions, with the furthest position reached before each."""

    def __init__(self, columns: EpochColumns) -> None:
        starts, stops, steps = column(columns.starts), column(columns.stops), column(columns.steps)
        chosen = np.lexsort((steps, starts))
        chosen = chosen[stops[chosen] > starts[chosen]]
        self._starts, self._stops = starts[chosen], stops[chosen]
        self.steps, self.workers = steps[chosen], column(columns.workers)[chosen]
        reached = np.maximum.accumulate(self._stops)
        self._before = np.concatenate(
            [np.zeros(min(1, len(reached)), np.int64), reached[:-1]]
        )  # reached before range i
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
        rows = (self.steps > after_step) & (self.steps <= until_step)
        if not rows.any():
            return None
        steps = self.steps[rows]
        return int(self._starts[rows].min()), int(self._stops[rows].max()), int(steps.min()), int(steps.max())

    def gaps(self) -> Iterator[tuple[int, int, int | None, int | None]]:
        """Yield (start, stop, row before, row after) of what no range covers, before the end."""
        for row in np.flatnonzero(self._starts > self._before).tolist():
            yield int(self._before[row]), int(self._starts[row]), int(self._holder[row - 1]) if row else None, row

    def overlaps(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (start, stop, earlier row, later row) of what two ranges cover."""
        for row in np.flatnonzero(self._starts < self._before).tolist():
            stop = min(int(self._stops[row]), int(self._before[row]))
            yield int(self._starts[row]), stop, int(self._holder[row - 1]), row


def column(values: array[int]) -> NDArray[np.int64]:
    """View a column of 64-bit integers as an array."""
    return np.frombuffer(values, dtype=np.int64) if len(values) else np.zeros(0, np.int64)
