"""A curve over steps in at most `MOST_COLUMNS` columns, however many values it has: mean, least and most of each.

A column is a stretch of steps. When there are too many columns, their width doubles and neighbors are merged. So a
value costs O(1), memory is bounded, and no spike disappears. Every column knows in which revision it changed last, so
that a page gets only what is new.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

__all__ = ["MOST_COLUMNS", "ThinnedSeries"]

MOST_COLUMNS = 1024


class ThinnedSeries:
    """Values by step, in any order. `changes(since)` is what a page that has seen revision `since` lacks.
    Revisions never go back."""

    __slots__ = ("_columns", "_widened", "width")

    def __init__(self) -> None:
        self.width = 1  # steps of a column
        self._widened = 0  # the revision in which columns were merged last
        self._columns: dict[int, _Column] = {}  # in the order in which they changed last

    def __len__(self) -> int:
        return len(self._columns)

    def add(
        self, step: int, value: float, least: float | None, most: float | None, weight: float, revision: int
    ) -> None:
        """Take a finite value, or the mean of `weight` values from `least` to `most` (None: it is one value)."""
        low, high = value if least is None else least, value if most is None else most
        index = step // self.width
        column = self._columns.get(index)
        if column is None:
            self._columns[index] = _Column(step, value, low, high, weight, revision)
            if len(self._columns) > MOST_COLUMNS:
                self._widen(revision)
            return
        if next(reversed(self._columns)) != index:
            self._columns[index] = self._columns.pop(index)
        column.steps += step * weight
        column.total += value * weight
        column.weight += weight
        if low < column.least:
            column.least = low
        if high > column.most:
            column.most = high
        column.revision = revision

    def changes(self, since: int) -> dict[str, Any] | None:
        """Return `width`, whether the points are `whole` (all there are), and points [column, step, mean, least, most]
        by step, or [column, step, value] of columns of one value; None where nothing is new."""
        whole = since < self._widened or since <= 0
        changed = reversed(self._columns.items())  # what is new is at the end, so the rest is not looked at
        new = changed if whole else itertools.takewhile(lambda one: one[1].revision > since, changed)
        points = [[index, *column.numbers()] for index, column in sorted(new, key=operator.itemgetter(0))]
        return {"width": self.width, "whole": whole, "points": points} if points else None

    def means(self) -> Iterator[tuple[float, float]]:
        """Yield step and mean of each column, by step."""
        for _, column in sorted(self._columns.items()):
            step, mean, *_ = column.numbers()
            yield step, mean

    def _widen(self, revision: int) -> None:
        while len(self._columns) > MOST_COLUMNS:
            self.width *= 2
            merged: dict[int, _Column] = {}
            for index, column in self._columns.items():
                into = merged.setdefault(index // 2, column)
                if into is not column:
                    into.take(column)
            self._columns = dict(sorted(merged.items(), key=lambda one: one[1].revision))
        self._widened = revision


class _Column:
    """What fell into one stretch of steps."""

    __slots__ = ("least", "most", "revision", "steps", "total", "weight")

    def __init__(self, step: int, value: float, least: float, most: float, weight: float, revision: int) -> None:
        self.steps, self.total, self.weight = step * weight, value * weight, weight
        self.least, self.most, self.revision = least, most, revision

    def take(self, other: _Column) -> None:
        self.steps += other.steps
        self.total += other.total
        self.weight += other.weight
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.revision = max(self.revision, other.revision)

    def numbers(self) -> tuple[float, ...]:
        """Step, mean, least and most, or step and value."""
        if self.weight == 1.0 and self.least == self.most:
            return self.steps, _brief(self.total)
        step, mean = round(self.steps / self.weight, 1), _brief(self.total / self.weight)
        return step, mean, _brief(self.least), _brief(self.most)


def _brief(value: float) -> float:
    """Seven digits, which are more than a screen shows; of large numbers, times among them, thousandths."""
    return float(f"{value:.7g}") if abs(value) < 1e6 else round(value, 3)
