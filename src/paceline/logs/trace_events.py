"""Timelines in the trace event format of Chrome, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import writing

__all__ = ["TraceSlice", "write_trace"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceSlice:
    """What a worker does from `begin_s` on, in seconds since the trace's own zero. Without a duration it is a moment.

    `group` is a process of the picture, such as a host, `row` one of its threads. Slices of a row contain each other,
    or do not touch.
    """

    group: str
    row: str
    name: str
    begin_s: float
    duration_s: float | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def write_trace(path: Path, slices: Iterable[TraceSlice]) -> int:
    """Write the file, event by event, and return how many there are. Groups and rows keep the order of their first
    slices.
    """
    groups: dict[str, int] = {}
    rows: dict[tuple[str, str], int] = {}
    count = 0
    with writing(path), path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for one in slices:
            if one.group not in groups:
                groups[one.group] = len(groups) + 1
                file.write(_named("process_name", groups[one.group], 0, one.group))
            key = one.group, one.row
            if key not in rows:
                rows[key] = len(rows) + 1
                file.write(_named("thread_name", groups[one.group], rows[key], one.row))
            event: dict[str, Any] = {"name": one.name, "pid": groups[one.group], "tid": rows[key]}
            event |= {"ts": round(one.begin_s * 1e6, 3), "args": dict(one.details)}
            event |= (
                {"ph": "i", "s": "t"} if one.duration_s is None else {"ph": "X", "dur": round(one.duration_s * 1e6, 3)}
            )
            file.write(json.dumps(event) + ",\n")
            count += 1
        file.write('{"name": "paceline", "ph": "M", "pid": 0, "args": {}}\n]}\n')
    return count


def _named(kind: str, pid: int, tid: int, name: str) -> str:
    return json.dumps({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}) + ",\n"
