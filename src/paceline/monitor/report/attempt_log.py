"""What the goodput ledger is made from: the events of each attempt; the rare ones in memory, the steps as a stream.

A run of a million steps has files of hundreds of megabytes, so their lines are read twice. The first reading keeps
everything that is not a step. The second one streams the steps, worker by worker.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline import clock
from paceline.events import Record, RunFinished, RunStarted, StreamOpened, WorkerJoined, WorkerLost, WorkerStarted
from paceline.logs.log_reader import last_lines, lines_of
from paceline.monitor.records.damaged_lines import DamagedLines
from paceline.monitor.records.event_reader import attempt_dir, decode_event
from paceline.monitor.records.failure import is_echo
from paceline.monitor.records.run_files import worker_number
from paceline.monitor.records.run_record import RUNNING, RunRecord
from paceline.plain_data import LATEST, finite, read_object, whole

__all__ = ["AttemptLog", "StepTime", "read_attempts"]

STEPS = ('{"event": "StepDone"', '{"event": "StepsMerged"')  # how the lines of steps begin


class StepTime(NamedTuple):
    """One worker's word on a step, or on many that were summed up, as much of it as the report needs."""

    time: float  # when it was recorded, after its commit
    step: int
    seconds: Mapping[str, float]  # as in StepDone
    skipped: bool = False  # no worker took it
    num: int = 1  # steps; `seconds` are sums
    first: int = 0  # of them
    skipped_s: float = 0.0  # of `seconds`, in steps that no worker took


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptLog:
    """What the files of an attempt say."""

    attempt: int
    workers: int  # that it began with
    began: float  # the user's command
    ended: float  # the last moment that is known
    state: str  # finished | failed | stopped | lost | running
    exit_code: int | None
    last_step: int  # last step that any worker recorded; 0: none
    elsewhere: frozenset[int] = frozenset()  # workers of other hosts, whose files are not here
    echoes: frozenset[int] = frozenset()  # workers whose error only reports that a peer was lost
    records: Sequence[Record]  # of supervisor and workers, without the steps, by time
    steps: Callable[[int], Iterable[StepTime]]  # of a worker, by time


def read_attempts(
    record: RunRecord, *, others: Sequence[Path] = (), damaged: DamagedLines | None = None
) -> list[AttemptLog]:
    """Return the attempts of a run that left files, by their numbers; `others` are directories of its other hosts.

    `damaged` gets the lines that were left out, those of steps when they are read.
    """
    damaged = damaged or DamagedLines()
    logs: list[AttemptLog] = []
    for attempt in record.attempts:
        directory = attempt_dir(record.run_dir, attempt.attempt)
        if not os.path.isdir(directory):
            continue
        places = [attempt_dir(run_dir, attempt.attempt) for run_dir in (*others, record.run_dir)]
        found_in = [path for place in places for path in place.glob("*")]
        paths = {worker: path / "events.jsonl" for path in found_in if (worker := _worker(path)) is not None}
        records = sorted(
            (found for path in (directory / "events.jsonl", *paths.values()) for found in _rare(path, damaged)),
            key=operator.attrgetter("time"),
        )
        last_told = {worker: _last_told(path) for worker, path in paths.items()}
        state = attempt.state
        if state == RUNNING and (attempt.attempt != record.attempt or record.state_now() != RUNNING):
            state = "lost"
        ends = [found.time for found in records if isinstance(found.event, RunFinished)]
        ended = attempt.ended or max(ends, default=0.0)
        if not ended:
            known = [found.time for found in records] + [when for when, _ in last_told.values()]
            ended = clock.now() if state == RUNNING else max(known, default=attempt.started)
        logs.append(
            AttemptLog(
                attempt=attempt.attempt,
                workers=_num_workers(records, record.workers),
                began=_began(records, attempt.started),
                ended=ended,
                state=state,
                exit_code=attempt.exit_code,
                elsewhere=_elsewhere(records, record.workers, paths),
                last_step=max((step for _, step in last_told.values()), default=0),
                echoes=frozenset(worker for worker, path in paths.items() if is_echo(path.with_name("error.json"))),
                records=records,
                steps=_Steps(paths, damaged),
            )
        )
    return logs


def _elsewhere(records: Sequence[Record], otherwise: int, here: Collection[int]) -> frozenset[int]:
    """Return the workers without a directory here, which are on other hosts.

    If there is no other host, and none of them came later, they were never started. If all workers are elsewhere, there
    is no time to count, and so they count as starting.
    """
    started = next((found.event for found in records if isinstance(found.event, RunStarted)), None)
    begun = _num_workers(records, otherwise)
    spread = range(begun) if started is not None and started.hosts > 1 and here else ()
    named = {found.event.rank for found in records if isinstance(found.event, WorkerLost | WorkerJoined)}
    return frozenset({*spread, *(worker for worker in named if worker >= begun)} - set(here))


class _Steps:
    """Reads a worker's steps each time that it is called."""

    def __init__(self, paths: Mapping[int, Path], damaged: DamagedLines) -> None:
        self._paths, self._damaged = paths, damaged

    def __call__(self, worker: int) -> Iterator[StepTime]:
        path = self._paths.get(worker)
        if path is not None:
            yield from self._damaged.read(path, (line for line in lines_of(path) if line.startswith(STEPS)), _step)


def _step(line: str) -> StepTime | None:
    try:
        fields = read_object(line)
        when, seconds = finite(fields["time"]), fields["seconds"]
        if not 0 <= when <= LATEST or not all(finite(value) >= 0 for value in seconds.values()):
            return None
        if "num_steps" in fields:
            first, last = whole(fields["first_step"]), whole(fields["last_step"])
            num, skipped_s = whole(fields["num_steps"], least=1), finite(fields["skipped_s"])
            return StepTime(when, last, seconds, False, num, first, skipped_s)
        return StepTime(when, whole(fields["step"]), seconds, fields.get("skipped", False) is True)
    except (ValueError, TypeError, KeyError, AttributeError):  # cut off by a kill, or damaged
        return None


def _rare(path: Path, damaged: DamagedLines) -> Iterator[Record]:
    lines = (line for line in lines_of(path) if not line.startswith(STEPS))
    return damaged.read(path, lines, decode_event)


def _last_told(path: Path) -> tuple[float, int]:
    """Return when a worker last wrote an event, and the last step that it recorded."""
    when = 0.0
    for line in last_lines(path):
        found = decode_event(line)
        if found is None:
            continue
        when = when or found.time
        step = getattr(found.event, "step", 0) or getattr(found.event, "last_step", 0)
        if step and not isinstance(found.event, StreamOpened):
            return when, step
    return when, 0


def _began(records: Sequence[Record], otherwise: float) -> float:
    """When the user's command began: known by the workers' start-up times; those of successors count from later."""
    moments = [found.time for found in records if isinstance(found.event, RunStarted)]
    moments += [found.time - found.event.startup_s for found in records if isinstance(found.event, WorkerStarted)]
    return min(moments, default=otherwise)


def _num_workers(records: Sequence[Record], otherwise: int) -> int:
    return next((found.event.workers for found in records if isinstance(found.event, RunStarted)), otherwise)


def _worker(path: Path) -> int | None:
    return worker_number(path.name)
