"""Appends lines to a log; when it has grown, its old lines are merged, and moved into a compressed file beside it.

`events.jsonl` keeps the newest lines as they were written. `events.sealed.jsonl.gz` has what became of the older ones:
gzip members, one for each sealing, which `zcat` reads. The first line of the log says how many bytes of the sealed file
it follows, and how many lines they stand for:

    {"sealed": {"bytes": 51234, "lines": 40000}}

A sealing first appends to the sealed file, and then replaces the log in one instant. So a process that is killed in
between leaves a sealed file that is longer than the log says. Readers stop at that length, and the next sealing
overwrites what follows: no line counts twice, and none is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from paceline.errors import DISK_FULL, RunFileError
from paceline.host_memory import give_back_freed
from paceline.plain_data import read_object, whole
from paceline.regular_files import open_regular

__all__ = ["LineLog", "SealedMark", "Sealing", "open_log", "sealed_path"]

BEGINNING = '{"sealed": '  # of a mark
BACK_OFF = 2  # the log grows by this factor before a sealing that failed is tried again


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SealedMark:
    """The first line of a log: what of its sealed file comes before its own lines."""

    bytes: int = 0
    lines: int = 0  # as they were written, before they were merged

    @classmethod
    def parse(cls, line: str) -> SealedMark | None:
        """Return the mark that a line holds; None where it is an ordinary line."""
        if not line.startswith(BEGINNING):
            return None
        try:
            said = read_object(line)["sealed"]
            return cls(bytes=whole(said["bytes"]), lines=whole(said["lines"]))
        except (ValueError, TypeError, KeyError):
            return None

    def text(self) -> str:
        return json.dumps({"sealed": {"bytes": self.bytes, "lines": self.lines}})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sealing:
    """How a log is sealed: `cut(lines)` says how many of its oldest lines may go, and `merge` returns what is kept of
    them. It is tried when the log has passed `over_bytes`. `in_place`: that stays at the beginning of the log itself,
    and the next try is when it has doubled.
    """

    merge: Callable[[Sequence[str]], list[str]]
    cut: Callable[[Sequence[str]], int]
    over_bytes: int = 1 << 20
    in_place: bool = False


class LineLog:
    """Appends lines to one file, each flushed at once; may be called from any thread. Raises OSError where it cannot.

    Sealing goes on in a thread of its own. Where it fails, the log stays as it was, and `say` gets one sentence, once.
    """

    def __init__(self, path: Path, *, sealing: Sealing | None = None, say: Callable[[str], None] | None = None) -> None:
        self.path = path
        self._sealing, self._say = sealing, say
        self._lock = threading.Lock()
        self._file = open_log(path)
        self._size = os.path.getsize(path)
        self._due = max(self._size + 1, sealing.over_bytes) if sealing is not None else 0
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def write(self, line: str) -> None:
        """Append a line, which has no newline in it."""
        with self._lock:
            self._file.write(line + "\n")
            self._size += len(line) + 1
            if self._sealing is None or self._size < self._due or self._thread is not None:
                return
            self._thread = threading.Thread(target=self._seal_and_say, name=f"seal {self.path.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a sealing under way, and close the file."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._sealing = None
        self._file.close()

    def seal(self) -> int:
        """Seal the old lines now; returns how many that were. OSError where the disk does not take it: the log is as
        it was then.
        """
        if self._sealing is None:
            return 0
        with self._lock:
            size = os.fstat(self._file.fileno()).st_size
        with open_regular(self.path) as file:
            data = file.read(size)
        end = data.rfind(b"\n") + 1
        lines = str(memoryview(data)[:end], "utf-8", "replace").split("\n")[:-1]
        mark = SealedMark.parse(lines[0]) if lines else None
        num_read = int(mark is not None)
        if mark is not None:
            del lines[0]
        mark = mark or SealedMark()
        count = self._sealing.cut(lines)
        if count:
            del lines[count:]
            begin = "".join(line + "\n" for line in self._sealing.merge(lines))
            lines.clear()  # a log may have many megabytes, and is here several times already
            if not self._sealing.in_place:
                num_bytes = _append(sealed_path(self.path), mark.bytes, begin)
                begin = SealedMark(bytes=num_bytes, lines=mark.lines + count).text() + "\n"
            self._replace(begin.encode(), data[_place_of(data, num_read + count) : end], end)
        more = self._size if self._sealing.in_place else self._sealing.over_bytes * 3 // 4
        with self._lock:
            self._due = max(self._size + more, self._sealing.over_bytes)
        return count

    def _replace(self, begin: bytes, kept: bytes, end: int) -> None:
        """Put a log in the place of the present one: a beginning, what is kept, and what was written after byte
        `end`."""
        temporary = self.path.with_name(f".{self.path.name}.sealing")
        file: TextIO | None = None
        try:
            with open(temporary, "wb") as begun:
                begun.write(begin)
                begun.write(kept)
                begun.flush()
                os.fsync(begun.fileno())
            with self._lock:
                file = open(temporary, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # it becomes the log
                with open_regular(self.path) as log:
                    log.seek(end)
                    late = log.read()
                file.buffer.write(late)
                file.flush()
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
                os.replace(temporary, self.path)
                self._file, file = file, self._file
                self._size = size
        finally:
            if file is not None:
                with contextlib.suppress(
                    OSError
                ):  # of the log as it was, or of one that never was; all is in the other
                    file.close()
            with contextlib.suppress(OSError):  # the error that is on its way says more
                temporary.unlink(missing_ok=True)

    def _seal_and_say(self) -> None:
        said, sealing = "", self._sealing
        try:
            self.seal()
        except OSError as error:
            said = _failed_text(self.path, error)
        except Exception as error:  # a fault of ours must not cost the training
            said = f"{self.path} could not be shortened ({type(error).__name__}: {error}); it goes on growing"
        with self._lock:
            if said:
                self._due = self._size * BACK_OFF
            is_first, self._has_failed = bool(said) and not self._has_failed, self._has_failed or bool(said)
            self._thread = None
        if sealing is not None and sealing.in_place:  # such a log has many megabytes, and grows for hours
            give_back_freed()
        if is_first and self._say is not None:
            with contextlib.suppress(OSError, RunFileError):  # on the same full disk
                self._say(said)


def open_log(path: Path) -> TextIO:
    """Open a file of lines to be appended to, each flushed at once; ends a line that a killed writer left open."""
    file = open(path, "a+b", buffering=0)  # noqa: SIM115  # closed below
    if file.tell() > 0:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    file.close()
    return open(path, "a", encoding="utf-8", buffering=1)


def sealed_path(path: Path) -> Path:
    """Return where the old lines of a log are: `events.sealed.jsonl.gz` for `events.jsonl`."""
    return path.with_name(f"{path.stem}.sealed{path.suffix}.gz")


def _append(path: Path, after: int, text: str) -> int:
    """Write a gzip member behind the first `after` bytes; returns how long the file is then. What a killed process had
    left there is overwritten; where the disk is full, it is as before."""
    member = gzip.compress(text.encode(), compresslevel=6, mtime=0)
    with open(path, "ab") as file:
        if file.tell() < after:
            raise OSError(f"{path} has {file.tell()} bytes, and {after} were sealed: it was shortened by someone else")
        file.truncate(after)
        try:
            file.write(member)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, after)
            raise
    return after + len(member)


def _place_of(data: bytes, number: int) -> int:
    """Where a line begins, by its number from 0."""
    place = 0
    for _ in range(number):
        place = data.index(b"\n", place) + 1
    return place


def _failed_text(path: Path, error: OSError) -> str:
    remedy = "free space there" if error.errno in DISK_FULL else "look at the disk and the rights there"
    return (
        f"{path} could not be shortened: {error.strerror or error}. It is whole, and goes on growing until a later try "
        f"succeeds: {remedy}"
    )
