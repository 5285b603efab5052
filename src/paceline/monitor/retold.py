"""Finds in the workers' events what earlier attempts have done: steps that `metrics.jsonl` lacks, and lost steps.

A supervisor that is killed dies some steps behind its workers, and their newest checkpoint may be of one of those. The
next attempt goes on from there, and writes the rows that are missing first. Steps after the newest checkpoint are taken
again, and whoever starts the run again is told how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.events import Record, StepDone
from paceline.monitor.files import last_lines, worker_number
from paceline.monitor.line import Stretch, beginnings, comes_by
from paceline.monitor.steps import Step, StepMerger
from paceline.monitor.stream import attempt_dir, decoded

__all__ = ["again_text", "steps_between"]

DONE = '{"event": "StepDone"'  # how the line of a step begins


def steps_between(run_dir: Path, line: Sequence[Stretch], *, after: int, until: int) -> list[tuple[int, Step]]:
    """Return steps after + 1 to `until` as the attempts of a line, the newest first, have told of them, each with its
    attempt; costs O(those)."""
    rows: dict[int, tuple[int, Step]] = {}
    for stretch in line:
        if len(rows) >= until - after:
            break
        first, last = max(after, stretch.after), int(min(until, stretch.until))
        for row in _rows(attempt_dir(run_dir, stretch.attempt), first, last) if first < last else ():
            rows.setdefault(row.step, (stretch.attempt, row))
    return [rows[step] for step in sorted(rows)]


def again_text(run_dir: Path, *, before_attempt: int, resumed_from: int) -> str | None:
    """Say which steps an attempt takes again because they were not saved; None where there are none.

    They are those of the newest earlier attempt that took any step from the same state on. Reads the ends of its files.
    """
    begun = beginnings(run_dir, until_attempt=before_attempt)
    for attempt in range(before_attempt - 1, 0, -1):
        last_step = max(map(_last_step, attempt_dir(run_dir, attempt).glob("worker_*/events.jsonl")), default=0)
        if last_step and comes_by(attempt, begun.get(before_attempt), begun):
            break
    else:
        return None
    num_again = last_step - resumed_from
    if num_again <= 0:
        return None
    again = f"{num_again} steps are" if num_again > 1 else "1 step is"
    if resumed_from:
        return f"attempt {attempt} came to step {last_step}, and saved step {resumed_from} last: {again} taken again"
    return (
        f"attempt {attempt} came to step {last_step}, and nothing was saved: beginning at step 1, {again} taken again"
    )


def _last_step(path: Path) -> int:
    """The last step that a worker committed; 0: none."""
    for line in last_lines(path):
        record = decoded(line) if line.startswith(DONE) else None
        if record is not None and isinstance(record.event, StepDone):
            return record.event.step
    return 0


def _rows(directory: Path, after: int, until: int) -> list[Step]:
    merger = StepMerger(())
    for path in sorted(directory.glob("worker_*/events.jsonl")):
        if worker_number(path.parent.name) is not None:
            for record in reversed(list(_told(path, after, until))):  # of a step that was told twice the first counts
                merger.add(record)
    return merger.rest()


def _told(path: Path, after: int, until: int) -> Iterator[Record]:
    """A worker's word on these steps, from the last to the first."""
    for line in last_lines(path):
        record = decoded(line) if line.startswith(DONE) else None
        if record is None or not isinstance(record.event, StepDone):
            continue
        if record.event.step <= after and not record.event.alone:  # those are not in order
            return
        if after < record.event.step <= until:
            yield record
