"""Reads a trial's objective from its run's own files while it trains: each step once, however often the run goes back.

A run that goes on from a checkpoint takes some steps again, and reports them again. What counts is the first report of
a step; the values are the same. Evaluations come from the events of the run's attempts, metrics of steps from
`metrics.jsonl`, which a new attempt may replace.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.events import Evaluated, Reported
from paceline.logs.metric_rows import read_row
from paceline.monitor.records.event_reader import attempt_dir, decode_event
from paceline.monitor.records.growing_log import GrowingLog
from paceline.monitor.records.run_files import GrowingFile, worker_number
from paceline.sweep.study_file import Objective

__all__ = ["EVALUATION", "Measured", "RunMetrics"]

EVALUATION = "eval/"  # begins the names of what `worker.evaluate` measured
STEP_DONE = '{"event": "StepDone"'  # how the lines begin that are most of all, and of no use here
COLUMNS = frozenset(  # of metrics.jsonl, that nobody has reported
    ("step", "attempt", "epoch", "time", "num_samples", "skipped", "num_dropped", "seconds", "merged")
)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The objective at a step; not finite where the training was not."""

    step: int
    value: float


class RunMetrics:
    """Follows one run. A poll costs O(new bytes)."""

    def __init__(self, run_dir: Path, objective: Objective) -> None:
        self._run_dir, self._objective = run_dir, objective
        self._is_evaluated = objective.metric.startswith(EVALUATION)
        self._rows = _RowFile(run_dir / "metrics.jsonl")
        self._attempt = 0
        self._events: dict[int, GrowingLog] = {}  # of the attempt, by worker
        self._window: list[float] = []  # values of the steps that are no whole `every` yet
        self._window_end = 0
        self._tail: list[Measured] = []  # the newest values of steps, at least `every` steps of them
        self._found: list[Measured] = []  # by this poll
        self.names: set[str] = set()  # of all that the run has reported
        self.step = 0  # the newest step whose row was read
        self.epoch = 0
        self.last: Measured | None = None  # that was given out
        self._evaluated_at = 0

    def poll(self) -> list[Measured]:
        """Return what has been measured since the last call, by rising steps; each step at most once."""
        self._found = []
        for row in self._rows.poll():
            self._take_row(row)
        while self._poll_events():
            pass
        found = []
        for one in sorted(self._found, key=lambda each: each.step):
            if self.last is None or one.step > self.last.step:
                self.last = one
                found.append(one)
        return found

    def final(self) -> Measured | None:
        """What the run was worth at its end: the last evaluation, or the mean of the last `every` steps."""
        if self._is_evaluated or not self._tail:
            return self.last
        last = self._tail[-1].step
        if self.last is not None and self.last.step >= last:
            return self.last
        values = [one.value for one in self._tail if one.step > last - self._objective.every]
        return Measured(last, sum(values) / len(values))

    def is_missing(self, *, is_over: bool) -> bool:
        """Whether the run reports other things and will not report the objective: an evaluation without it is done, a
        whole epoch has passed, or the run is over.
        """
        metric = self._objective.metric
        if metric in self.names:
            return False
        if is_over:
            return True
        if self._is_evaluated:
            return 0 < self._evaluated_at < self.step
        return self.epoch > 1 or 0 < self._evaluated_at < self.step

    def close(self) -> None:
        self._rows.close()
        for log in self._events.values():
            log.close()
        self._events.clear()

    # Rows: one for each step.

    def _take_row(self, row: dict[str, Any]) -> None:
        step, metric = row["step"], self._objective.metric
        if step <= self.step:
            return  # taken again, or the file was replaced
        self._close_window(step)
        self.step, self.epoch = step, row.get("epoch") or 0
        self.names.update(row.keys() - COLUMNS)
        value = row.get(metric, "")
        is_there = metric not in COLUMNS and not row.get("skipped")
        if is_there and (value is None or isinstance(value, int | float)):
            number = math.nan if value is None else float(value)
            self._window.append(number)
            self._tail.append(Measured(step, number))
        self._close_window(step + 1)
        every = self._objective.every
        if len(self._tail) > 2 * every:
            del self._tail[:-every]

    def _close_window(self, next_step: int) -> None:
        """Give the mean of the steps since the last one, if `next_step` is behind their end."""
        every = self._objective.every
        end = -(-self._tail[-1].step // every) * every if self._window else 0
        if self._window and next_step > end:
            self._found.append(Measured(end, sum(self._window) / len(self._window)))
            self._window.clear()

    # Events: of evaluations, and reports between steps.

    def _poll_events(self) -> bool:
        """Read what is new of the attempt; returns whether a later attempt was begun with."""
        if self._attempt:
            self._find_workers()
            for worker in sorted(self._events):
                for line in self._events[worker].poll(None):
                    if not line.startswith(STEP_DONE):
                        self._take_event(line)
        later = [number for number in _attempts(self._run_dir) if number > self._attempt]
        if not later:
            return False
        for log in self._events.values():
            log.close()
        self._events.clear()
        self._attempt = min(later)
        return True

    def _find_workers(self) -> None:
        directory = attempt_dir(self._run_dir, self._attempt)
        for name in _names_in(directory):
            worker = worker_number(name)
            if worker is not None and worker not in self._events:
                self._events[worker] = GrowingLog(directory / name / "events.jsonl")

    def _take_event(self, line: str) -> None:
        record = decode_event(line)
        event = None if record is None else record.event
        if isinstance(event, Evaluated):
            self._evaluated_at = max(self._evaluated_at, event.step)
            values = {f"{EVALUATION}{name}": value for name, value in event.metrics.items()}
        elif isinstance(event, Reported):
            values = dict(event.metrics)
        else:
            return
        self.names.update(values)
        if self._objective.metric in values:
            self._found.append(Measured(event.step, float(values[self._objective.metric])))


class _RowFile:
    """The rows of `metrics.jsonl`, from its beginning again where another file has taken its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GrowingFile(path)

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that are new, and after a replacement old ones once more."""
        yield from self._read()
        try:
            is_other = self._file.inode() not in (None, os.stat(self._path).st_ino)
        except OSError:  # it was removed
            return
        if is_other:
            self._file.close()
            self._file = GrowingFile(self._path)
            yield from self._read()

    def _read(self) -> Iterator[dict[str, Any]]:
        for line in self._file.poll(None):
            row = read_row(line)
            if row is not None:
                yield row

    def close(self) -> None:
        self._file.close()


def _attempts(run_dir: Path) -> list[int]:
    names = [name.removeprefix("attempt_") for name in _names_in(run_dir) if name.startswith("attempt_")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # not there yet
        return []
