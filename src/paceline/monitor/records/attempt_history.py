"""Which attempts led to a run's state, and what they have done.

Each attempt records, in the first lines of its workers' ledgers, from which step of which attempt it went on. That need
not be the attempt before: an attempt that was started over, or that saved nothing, leads nowhere.

When a supervisor is killed, its record ends some steps behind its workers, and their newest checkpoint may be of one of
those steps. The next attempt goes on from there; it first writes the rows that `metrics.jsonl` lacks, taken from the
workers' events. Steps after the newest checkpoint are taken again, and the console says how many.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.events import Record, StepDone
from paceline.logs.log_reader import Unreadable, last_lines, lines_of
from paceline.monitor.records.damaged_lines import DamagedLines
from paceline.monitor.records.event_reader import attempt_dir, decode_event
from paceline.monitor.records.run_files import worker_number
from paceline.monitor.records.steps import Step, StepMerger
from paceline.plain_data import read_object, text_of, whole

__all__ = [
    "AttemptSteps",
    "ResumePoint",
    "lineage",
    "parse_ledger_line",
    "passes_through",
    "repeated_steps_text",
    "resume_point_of",
    "resume_points",
    "steps_between",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """What an attempt went on from, from the first lines of its ledgers."""

    from_step: int
    of_attempt: int | None  # whose checkpoint it was; None: none of this run
    source: str | None = None  # the checkpoint, where it is another run's
    starts: tuple[tuple[str, int, int], ...] = ()  # stream, epoch, position: where that checkpoint stands


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSteps:
    """The steps of an attempt that led to what came later: `after` + 1 to `until`.

    If an attempt has left no ledger, it is unknown from which attempt it went on. It may have gone on from any before,
    so all of these follow it, each from step 1; of a step that several took the later one's word counts.
    """

    attempt: int
    after: int
    until: float

    def __contains__(self, step: int) -> bool:
        return self.after < step <= self.until


def lineage(newest: int, begun: Mapping[int, ResumePoint]) -> Iterator[AttemptSteps]:
    """Yield the stretches that led to the state of an attempt, its own first; `begun` is of all that left ledgers."""
    attempt: int | None = newest
    until = math.inf
    while attempt is not None:
        if attempt not in begun:
            yield from (AttemptSteps(attempt=one, after=0, until=until) for one in range(attempt, 0, -1))
            return
        own = begun[attempt]
        yield AttemptSteps(attempt=attempt, after=own.from_step, until=until)
        until = min(until, own.from_step)
        is_known = own.source is None and own.of_attempt is not None and own.of_attempt < attempt and until > 0
        attempt = own.of_attempt if is_known else None


def passes_through(attempt: int, place: ResumePoint | None, begun: Mapping[int, ResumePoint]) -> bool:
    """Whether the line to an attempt's last step goes through the state that another one has begun with; where that is
    not known it may."""
    if place is None:
        return True
    line = list(lineage(attempt, begun))
    if any(one.attempt not in begun for one in line):  # its beginning is unknown
        return True
    if place.of_attempt is not None:
        return any(one.attempt == place.of_attempt and place.from_step <= one.until for one in line)
    first = begun[line[-1].attempt]
    return (first.from_step, first.of_attempt, first.source) == (place.from_step, None, place.source)


def resume_points(
    run_dir: Path, *, until_attempt: int, unreadable: DamagedLines | None = None
) -> dict[int, ResumePoint]:
    """What the attempts up to this one went on from, as far as their ledgers record it; reads a few lines of each.
    `unreadable` gets the files that cannot be read."""
    found: dict[int, ResumePoint] = {}
    for number in range(1, until_attempt + 1):
        paths = sorted((run_dir / f"attempt_{number}").glob("worker_*/ledger.jsonl"))
        points = (resume_point_of(path, unreadable) for path in paths if worker_number(path.parent.name) is not None)
        begun = next((one for one in points if one is not None), None)
        if begun is not None:
            found[number] = begun
    return found


def resume_point_of(path: Path, unreadable: DamagedLines | None = None) -> ResumePoint | None:
    """What an attempt went on from, by the first line of a ledger or its repetition after a restore; None where that
    is missing or cut off."""
    begun: ResumePoint | None = None
    for text in lines_of(path):
        if unreadable is not None and isinstance(text, Unreadable):
            unreadable.note(path, text)
        line = parse_ledger_line(text)
        point = _resume_point(line) if line is not None else None
        if point is None:
            break
        begun = point
    return begun


def parse_ledger_line(text: str) -> dict[str, Any] | None:
    """The object that a line of a ledger holds; None where it is damaged."""
    try:
        return read_object(text)
    except ValueError:
        return None


def _resume_point(line: dict[str, Any]) -> ResumePoint | None:
    """What the first line of a ledger says; None where it does not say what such a line says."""
    of_attempt, source, starts = line.get("of_attempt"), line.get("source"), line.get("starts", {})
    try:
        return ResumePoint(
            from_step=whole(line["from_step"]),
            of_attempt=None if of_attempt is None else whole(of_attempt),
            source=None if source is None else text_of(source),
            starts=tuple((name, whole(epoch), whole(place)) for name, (epoch, place) in starts.items()),
        )
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


STEP_DONE = '{"event": "StepDone"'  # how the line of a step begins


def steps_between(run_dir: Path, line: Sequence[AttemptSteps], *, after: int, until: int) -> list[tuple[int, Step]]:
    """Return steps after + 1 to `until` as the attempts of a line, the newest first, have recorded them, each with its
    attempt; costs O(those)."""
    rows: dict[int, tuple[int, Step]] = {}
    for stretch in line:
        if len(rows) >= until - after:
            break
        first, last = max(after, stretch.after), int(min(until, stretch.until))
        for row in _steps_of_attempt(attempt_dir(run_dir, stretch.attempt), first, last) if first < last else ():
            rows.setdefault(row.step, (stretch.attempt, row))
    return [rows[step] for step in sorted(rows)]


def repeated_steps_text(
    run_dir: Path, *, before_attempt: int, resumed_from: int, unreadable: DamagedLines | None = None
) -> str | None:
    """Say which steps an attempt takes again because they were not saved; None where there are none.

    They are those of the newest earlier attempt that took any step from the same state on. Reads the ends of its files;
    `unreadable` gets those that cannot be read.
    """
    unreadable = unreadable or DamagedLines()
    begun = resume_points(run_dir, until_attempt=before_attempt, unreadable=unreadable)
    for attempt in range(before_attempt - 1, 0, -1):
        paths = attempt_dir(run_dir, attempt).glob("worker_*/events.jsonl")
        last_step = max((_last_step(path, unreadable) for path in paths), default=0)
        if last_step and passes_through(attempt, begun.get(before_attempt), begun):
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


def _last_step(path: Path, unreadable: DamagedLines) -> int:
    """The last step that a worker committed; 0: none."""
    for line in last_lines(path):
        if isinstance(line, Unreadable):
            unreadable.note(path, line)
        record = decode_event(line) if line.startswith(STEP_DONE) else None
        if record is not None and isinstance(record.event, StepDone):
            return record.event.step
    return 0


def _steps_of_attempt(directory: Path, after: int, until: int) -> list[Step]:
    merger = StepMerger(())
    for path in sorted(directory.glob("worker_*/events.jsonl")):
        if worker_number(path.parent.name) is not None:
            # If a step was recorded twice, the first record counts.
            for record in reversed(list(_step_records(path, after, until))):
                merger.add(record)
    return merger.rest()


def _step_records(path: Path, after: int, until: int) -> Iterator[Record]:
    """A worker's word on these steps, from the last to the first."""
    for line in last_lines(path):
        record = decode_event(line) if line.startswith(STEP_DONE) else None
        if record is None or not isinstance(record.event, StepDone):
            continue
        if record.event.step <= after and not record.event.alone:  # those are not in order
            return
        if after < record.event.step <= until:
            yield record
