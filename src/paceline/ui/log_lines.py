"""The newest lines that a run's workers printed, of one worker or of the first ones, filtered; read from the files'
ends, within a limit of bytes."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.logs.log_reader import last_lines
from paceline.monitor.records.event_reader import attempt_dir
from paceline.monitor.records.run_files import worker_number
from paceline.monitor.records.run_record import RunRecord
from paceline.plan.program_tasks import task_name
from paceline.units import printable

__all__ = ["STREAMS", "log_lines", "logs_size", "names_in_logs", "workers_with_logs"]

STREAMS = ("stdout", "stderr")
MOST_LINES = 400  # of all files together
MOST_READ = 200_000  # lines of a file that a filter looks at
MOST_BYTES = 8 << 20  # of a file, of them
MOST_WORKERS = 64
MOST_WIDTH = 2000  # characters of a line
COLOR = re.compile("\x1b\\[[0-9;?]{0,40}[A-Za-z]")  # sequences that color text or move a cursor


def log_lines(
    run_dir: Path, attempt: int, *, worker: int | None, stream: str | None, find: str
) -> list[dict[str, Any]]:
    """Return the newest lines of a worker (None: of the first `MOST_WORKERS`) and a stream (None: both) that have the
    text `find` in them, in any case: `worker`, `stream`, `text`."""
    directory = attempt_dir(run_dir, attempt)
    workers = [one for one in workers_with_logs(run_dir, attempt)[:MOST_WORKERS] if worker in (None, one)]
    files = [(one, name) for one in workers for name in (STREAMS if stream is None else (stream,))]
    each = max(20, MOST_LINES // max(1, len(files)))
    found: list[dict[str, Any]] = []
    for one, name in files:
        lines = itertools.islice(_matching(directory / f"worker_{one}" / f"{name}.log", find.casefold()), each)
        found += [{"worker": one, "stream": name, "text": text} for text in [*lines][::-1]]
    return found


def workers_with_logs(run_dir: Path, attempt: int) -> list[int]:
    """The workers of an attempt that have a directory here."""
    try:
        names = os.listdir(attempt_dir(run_dir, attempt))
    except OSError:  # not there yet, or out of reach
        return []
    return sorted(worker for name in names if (worker := worker_number(name)) is not None)


def names_in_logs(run_dir: Path, workers: Sequence[int]) -> dict[int, str]:
    """What these workers are called, where that is not by their numbers: the tasks of a program with servers."""
    try:
        job = RunRecord.load(run_dir).job
    except ValueError:  # damaged, which the page says elsewhere
        return {}
    return {} if job.get("servers") is None else {worker: task_name(job, worker) for worker in workers}


def logs_size(run_dir: Path, attempt: int) -> int:
    """Bytes of all logs of an attempt: another number says that something was printed."""
    total = 0
    for worker in workers_with_logs(run_dir, attempt)[:MOST_WORKERS]:
        for stream in STREAMS:
            try:
                total += os.stat(attempt_dir(run_dir, attempt) / f"worker_{worker}" / f"{stream}.log").st_size
            except OSError:  # nothing was printed yet
                continue
    return total


def _matching(path: Path, find: str) -> Iterator[str]:
    """The lines with a text in them, from the last to the first."""
    num_read = 0
    for line in itertools.islice(last_lines(path), MOST_READ):
        num_read += len(line)
        text = printable(COLOR.sub("", line.rstrip("\r")))[:MOST_WIDTH]
        if not find or find in text.casefold():
            yield text
        if num_read > MOST_BYTES:
            return
