"""The curves of a run, from its `metrics.jsonl` while it is written: read once, in slices, never again from its start.

A first look takes some hundred rows from all over the file, in milliseconds, however many steps the run has. The whole
file is then read in slices, and takes the place of the first look. From then on only new rows are read. Where old rows
were thinned, the file is another one with the same last rows: reading goes on behind them. Where a resumed attempt has
dropped rows, the file is read anew, and the old curves are shown until that is done.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from paceline.monitor.records.steps import parts_of
from paceline.regular_files import open_regular
from paceline.ui.metrics_rows import (
    METRIC,
    SPEED_ROWS,
    last_rows,
    number,
    read_metrics_row,
    reported_metrics,
    row_after,
    sampled_rows,
)
from paceline.ui.thinned_series import ThinnedSeries

__all__ = ["FollowedMetrics", "MetricsIndex"]

FIRST_LOOK = 600  # rows
CHUNK_BYTES = 1 << 18
LONGEST_ROW = 8 << 20  # bytes: no row that Paceline writes is longer
MOST_METRICS = 200  # reported names that have a curve


class MetricsIndex:
    """Curves by name, and what the last row says. Names: `loss`, `samples_per_s`, `noise_scale`, `wire_ratio`, `time`,
    `seconds/<phase>` and `metric/<reported name>`."""

    def __init__(self) -> None:
        self.series: dict[str, ThinnedSeries] = {}
        self.newest = collections.deque[Mapping[str, Any]](maxlen=SPEED_ROWS)
        self.first_loss: float | None = None
        self.num_rows = self.num_broken = self.num_skipped = self.num_metrics_left_out = 0
        self.num_damaged = 0
        self._place: tuple[int, int] | None = None  # inode, and the byte up to which it was read

    def add_line(self, line: bytes, revision: int) -> None:
        row = read_metrics_row(line)
        if row is None:
            self.num_damaged += 1
        else:
            self.add(row, revision)

    def add(self, row: Mapping[str, Any], revision: int) -> None:
        """Take a row, which may stand for many steps (`merged`)."""
        merged = row.get("merged")
        merged = merged if isinstance(merged, dict) else {}
        step, weight = row["step"], max(1.0, number(merged.get("num")) or 1.0)
        self.num_rows += 1
        self.num_skipped += int(number(merged.get("num_skipped")) or 0) if merged else bool(row.get("skipped"))
        for name, value, least, most in _values(row, merged):
            series = self.series.get(name) or self._begin(name)
            if series is not None:
                series.add(step, value, least, most, weight, revision)
        loss = number(row.get("loss"))
        if "loss" in row and loss is None and not row.get("skipped"):  # a row without one has said nothing of it
            self.num_broken += 1
        if self.first_loss is None:
            self.first_loss = number((merged.get("loss") or {}).get("first")) if merged else loss
        self.newest.append(row)

    def read_on(self, path: Path, revision: int, deadline: float) -> bool:
        """Read what has come since the last call, until `deadline` (of time.perf_counter) at the latest; return whether
        the end of the file was reached. Raises _FileReplaced where another file is in its place."""
        try:
            found = os.stat(path)
        except OSError:  # there is none yet, or it is out of reach
            return True
        if self._place is None:
            self._place = (found.st_ino, 0)
        inode, begin = self._place
        if found.st_ino != inode or found.st_size < begin:
            raise _FileReplaced
        if found.st_size == begin:
            return True
        try:
            with open_regular(path, buffering=0) as file:
                if os.fstat(file.fileno()).st_ino != inode:
                    raise _FileReplaced
                return self._read(file, begin, revision, deadline)
        except FileNotFoundError:
            return True

    def go_on_in(self, path: Path) -> bool:
        """Go on behind the last row in a file that has replaced the one that was read; returns whether that row is
        there. It is looked for by bisection, since rows are in the order of their steps."""
        if not self.newest:
            return False
        last = self.newest[-1]
        try:
            with open_regular(path, buffering=0) as file:
                found = os.fstat(file.fileno())
                end = _end_of_row(file, found.st_size, last)
        except OSError:
            return False
        if end is not None:
            self._place = (found.st_ino, end)
        return end is not None

    def _read(self, file: BinaryIO, begin: int, revision: int, deadline: float) -> bool:
        inode, _ = self._place or (0, 0)
        while True:
            data = os.pread(file.fileno(), CHUNK_BYTES, begin)
            end = data.rfind(b"\n") + 1
            if end == 0 and len(data) == CHUNK_BYTES:  # a row that is longer than a chunk
                data = os.pread(file.fileno(), LONGEST_ROW, begin)
                end = data.rfind(b"\n") + 1 or (len(data) if len(data) == LONGEST_ROW else 0)
            for line in data[:end].split(b"\n")[:-1]:
                self.add_line(line, revision)
            begin += end
            self._place = (inode, begin)
            if end == 0 or len(data) < CHUNK_BYTES:
                return True
            if time.perf_counter() > deadline:
                return False

    def _begin(self, name: str) -> ThinnedSeries | None:
        """A new curve; None where there are too many."""
        if name.startswith(METRIC) and sum(one.startswith(METRIC) for one in self.series) >= MOST_METRICS:
            self.num_metrics_left_out += 1
            return None
        series = self.series[name] = ThinnedSeries()
        return series


class FollowedMetrics:
    """The curves that a page shows of one run. `poll` in one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.revision = 1
        self.index = MetricsIndex()  # that is shown
        self.is_whole = False  # it has all rows that were there at the last poll
        self._born = 0  # the revision in which another index took the place of the one before
        self._next: MetricsIndex | None = None  # that is being read, beside the one that is shown
        self._has_looked = False

    def poll(self, budget_s: float) -> None:
        """Read what is new, for about `budget_s`."""
        deadline = time.perf_counter() + budget_s
        was_whole = self.is_whole
        if not self._has_looked:
            self._look()
        if self._next is None:
            self._read_on(deadline)
        if self._next is not None:
            self._read_next(deadline)
        self.revision += self.is_whole and not was_whole

    def changes(self, since: int) -> dict[str, Any]:
        """Return the curves as far as a page that has seen revision `since` lacks them, by name."""
        whole = since < self._born
        found = {name: one.changes(0 if whole else since) for name, one in self.index.series.items()}
        return {name: one for name, one in found.items() if one is not None}

    def is_replaced_since(self, since: int) -> bool:
        """Whether curves that a page has seen do not count any more."""
        return since < self._born

    def _look(self) -> None:
        """Show some rows at once, where reading all of them takes longer."""
        self._has_looked = True
        rows = sampled_rows(self._path, FIRST_LOOK)
        if len(rows) < FIRST_LOOK * 3 // 4:  # a short file, which is read at once
            return
        self.revision += 1
        for row in [*rows, *last_rows(self._path, 1)]:
            self.index.add(row, self.revision)
        self._next = MetricsIndex()

    def _read_on(self, deadline: float) -> None:
        before = self.index.num_rows
        try:
            self.is_whole = self.index.read_on(self._path, self.revision + 1, deadline)
        except _FileReplaced:
            if not self.index.go_on_in(self._path):
                self._next = MetricsIndex()
            return
        if self.index.num_rows != before:
            self.revision += 1

    def _read_next(self, deadline: float) -> None:
        following = self._next or MetricsIndex()
        try:
            if not following.read_on(self._path, self.revision + 1, deadline):
                return
        except _FileReplaced:
            self._next = MetricsIndex()
            return
        self.revision += 1
        self.index, self._next, self._born, self.is_whole = following, None, self.revision, True


class _FileReplaced(Exception):
    """Another file is where the one was that has been read."""


def _values(
    row: Mapping[str, Any], merged: Mapping[str, Any]
) -> Iterator[tuple[str, float, float | None, float | None]]:
    """Yield name, value, least and most of all curves that a row adds to."""
    yield "time", float(row["time"]), None, None
    for name in ("loss", "samples_per_s"):
        spread = merged.get(name)
        if isinstance(spread, dict):
            mean, least, most = (number(spread.get(part)) for part in ("mean", "least", "most"))
            if mean is not None:
                yield name, mean, least, most
        elif (value := number(row.get(name))) is not None:
            yield name, value, None, None
    for name in ("noise_scale", "wire_ratio"):
        if (value := number(row.get(name))) is not None:
            yield name, value, None, None
    seconds = row.get("seconds")
    if isinstance(seconds, dict):
        known = {name: value for name, one in seconds.items() if (value := number(one)) is not None}
        for name, value in parts_of(known).items():
            yield f"seconds/{name}", value, None, None
    for name, value in reported_metrics(row):
        yield name, value, None, None


def _end_of_row(file: BinaryIO, size: int, wanted: Mapping[str, Any]) -> int | None:
    """The byte behind a row that is in a file of rows by step; None where it is not there."""
    step = wanted["step"]
    low, high = 0, size  # the row begins in between
    while high - low > 1:
        middle = (low + high) // 2
        found = row_after(file, middle)
        if found is None or found[0]["step"] > step:
            high = middle
        elif found[0]["step"] < step:
            low = middle
        else:
            return found[1] if _is_same(found[0], wanted) else None
    found = row_after(file, low)
    return found[1] if found is not None and _is_same(found[0], wanted) else None


def _is_same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(row.get(name) == other.get(name) for name in ("step", "attempt", "time", "loss"))
