"""Reads the events of one attempt while they are written: the supervisor's file and every worker's."""

from __future__ import annotations

import operator
import os
from pathlib import Path

from paceline import clock
from paceline.events import Record, Warned, decode
from paceline.monitor.records.growing_log import GrowingLog
from paceline.monitor.records.run_files import local_path, worker_number

__all__ = ["EventTail", "attempt_dir", "decode_event"]


class EventTail:
    """Follows `attempt_n/events.jsonl` and all `attempt_n/worker_*/events.jsonl`; files may appear at any time.

    Of lines that were sealed before they were read, it gives what they were summed up to.
    """

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.directory = attempt_dir(run_dir, attempt)
        self._unreadable: list[str] = []  # sentences on files that are to be told
        self._files: dict[int | None, GrowingLog] = {None: self._follow(self.directory / "events.jsonl")}
        self._num_lines: dict[int | None, int] = {}
        self._damaged: set[int | None] = set()

    def poll(self, limit_bytes: int | None = 1 << 20) -> list[Record]:
        """Return the events written since the last call (about `limit_bytes` a file; None: all), by their times.

        A damaged line comes back as a warning, once for each file; the lines after it are read as usual. So does a file
        that cannot be read.
        """
        self._find_workers()
        records: list[Record] = []
        for worker, file in self._files.items():
            for line in file.poll(limit_bytes):
                records += self._read(worker, line)
        records += [Record(clock.now(), None, Warned(text=text)) for text in self._unreadable]
        self._unreadable.clear()
        records.sort(key=operator.attrgetter("time"))
        return records

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _find_workers(self) -> None:
        try:
            names = os.listdir(self.directory)
        except OSError:  # not there yet, or out of reach
            return
        for name in names:
            worker = worker_number(name)
            if worker is not None and worker not in self._files:
                self._files[worker] = self._follow(self.directory / name / "events.jsonl")

    def _follow(self, path: Path) -> GrowingLog:
        return GrowingLog(path, say=self._unreadable.append)

    def _read(self, worker: int | None, line: str) -> list[Record]:
        self._num_lines[worker] = number = self._num_lines.get(worker, 0) + 1
        record = decode_event(line)
        if record is not None:
            return [record]
        if worker in self._damaged:
            return []
        self._damaged.add(worker)
        where = f"{local_path(self._files[worker].path)}, line {number}"
        text = (
            f"{where} is not an event and was left out (more such lines of this file are not reported): {line[:60]!r}"
        )
        return [Record(clock.now(), None, Warned(text=text))]


def attempt_dir(run_dir: Path, attempt: int) -> Path:
    """Return where an attempt keeps its files."""
    return Path(run_dir) / f"attempt_{attempt}"


def decode_event(line: str) -> Record | None:
    """Return the event that a line holds, or None where the line is damaged or comes from another version."""
    try:
        return decode(line)
    except ValueError:
        return None
