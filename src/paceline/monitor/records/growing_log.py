"""Follows a log while its writer appends to it and seals it: each line once, or what it was summed up to.

A sealing puts another file in the log's place. The one that was open is read to its end first. The new one says how
many lines are sealed; those of its own lines that were read before are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from paceline.logs.log_reader import sealed_lines
from paceline.logs.sealed_log import SealedMark
from paceline.monitor.records.run_files import GrowingFile
from paceline.plain_data import finite, read_object

__all__ = ["GrowingLog"]

OWN_TIME = re.compile(r'\{"event": "\w+", "time": (\d{1,10}(?:\.\d*)?),')  # as an event is written


class GrowingLog:
    """A log that others write; it may not exist yet. A poll costs O(new bytes)."""

    def __init__(self, path: Path, *, say: Callable[[str], None] | None = None) -> None:
        """`say` gets a sentence where the log cannot be read."""
        self.path, self._say = path, say
        self._file = GrowingFile(path, say=say)
        self._mark: SealedMark | None = None  # of the file that is open; None: its first line was not read yet
        self._num_read = 0  # lines as they were written, sealed ones too
        self._num_known = 0  # of the file that is open: lines at its beginning that were read before
        self._newest = 0.0  # time of the last event that was given out

    def poll(self, limit_bytes: int | None = 1 << 20) -> list[str]:
        """Return the lines completed since the last call; reads about `limit_bytes` (None: to the end of the log)."""
        lines = self._take(self._file.poll(limit_bytes))
        if self._was_replaced() and (limit_bytes is None or not lines):
            lines += self._take(self._file.poll(None))  # what was written before it was replaced
            self._file.close()
            self._file = GrowingFile(self.path, say=self._say)
            before, self._mark = self._mark, None
            lines += self._take(self._file.poll(limit_bytes), after=before)
        return lines

    def close(self) -> None:
        self._file.close()

    def _was_replaced(self) -> bool:
        open_file = self._file.inode()
        try:
            return open_file is not None and open_file != os.stat(self.path).st_ino
        except OSError:  # removed, or out of reach
            return False

    def _take(self, lines: list[str], *, after: SealedMark | None = None) -> list[str]:
        """What is new among the lines of the file that is open; `after`: the mark of the one before."""
        if not lines:
            return []
        found: list[str] = []
        if self._mark is None:
            mark = SealedMark.parse(lines[0])
            self._mark = mark or SealedMark()
            if mark is not None:
                del lines[0]
                if mark.lines > self._num_read:  # it was sealed before it was read
                    found = [line for line in sealed_lines(self.path, mark, after=after) if self._is_new(line)]
                    self._num_read = mark.lines
                self._num_known = self._num_read - mark.lines
        passed = min(self._num_known, len(lines))
        self._num_known -= passed
        new = lines[passed:]
        self._num_read += len(new)
        if new:
            self._newest = _time(new[-1]) or self._newest
        return [*found, *new]

    def _is_new(self, line: str) -> bool:
        return not self._newest or _time(line) > self._newest


def _time(line: str) -> float:
    if (found := OWN_TIME.match(line)) is not None:
        return float(found[1])
    try:
        return finite(read_object(line)["time"])
    except (ValueError, KeyError):  # damaged
        return 0.0
