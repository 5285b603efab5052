"""Rows of `metrics.jsonl` as the page needs them, read from any place of the file without reading all of it."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from paceline.monitor.records.steps import OWN_NAMES
from paceline.plain_data import LATEST, MOST_WHOLE, read_object
from paceline.regular_files import open_regular
from paceline.units import name_text

__all__ = [
    "METRIC",
    "SPEED_ROWS",
    "last_rows",
    "number",
    "read_metrics_row",
    "reported_metrics",
    "row_after",
    "sampled_rows",
]

SMALL_BYTES = 1 << 16  # a file up to this size is read as a whole
ROW_BYTES = 1 << 13  # read at a sampled place; a longer row is passed over there
TAIL_BYTES = 1 << 15
SPEED_ROWS = 12  # newest ones, over which speeds are measured
METRIC = "metric/"  # before the name of a reported metric, which may be any
COLUMNS = OWN_NAMES | {"loss", "merged"}


def read_metrics_row(line: bytes) -> dict[str, Any] | None:
    """Return the row that a line holds, its step and time checked; None where it is damaged. Every other value is to be
    read through `number`."""
    try:
        row = read_object(line)
    except ValueError:
        return None
    step, when = row.get("step"), number(row.get("time"))
    return row if type(step) is int and 0 <= step <= MOST_WHOLE and when is not None and 0 <= when <= LATEST else None


def number(value: object) -> float | None:
    """Return a finite number; None for everything else."""
    if type(value) is float or type(value) is int:
        return value if -1e300 <= value <= 1e300 and not math.isnan(value) else None
    return None


def reported_metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and value of what `worker.report` was given."""
    for name, value in row.items():
        if name not in COLUMNS and (found := number(value)) is not None:
            yield _metric_name(name), found


@functools.lru_cache(maxsize=1024)
def _metric_name(name: str) -> str:
    return METRIC + name_text(name)


def sampled_rows(path: Path, most: int) -> list[dict[str, Any]]:
    """Return about `most` rows, evenly spread over the bytes of the file, in its order; empty where there is none.

    Costs O(most), however long the file is.
    """
    try:
        with open_regular(path, buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= SMALL_BYTES:
                lines = file.read(SMALL_BYTES).split(b"\n")[:-1]
                stride = max(1, math.ceil(len(lines) / most))
                rows = [read_metrics_row(line) for line in [*lines[::-1][::stride]][::-1]]
                return [row for row in rows if row is not None]
            found = (row_after(file, place * size // most) for place in range(most))
            rows = [row for row, _ in filter(None, found)]
    except OSError:  # there is none yet, or it is out of reach
        return []
    return [row for place, row in enumerate(rows) if place == 0 or row["step"] != rows[place - 1]["step"]]


def row_after(file: BinaryIO, place: int) -> tuple[dict[str, Any], int] | None:
    """Return the first whole row that begins at byte `place` or later, and the byte behind it; None where none ends
    within `ROW_BYTES`."""
    data = os.pread(file.fileno(), ROW_BYTES, max(0, place - 1))
    begin = 0 if place == 0 else data.find(b"\n") + 1
    end = data.find(b"\n", begin)
    if end < 0 or (place > 0 and begin == 0):
        return None
    row = read_metrics_row(data[begin:end])
    return None if row is None else (row, max(0, place - 1) + end + 1)


def last_rows(path: Path, most: int) -> list[dict[str, Any]]:
    """Return at most the last `most` rows within the last `TAIL_BYTES`, in the file's order."""
    try:
        with open_regular(path, buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - TAIL_BYTES)
            lines = os.pread(file.fileno(), TAIL_BYTES, begin).split(b"\n")[:-1]
    except OSError:  # there is none yet, or it is out of reach
        return []
    rows = [read_metrics_row(line) for line in lines[1 if begin else 0 :][-most:]]
    return [row for row in rows if row is not None]
