"""Old rows of `metrics.jsonl`, thinned: a hundred rows are the last of them, with what the others add up to.

    {"step": 300, ..., "loss": 0.52, "merged": {"steps": [[201, 300]], "num": 100, "loss": {"mean": 0.55, ...}, ...}}

So every program that reads the file still finds rows of single steps, only fewer, and no spike of the loss disappears:
`merged` has the least and the greatest.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.plain_data import LATEST, fitted, read_object, whole

__all__ = ["NUM_ROWS", "StepRanges", "cut_rows", "merge_rows", "merged_row", "read_row", "steps_of_row"]

Row = dict[str, Any]
NUM_ROWS = 100  # that become one
NEWEST = 10_000  # rows that stay as they are


class StepRanges:
    """A set of steps that are mostly consecutive: a million take no more room than one."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """`ranges` have first and last steps, in any order."""
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in sorted(ranges):
            if self._lasts and first <= self._lasts[-1] + 1:
                self._lasts[-1] = max(self._lasts[-1], last)
            else:
                self._firsts.append(first)
                self._lasts.append(last)

    def __contains__(self, step: int) -> bool:
        place = bisect.bisect_right(self._firsts, step) - 1
        return place >= 0 and step <= self._lasts[place]

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepRanges) and self.ranges() == other.ranges()

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # it may be compared, and is no key

    def ranges(self) -> list[tuple[int, int]]:
        """First and last steps of each range."""
        return list(zip(self._firsts, self._lasts, strict=True))

    def whole_until(self, after: int) -> int:
        """The last step up to which all steps beyond `after` are there."""
        place = bisect.bisect_right(self._firsts, after + 1) - 1
        return max(after, self._lasts[place]) if place >= 0 else after


def cut_rows(lines: Sequence[str]) -> int:
    """Return how many of the oldest rows are to be thinned."""
    return max(0, len(lines) - NEWEST)


def merge_rows(lines: Sequence[str]) -> list[str]:
    """Thin rows; those that are thinned already stay as they are, and so do the last few that are no full hundred."""
    merged: list[str] = []
    waiting: list[tuple[str, Row]] = []
    for line in lines:
        row = read_row(line)
        if waiting and (row is None or "merged" in row or row.get("attempt") != waiting[0][1].get("attempt")):
            merged.append(_merged_text(waiting))
            waiting = []
        if row is None or "merged" in row:
            merged.append(line)
            continue
        waiting.append((line, row))
        if len(waiting) == NUM_ROWS:
            merged.append(_merged_text(waiting))
            waiting = []
    return [*merged, *(line for line, _ in waiting)]


def steps_of_row(row: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The steps that a row stands for, as first and last ones; raises KeyError, TypeError or ValueError."""
    if "merged" in row:
        return [(whole(first), whole(last)) for first, last in row["merged"]["steps"]]
    return [(whole(row["step"]), whole(row["step"]))]


def merged_row(rows: Sequence[Row]) -> Row:
    """The last of some rows, with what all of them add up to."""
    last = rows[-1]
    losses = [row["loss"] for row in rows if _is_number(row.get("loss"))]
    speeds = [row for row in rows if row.get("samples_per_s")]
    took = [row["num_samples"] / row["samples_per_s"] for row in speeds]
    names = dict.fromkeys(itertools.chain.from_iterable(row.get("seconds", {}) for row in rows))
    return {
        **last,
        "merged": {
            "steps": StepRanges((row["step"], row["step"]) for row in rows).ranges(),
            "num": len(rows),
            "num_skipped": sum(bool(row.get("skipped")) for row in rows),
            "num_samples": sum(row["num_samples"] for row in rows),
            "loss": _spread(losses),
            "num_broken": sum("loss" in row and not row.get("skipped") and not _is_number(row["loss"]) for row in rows),
            "samples_per_s": _spread([row["samples_per_s"] for row in speeds]),
            "timed_samples": sum(row["num_samples"] for row in speeds),
            "took_s": round(sum(took), 6),
            "since": round(speeds[0]["time"] - took[0], 6) if speeds else rows[0]["time"],
            "seconds": {name: round(sum(row.get("seconds", {}).get(name, 0.0) for row in rows), 6) for name in names},
        },
    }


def _merged_text(waiting: Sequence[tuple[str, Row]]) -> str:
    if len(waiting) == 1:
        return waiting[0][0]
    return json.dumps(merged_row([row for _, row in waiting]), allow_nan=False)


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """None where there is no value."""
    if not values:
        return None
    mean = sum(values) / len(values)
    return {
        "mean": mean,
        "least": min(values),
        "most": max(values),
        "first": values[0],
        "last": values[-1],
        "num": len(values),
    }


def read_row(line: str) -> Row | None:
    """None where the line is damaged, or is no row."""
    try:
        row = read_object(line)
        known = {name: row[name] for name in COLUMNS & row.keys()}
        checked = fitted(_Columns, known)
        if not 0 <= checked.time <= LATEST or checked.step < 0 or checked.num_samples < 0:
            return None
        if checked.merged is not None:
            for first, last in checked.merged.steps:
                whole(first, most=whole(last))
        return {"num_samples": 0, **row}
    except (ValueError, TypeError):
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Spread:
    """What `_spread` returns."""

    mean: float
    least: float
    most: float
    num: int
    first: float | None = None
    last: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Merged:
    """What a row that stands for many says of them."""

    steps: Sequence[Sequence[int]]
    num: int
    num_skipped: int
    num_samples: int
    loss: _Spread | None
    num_broken: int
    samples_per_s: _Spread | None
    timed_samples: int
    took_s: float
    since: float
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """The columns of a row that readers count on; a user's own metrics stand beside them."""

    step: int
    time: float
    num_samples: int = 0
    attempt: int | None = None
    epoch: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    skipped: bool = False
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    merged: _Merged | None = None


COLUMNS = frozenset(field.name for field in dataclasses.fields(_Columns))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
