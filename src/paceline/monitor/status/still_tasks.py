"""What `paceline status` says where no task of another framework's program does anything."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from paceline import clock
from paceline.logs.log_reader import last_lines
from paceline.units import duration_text

__all__ = ["TaskState", "are_still", "still_lines"]

AT_WORK = ("running", "halted", "starting")
LOGS = ("stdout.log", "stderr.log")
MOST_PLACES = 8  # tasks whose lines are named
MOST_LINE = 160  # characters of a log's line
NUM_EMPTY = 20  # last lines of a log, of which one says something


class TaskState(Protocol):
    """What is asked of a task: `WorkerStatus` has it."""

    @property
    def rank(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def still_s(self) -> float: ...
    @property
    def place(self) -> str: ...


def are_still(tasks: Sequence[TaskState]) -> bool:
    """Whether all tasks that are at work stand still."""
    at_work = [task for task in tasks if task.state in AT_WORK]
    return bool(at_work) and all(task.still_s > 0 for task in at_work)


def still_lines(tasks: Sequence[TaskState], attempt: Path) -> list[str]:
    """Return the sentence, where each task stands, and what they have written last; `attempt`: its directory."""
    still = [task for task in tasks if task.state in AT_WORK and task.still_s > 0]
    lines = [
        f"STANDS STILL for {duration_text(min(task.still_s for task in still))}: "
        f"no task has used a processor or written anything"
    ]
    places = [f"{task.name} at {task.place}" for task in still[:MOST_PLACES] if task.place]
    lines += [f"  {', '.join(places)}"] if places else []
    written = [(path.stat().st_mtime, task.name, path) for task in still for path in _logs(attempt, task.rank)]
    if written:
        when, name, path = max(written)
        said = next(filter(None, map(str.strip, itertools.islice(last_lines(path), NUM_EMPTY))), "")
        lines.append(
            f"  the last line, {duration_text(max(0.0, clock.now() - when))} ago, of {name}: {said[:MOST_LINE]}"
        )
    return lines


def _logs(attempt: Path, rank: int) -> list[Path]:
    paths = [attempt / f"worker_{rank}" / name for name in LOGS]
    return [path for path in paths if path.is_file() and path.stat().st_size]
