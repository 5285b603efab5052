"""Old events of a worker or supervisor, summed up: a thousand steps are one `StepsMerged`, and events of a frequent
kind one `EventsMerged`.

Steps that a report has to see by themselves stay as they are: the first one of a process, those that were skipped, came
too late or took part in a recovery, and those that took far longer than usual. So do the workers that came, left and
were lost, whose events a report counts one by one; the sealed file is compressed. Where they are more than a few of a
hundred, the rest of them is summed up, too: a log may not grow without limit because something happens at every step.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline import clock
from paceline.plain_data import finite, read_object, text_of

__all__ = ["MOST_KEPT", "NUM_MERGED", "cut_events", "merge_events"]

Fields = dict[str, Any]
NUM_MERGED = 1000  # steps of one summary
MOST_KEPT = 32  # events of a kind, of those that are sealed together: the first and the last of them
ONE_IN = 50  # steps that may stay as they are
LONG = 4.0  # times the median: what took longer is kept
KEEP_S = 20.0  # readers that are no later than this see each line as it was written
KEEP_BYTES, MOST_BYTES = 1 << 18, 2 << 20  # of the newest lines: at least; and at most, however young they are
STEP = '{"event": "StepDone"'  # how the line of a step begins
COUNTS = ("num_dropped", "num_bytes_sent", "num_wire_bytes", "num_raw_bytes")
OF_MEMBERS = (
    "WorkerStarted",
    "WorkerFinished",
    "WorkerFailed",
    "WorkerLost",
    "WorkerLeft",
    "WorkerJoined",
    "Regrouped",
)
OF_RUN = ("RunStarted", "Restarted", "RunFinished")
NEVER = (*OF_MEMBERS, *OF_RUN, "StepsMerged", "EventsMerged")  # summed up: a report needs each of them


def cut_events(lines: Sequence[str]) -> int:
    """Return how many of the oldest lines are to be sealed."""
    kept, now = 0, clock.now()
    for place in range(len(lines) - 1, -1, -1):
        kept += len(lines[place]) + 1
        if kept > MOST_BYTES or (kept > KEEP_BYTES and _time(lines[place]) < now - KEEP_S):
            return place + 1
    return 0


def _time(line: str) -> float:
    try:
        return finite(read_object(line)["time"])
    except (ValueError, KeyError):  # damaged
        return 0.0


def merge_events(lines: Sequence[str]) -> list[str]:
    """Return what is kept of the events of a worker, or of the supervisor; a line that cannot be read is kept."""
    read = [(line, _fields(line)) for line in lines]
    steps = [fields for _, fields in read if fields is not None and fields["event"] == "StepDone"]
    alone = _standing_alone(steps, [fields for _, fields in read if fields is not None])
    frequent = _frequent(read)
    merged: list[str] = []
    block: _StepSums | None = None
    for place, (line, fields) in enumerate(read):
        if fields is not None and fields["event"] == "StepDone" and id(fields) not in alone:
            if block is not None and not block.takes(fields):
                merged.append(block.text())
                block = None
            block = block or _StepSums(fields)
            block.add(fields)
            continue
        if block is not None and (fields is None or fields["event"] in ("StepDone", "WorkerStarted")):
            merged.append(block.text())
            block = None
        summary = frequent.get(place)
        if summary is None:
            merged.append(line)
        elif summary:
            merged.append(summary)
    return merged + ([block.text()] if block is not None else [])


def _fields(line: str) -> Fields | None:
    try:
        fields = read_object(line)
        text_of(fields["event"])
        if fields["event"] == "StepDone":
            _StepSums(fields).add(fields)  # it has all that a summary needs
        return fields if finite(fields["time"]) >= 0 else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _standing_alone(steps: Sequence[Fields], events: Sequence[Fields]) -> set[int]:
    """The steps that stay as they are, by the identity of their fields."""
    found: set[int] = set()
    is_first = False
    for fields in events:
        if fields["event"] == "StepDone":
            if is_first:
                found.add(id(fields))
            is_first = False
        elif fields["event"] == "WorkerStarted":
            is_first = True
    most = 16 + len(steps) // ONE_IN
    eventful = [one for one in steps if one.get("skipped") or one.get("late") or "recovery" in one["seconds"]]
    found.update(id(one) for one in eventful[:most])
    totals = {id(one): _number(one["seconds"].get("total")) or 0.0 for one in steps}
    limit = LONG * statistics.median(totals.values()) if totals else 0.0
    long = sorted((one for one in steps if totals[id(one)] > limit), key=lambda one: -totals[id(one)])
    found.update(id(one) for one in long[: most // 2])
    return found


class _StepSums:
    """Adds up steps that follow each other."""

    def __init__(self, first: Fields) -> None:
        self._since = first["time"] - (_number(first["seconds"].get("total")) or 0.0)
        self._first = self._last = first
        self._num = self._num_skipped = self._num_broken = self._num_losses = 0
        self._skipped_s = self._loss = 0.0
        self._losses: list[float] = []  # least, most, first, last
        self._sums: dict[str, int] = dict.fromkeys(("num_samples", *COUNTS), 0)
        self._seconds: dict[str, float] = {}
        self._metrics: dict[str, list[float]] = {}  # sum, number
        self._optimizer: dict[str, list[float]] = {}
        self._longest_s = 0.0

    def takes(self, fields: Fields) -> bool:
        """Whether a step belongs to the same summary; after a rollback steps are counted from further back."""
        follows = fields["step"] > self._last["step"] and fields["worker"] == self._first["worker"]
        return follows and self._num < NUM_MERGED and bool(fields.get("alone")) == bool(self._first.get("alone"))

    def add(self, fields: Fields) -> None:
        self._last = fields
        self._num += 1
        seconds: Mapping[str, Any] = fields["seconds"]
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + (_number(value) or 0.0)
        total = _number(seconds.get("total")) or 0.0
        self._longest_s = max(self._longest_s, total)
        if fields.get("skipped"):
            self._num_skipped += 1
            self._skipped_s += total
        for name in self._sums:
            self._sums[name] += int(fields.get(name) or 0)
        loss = _number(fields["loss"])
        if loss is not None:
            self._num_losses += 1
            self._loss += loss
            least, most, first, _ = self._losses or (loss, loss, loss, loss)
            self._losses = [min(least, loss), max(most, loss), first, loss]
        elif fields["loss"] is not None and not fields.get("skipped"):
            self._num_broken += 1
        for sums, values in ((self._metrics, fields["metrics"]), (self._optimizer, fields.get("optimizer") or {})):
            for name, value in values.items():
                number = _number(value)
                if number is not None:
                    one = sums.setdefault(name, [0.0, 0])
                    one[0], one[1] = one[0] + number, one[1] + 1

    def text(self) -> str:
        last = self._last
        losses = {}
        if self._losses:
            least, most, first, newest = self._losses
            losses = {"mean": self._loss / self._num_losses, "least": least, "most": most, "first": first}
            losses["last"] = newest
        fields: Fields = {"event": "StepsMerged", "time": last["time"], "worker": last["worker"]}
        fields |= {"first_step": self._first["step"], "last_step": last["step"], "num_steps": self._num}
        fields |= {"since": round(self._since, 6), "epoch": last["epoch"], **self._sums, "loss": losses}
        fields |= {"num_broken": self._num_broken, "num_skipped": self._num_skipped}
        fields |= {"skipped_s": round(self._skipped_s, 6), "longest_s": round(self._longest_s, 6)}
        fields["metrics"] = {name: total / number for name, (total, number) in self._metrics.items()}
        if self._optimizer:
            fields["optimizer"] = {name: total / number for name, (total, number) in self._optimizer.items()}
        fields["seconds"] = {name: round(value, 6) for name, value in self._seconds.items()}
        if last.get("alone"):
            fields["alone"] = True
        return json.dumps(fields)


def _frequent(read: Sequence[tuple[str, Fields | None]]) -> dict[int, str]:
    """By place: "" for an event that is left out, and at the last one of them the summary of all."""
    places: dict[str, list[int]] = {}
    for place, (_, fields) in enumerate(read):
        kind = "a damaged line" if fields is None else str(fields["event"])
        if kind != "StepDone" and kind not in NEVER:
            places.setdefault(kind, []).append(place)
    found: dict[int, str] = {}
    for kind, of_kind in places.items():
        left_out = of_kind[MOST_KEPT // 2 : -(MOST_KEPT // 2)]
        if len(of_kind) > MOST_KEPT:
            found.update(dict.fromkeys(left_out, ""))
            found[left_out[-1]] = json.dumps(_events_merged(kind, [read[place][1] for place in left_out]))
    return found


def _events_merged(kind: str, events: Sequence[Fields | None]) -> Fields:
    known = [one for one in events if one is not None]
    sums: dict[str, float] = {}
    for one in known:
        for name, value in _numbers(one):
            sums[name] = sums.get(name, 0.0) + value
    steps = [int(one["step"]) for one in known if isinstance(one.get("step"), int)]
    last = known[-1] if known else {"time": 0.0, "worker": None}
    return {
        "event": "EventsMerged",
        "time": last["time"],
        "worker": last["worker"],
        "kind": kind,
        "num": len(events),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "sums": sums,
    }


def _numbers(fields: Fields) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            for inner, item in value.items():
                number = _number(item)
                if number is not None:
                    yield f"{name}.{inner}", number
        elif name not in ("time", "worker", "step") and not isinstance(value, bool):
            number = _number(value)
            if number is not None:
                yield name, number


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
