"""Reads a log with what was sealed of it, while other processes write and seal it: from its beginning, or its end.

The log is opened first. Its first line says how much of the sealed file belongs to it, and these bytes never change. So
a reader sees each line once, also where the log is replaced meanwhile.

What cannot be read, of the log or of what was sealed, comes as one line that says so: an `Unreadable`, which no reader
takes for a line of the log.

A damaged log may be one line of many gigabytes. No line takes more memory than the longest that Paceline writes.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from paceline.logs.sealed_log import SealedMark, sealed_path
from paceline.regular_files import open_regular

__all__ = ["LONGEST_LINE", "TOO_LONG", "Unreadable", "last_lines", "lines_of", "sealed_lines"]

CHUNK_BYTES = 1 << 18
LONGEST_LINE = 8 << 20  # bytes: more than a log is let grow to before it is sealed
TOO_LONG = f"(a line of more than {LONGEST_LINE >> 20} MiB, which was left out)"


class Unreadable(str):
    """Stands where lines of a log cannot be read, and says why; it is no JSON."""

    __slots__ = ()

    @classmethod
    def because(cls, error: OSError) -> Unreadable:
        return cls(f"it cannot be read ({error.strerror or error}), and was left out")


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a log from the first to the last, sealed ones as they were merged; none where there is no log.

    The last one may be incomplete.
    """
    try:
        with open_regular(path) as file:
            lines = _bounded(file)
            first = next(lines, None)
            mark = SealedMark.parse(first) if first is not None else None
            if mark is not None:
                yield from sealed_lines(path, mark)
            elif first is not None:
                yield first
            yield from lines
    except FileNotFoundError:
        return
    except OSError as error:
        yield Unreadable.because(error)


def _bounded(file: BinaryIO | gzip.GzipFile) -> Iterator[str]:
    """The lines of a file; of one that is too long, a word on it in its place."""
    while line := file.readline(LONGEST_LINE):
        if line.endswith(b"\n") or len(line) < LONGEST_LINE:
            yield line.decode("utf-8", errors="replace").rstrip("\n")
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(CHUNK_BYTES)
        yield TOO_LONG


def last_lines(path: Path) -> Iterator[str]:
    """Yield the complete lines of a log from the last to the first, read from its end; none where there is no log."""
    try:
        with open_regular(path) as file:
            previous: str | None = None
            for line in _backwards(file):
                if previous is not None:
                    yield previous
                previous = line
            mark = SealedMark.parse(previous) if previous is not None else None
            if mark is not None:
                yield from reversed(list(sealed_lines(path, mark)))
            elif previous is not None:
                yield previous
    except FileNotFoundError:
        return
    except OSError as error:
        yield Unreadable.because(error)


def _backwards(file: BinaryIO) -> Iterator[str]:
    place = file.seek(0, os.SEEK_END)
    rest, is_complete = b"", False  # the beginning of a line whose end lies in the block read before
    is_long = False  # that line is too long, and `rest` is not kept
    while place > 0:
        size = min(place, CHUNK_BYTES)
        place -= size
        file.seek(place)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        if lines and not is_complete:
            lines.pop()  # what follows the last newline: nothing, or a line that is still being written
            is_complete, is_long = True, False
        for line in reversed(lines):
            yield TOO_LONG if is_long else line.decode("utf-8", errors="replace")
            is_long = False
        if is_long or len(rest) >= LONGEST_LINE:
            rest, is_long = b"", True
    if is_complete:
        yield TOO_LONG if is_long else rest.decode("utf-8", errors="replace")


def sealed_lines(path: Path, mark: SealedMark, *, after: SealedMark | None = None) -> Iterator[str]:
    """Yield the sealed lines of a log up to a mark, from its beginning or from an earlier mark on."""
    path, begin = sealed_path(path), after.bytes if after is not None else 0
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size < mark.bytes:
                raise EOFError
            file.seek(begin)
            members = io.BufferedReader(_Beginning(file, mark.bytes - begin), CHUNK_BYTES)
            with gzip.GzipFile(fileobj=members) as lines:
                yield from _bounded(lines)
    except (FileNotFoundError, EOFError, gzip.BadGzipFile, zlib.error):
        yield Unreadable(f"lines of {path} are lost: it is missing, or damaged")
    except OSError as error:
        yield Unreadable(f"lines of {path} are lost: it cannot be read ({error.strerror or error})")


class _Beginning(io.RawIOBase):
    """The next bytes of a file, and no more."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file, self._left = file, num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview | bytearray) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        piece = self._file.read(min(len(buffer), self._left))
        buffer[: len(piece)] = piece
        self._left -= len(piece)
        return len(piece)
