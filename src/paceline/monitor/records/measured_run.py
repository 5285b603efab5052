"""What the steps of a run have taken, from its files: the median step by part, and each worker's own work."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.events import StepDone, WorkerFinished, WorkerStarted
from paceline.logs.log_reader import last_lines, lines_of
from paceline.logs.metric_rows import read_row
from paceline.monitor.records.event_reader import attempt_dir, decode_event
from paceline.monitor.records.run_files import worker_number
from paceline.planner.receipt import WARM_UP, MeasuredStep, measured_step

__all__ = ["MeasuredRun", "measured_run", "started_as", "work_by_worker"]

MOST_STEPS = 1000  # the newest ones, which say enough, and are read in milliseconds
MOST_WORK_STEPS = 200
MOST_ENDING = 50  # a worker's last events: the one with its memory is among them
MOST_BEGINNING = 50  # its first ones


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """The newest steps of an attempt. `step` is None where they are too few. `disturbed`: so many of all `steps` were
    skipped, or held up by workers that came or went; they are not in `step`.
    """

    attempt: int
    steps: int
    disturbed: int
    step: MeasuredStep | None


def measured_run(
    run_dir: Path,
    *,
    attempt: int | None = None,
    peak: float | None = None,
    since: float = 0.0,
    steps: range | None = None,
) -> MeasuredRun:
    """Read what an attempt has taken so far (None: the newest that took steps). `peak`: bytes of its fullest worker,
    where they are known already; otherwise workers that have finished say it. Only steps after the moment `since`
    count, and of `steps` only those.
    """
    newest = [*itertools.islice(_rows(run_dir, attempt, since), MOST_STEPS + WARM_UP)]
    if not newest:
        return MeasuredRun(attempt=attempt or 0, steps=0, disturbed=0, step=None)
    number = int(newest[0].get("attempt") or 1)
    rows = [row for row in newest[::-1] if steps is None or row.get("step") in steps]
    good = [row for row in rows if not _is_disturbed(row)]
    peak = _peak(attempt_dir(run_dir, number)) if peak is None else peak
    return MeasuredRun(
        attempt=number, steps=len(rows), disturbed=len(rows) - len(good), step=measured_step(good, peak=peak)
    )


def started_as(run_dir: Path, attempt: int) -> WorkerStarted | None:
    """Return a worker's word on how the attempt began, with its plan and its number of workers; None without any."""
    for _, path in sorted(_event_files(attempt_dir(run_dir, attempt)).items()):
        for line in itertools.islice(lines_of(path), MOST_BEGINNING):
            record = decode_event(line)
            if record is not None and isinstance(record.event, WorkerStarted):
                return record.event
    return None


def _rows(run_dir: Path, attempt: int | None, since: float) -> Iterator[dict[str, Any]]:
    """The rows of one attempt that have seconds, the newest first."""
    for line in last_lines(run_dir / "metrics.jsonl"):
        row = read_row(line)
        if row is None or not _has_seconds(row):
            continue
        if attempt is None:
            attempt = row.get("attempt")
        if row.get("attempt") != attempt or row["time"] < since:
            return  # what is before it is older
        yield row


def _has_seconds(row: Mapping[str, Any]) -> bool:
    seconds = row.get("seconds", {})
    return seconds.get("total", 0.0) > 0 and all(0 <= value < math.inf for value in seconds.values())


def _is_disturbed(row: Mapping[str, Any]) -> bool:
    return bool(row.get("skipped")) or row["seconds"].get("recovery", 0.0) > 0


def _peak(directory: Path) -> float | None:
    """The most bytes that a worker of this attempt has reported at its end."""
    peaks = [
        float(event.peak_memory_bytes)
        for path in _event_files(directory).values()
        for line in itertools.islice(last_lines(path), MOST_ENDING)
        if (record := decode_event(line)) is not None and isinstance(event := record.event, WorkerFinished)
    ]
    return max(peaks, default=None)


def work_by_worker(run_dir: Path, attempt: int) -> dict[int, float]:
    """Return each worker's mean seconds of its newest steps without waiting for others; of those whose files are here
    and that have measured them.
    """
    found: dict[int, float] = {}
    for worker, path in sorted(_event_files(attempt_dir(run_dir, attempt)).items()):
        works = [*itertools.islice(_works(path), MOST_WORK_STEPS)]
        if works:
            found[worker] = sum(works) / len(works)
    return found


def _works(path: Path) -> Iterator[float]:
    for line in last_lines(path):
        record = decode_event(line)
        if record is None or not isinstance(step := record.event, StepDone):
            continue
        if "total" in step.seconds:
            yield max(0.0, step.seconds["total"] - step.seconds.get("communication", 0.0))


def _event_files(directory: Path) -> dict[int, Path]:
    return {
        worker: path / "events.jsonl"
        for path in directory.glob("worker_*")
        if (worker := worker_number(path.name)) is not None
    }
