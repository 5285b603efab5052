"""What happened in a run beside its steps: evaluations, checkpoints, incidents, warnings, as the console says them.

Lines of steps are passed over by their first characters, so a file of a megabyte takes milliseconds. Files are read
once and then followed; those of earlier attempts are read between two looks, the newest first.
"""

from __future__ import annotations

import collections
import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Note,
    Record,
    RunFinished,
    Warned,
    WorkerFailed,
    WorkerLost,
)
from paceline.logs.log_reader import lines_of
from paceline.monitor.console.event_lines import event_line
from paceline.monitor.records.event_reader import attempt_dir, decode_event
from paceline.monitor.records.growing_log import GrowingLog
from paceline.monitor.records.run_files import worker_number
from paceline.ui.metrics_rows import number
from paceline.ui.run_summary import FileStamp
from paceline.units import name_text, printable

__all__ = ["RunEvents"]

PASSED_OVER = tuple(f'{{"event": "{kind}"' for kind in ("StepDone", "StepsMerged", "StateKept", "EventsMerged"))
MOST_WORKERS_FOLLOWED = 8  # the first ones: what all say alike is in each file, and the first one evaluates
LIST_EVERY_S = 5.0  # a directory whose time of change stays the same, as on some network file systems
MOST_ATTEMPTS = 50
MOST_LINES = 400
MOST_EVALUATIONS = 1000  # of a measure
MOST_MEASURES = 100
MOST_TEXT = 600  # characters of a line
INCIDENTS = (
    "WorkerLost",
    "WorkerLeft",
    "Regrouped",
    "Restarted",
    "SpikeSeen",
    "WeightsDiffer",
    "WorkerFailed",
    "ServerReplaced",
    "MicroBatchHalved",
    "CheckpointFailed",
    "UploadFailed",
)


class RunEvents:
    """Call `poll` from one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._attempt = 0
        self._directory = run_dir
        self._listed: tuple[int, float] = (0, -LIST_EVERY_S)  # the directory's mtime when it was listed, and when
        self._followed: dict[int | None, GrowingLog] = {}
        self._earlier: collections.deque[Path] = collections.deque()
        self._lines: dict[tuple[str, int, str], tuple[float, str]] = {}  # what is said alike counts once
        self._evaluations: dict[str, dict[int, tuple[float, float]]] = {}  # measure -> step -> when, value
        self.num_incidents = 0

    def poll(self, attempt: int, budget_s: float) -> bool:
        """Read what is new of this attempt, and of earlier ones for about `budget_s`; returns whether anything is."""
        if attempt != self._attempt:
            self._begin(attempt)
        self._find_workers()
        before = (len(self._lines), self.num_incidents, sum(map(len, self._evaluations.values())))
        for log in self._followed.values():
            self._take(log.poll())
        deadline = time.perf_counter() + budget_s
        while self._earlier and time.perf_counter() < deadline:
            self._take(lines_of(self._earlier.popleft()))
        self._cut()
        return before != (len(self._lines), self.num_incidents, sum(map(len, self._evaluations.values())))

    def close(self) -> None:
        for log in self._followed.values():
            log.close()
        self._followed.clear()

    def lines(self) -> list[dict[str, Any]]:
        """The newest lines, by time: `time`, `kind` (the event's class), `step` and `text`."""
        found = sorted((when, kind, step, shown) for (kind, step, _), (when, shown) in self._lines.items())
        return [{"time": when, "kind": kind, "step": step or None, "text": text} for when, kind, step, text in found]

    def evaluations(self) -> dict[str, list[list[float]]]:
        """Steps and values of each measure, by step; of a step that was taken again the newer one."""
        return {
            name: [[step, value] for step, (_, value) in sorted(by_step.items())]
            for name, by_step in self._evaluations.items()
        }

    def _begin(self, attempt: int) -> None:
        """Follow another attempt. The files of the one before are read to their ends."""
        for log in self._followed.values():
            self._take(log.poll(None))
        self.close()
        first = max(1, attempt - MOST_ATTEMPTS)
        earlier = range(attempt - 1, max(first - 1, self._attempt), -1)
        for number_of in earlier:
            directory = attempt_dir(self._run_dir, number_of)
            self._earlier += [directory / "events.jsonl", *_workers_files(directory).values()]
        self._attempt, self._directory = attempt, attempt_dir(self._run_dir, attempt)
        self._listed = (0, -LIST_EVERY_S)
        self._followed = {None: GrowingLog(self._directory / "events.jsonl")}

    def _find_workers(self) -> None:
        """Look for workers that have come: where the directory has changed, and sometimes in any case."""
        if len(self._followed) > MOST_WORKERS_FOLLOWED:
            return
        mtime_ns, now = FileStamp.of(self._directory).mtime_ns, time.monotonic()
        if mtime_ns == self._listed[0] and now - self._listed[1] < LIST_EVERY_S:
            return
        self._listed = mtime_ns, now
        for worker, path in _workers_files(self._directory).items():
            if worker not in self._followed and len(self._followed) <= MOST_WORKERS_FOLLOWED:
                self._followed[worker] = GrowingLog(path)

    def _take(self, lines: Iterable[str]) -> None:
        for line in lines:
            record = None if line.startswith(PASSED_OVER) else decode_event(line)
            if record is not None:
                self._note(record)

    def _note(self, record: Record) -> None:
        event = record.event
        kind = type(event).__name__
        step = getattr(event, "step", None)
        if isinstance(event, Evaluated):
            self._evaluate(record.time, event)
        text = _text(event)
        if text is None:
            return
        shown = printable(text)[:MOST_TEXT]
        # Durations differ between the workers that say it.
        key = (kind, step or 0, "" if isinstance(event, Evaluated | CheckpointSaved) else shown)
        if key not in self._lines:
            self.num_incidents += kind in INCIDENTS
            self._lines[key] = (record.time, shown)

    def _evaluate(self, when: float, event: Evaluated) -> None:
        for name, value in event.metrics.items():
            shown, found = name_text(name), number(value)
            if found is None or (shown not in self._evaluations and len(self._evaluations) >= MOST_MEASURES):
                continue
            by_step = self._evaluations.setdefault(shown, {})
            if by_step.get(event.step, (0.0, 0.0))[0] <= when:
                by_step[event.step] = (when, found)

    def _cut(self) -> None:
        """Keep the newest lines, and evenly spread evaluations."""
        if len(self._lines) > 2 * MOST_LINES:
            newest = sorted(self._lines.items(), key=lambda one: one[1][0])[-MOST_LINES:]
            self._lines = dict(newest)
        for name, by_step in self._evaluations.items():
            if len(by_step) > 2 * MOST_EVALUATIONS:
                steps = sorted(by_step)
                self._evaluations[name] = {step: by_step[step] for step in (*steps[:-1:2], steps[-1])}


def _text(event: Event) -> str | None:
    match event:
        case Warned(text=text) | Note(text=text):
            return text
        case WorkerLost(reason=reason) | WorkerFailed(reason=reason, follows=False):
            return reason
        case RunFinished(state=state, exit_code=code):
            return state if not code else f"{state} with exit code {code}"
        case _:
            return event_line(event)


def _workers_files(directory: Path) -> dict[int, Path]:
    """The event files of the first workers, by worker."""
    try:
        names = os.listdir(directory)
    except OSError:  # not there yet, or out of reach
        return {}
    found = sorted((worker, name) for name in names if (worker := worker_number(name)) is not None)
    return {
        worker: directory / name / "events.jsonl" for worker, name in itertools.islice(found, MOST_WORKERS_FOLLOWED)
    }
