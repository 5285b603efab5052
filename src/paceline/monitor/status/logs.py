"""`paceline logs RUN`: what the workers of a run's newest attempt printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.logs.log_reader import LONGEST_LINE
from paceline.monitor.records.event_reader import attempt_dir
from paceline.monitor.records.run_files import GrowingFile, worker_number
from paceline.monitor.records.run_record import RunRecord
from paceline.plan.program_tasks import task_name
from paceline.units import printable

__all__ = ["main_logs"]

STREAMS = ("stdout", "stderr")
PIECE_BYTES = 2 * LONGEST_LINE  # of a file, in memory at once: a line of any length is given out by then
EVERY_S = 0.2  # between two looks at the files
SHORT = {"stdout": "", "stderr": " err"}


def main_logs(run_dir: Path | str, worker: int | None = None, stream: str | None = None, follow: bool = False) -> int:
    """Print logs of one worker or of all, of one stream or of both; with `follow` until the run has ended.

    The lines of a single file are printed as they are, those of several with a tag: `[2] ` and `[2 err] `, or with
    the name of a program's task. Returns 0, 2 where there is no such run, worker or stream, or 130 after Ctrl-C.
    """
    try:
        record = RunRecord.load(run_dir)
        files = _files(record, worker, stream)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    try:
        _print(files, is_over=not follow)
        while follow and RunRecord.load(run_dir).state_now() == "running":
            time.sleep(EVERY_S)
            files.update({name: file for name, file in _files(record, worker, stream).items() if name not in files})
            _print(files)
        _print(files, is_over=True)
    except KeyboardInterrupt:
        return 130
    finally:
        for file in files.values():
            file.close()
    return 0


def _files(record: RunRecord, worker: int | None, stream: str | None) -> dict[str, GrowingFile]:
    """The files asked for, by their tags; a worker that is yet to start is followed as well."""
    if stream is not None and stream not in STREAMS:
        raise ValueError(f"there is no stream {stream!r}: name 'stdout' or 'stderr', or none for both")
    directory = attempt_dir(record.run_dir, record.attempt)
    names = [path.name for path in directory.glob("*")]
    known = {number for name in names if (number := worker_number(name)) is not None} | set(range(record.workers))
    if worker is not None and worker not in known:
        raise ValueError(f"attempt {record.attempt} of {record.run_dir} has no worker {worker}; it has {sorted(known)}")
    chosen = sorted(known) if worker is None else [worker]
    has_servers = record.job.get("servers") is not None  # then ranks are not the workers' numbers
    return {
        f"[{task_name(record.job, number) if has_servers else number}{SHORT[name]}] ": GrowingFile(
            directory / f"worker_{number}" / f"{name}.log", say=_warn
        )
        for number in chosen
        for name in (STREAMS if stream is None else (stream,))
    }


def _warn(text: str) -> None:
    print(f"paceline: {printable(text)}", file=sys.stderr)


def _print(files: dict[str, GrowingFile], *, is_over: bool = False) -> None:
    for tag, file in files.items():
        while lines := file.poll(PIECE_BYTES):
            _print_lines(lines, tag if len(files) > 1 else "")
        rest = file.rest() if is_over else ""
        _print_lines([rest] if rest else [], tag if len(files) > 1 else "")


def _print_lines(lines: Sequence[str], tag: str) -> None:
    for line in lines:
        print(f"{tag}{printable(line, colors=True)}", flush=True)
