"""Reads files that grow and files that are replaced, while other processes write them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from paceline.errors import DISK_FULL
from paceline.logs.log_reader import LONGEST_LINE, Unreadable
from paceline.regular_files import open_regular

__all__ = ["GrowingFile", "local_path", "replace_text", "worker_number"]

CHUNK_BYTES = 1 << 18
MOST_DIGITS = 6  # of a worker's number


class GrowingFile:
    """Follows a file that others append to, line by line; the file may not exist yet. A poll costs O(new bytes).

    Where it cannot be read, `say` gets one sentence, once; it has no new lines then.
    """

    def __init__(self, path: Path, *, say: Callable[[str], None] | None = None) -> None:
        self.path = path
        self._say = say
        self._file: BinaryIO | None = None
        self._partial = b""

    def poll(self, limit_bytes: int | None = 1 << 20) -> list[str]:
        """Return the lines completed since the last call; reads about `limit_bytes` (None: to the end of the file)."""
        pieces: list[bytes] = []
        try:
            if self._file is None:
                self._file = open_regular(self.path, buffering=0)
            num_bytes = 0
            while (limit_bytes is None or num_bytes < limit_bytes) and (piece := self._file.read(CHUNK_BYTES)):
                pieces.append(piece)
                num_bytes += len(piece)
        except FileNotFoundError:
            return []
        except OSError as error:
            if self._say is not None:
                self._say(f"{local_path(self.path)}: {Unreadable.because(error)}")
                self._say = None
        if not pieces:
            return []
        *lines, self._partial = (self._partial + b"".join(pieces)).split(b"\n")
        if len(self._partial) > LONGEST_LINE:  # it is given out in pieces
            lines.append(self._partial)
            self._partial = b""
        return [line.decode("utf-8", errors="replace") for line in lines]

    def inode(self) -> int | None:
        """The number of the file that is open; None: there is none yet."""
        return None if self._file is None else os.fstat(self._file.fileno()).st_ino

    def rest(self) -> str:
        """Return the last line as far as it has been written, and forget it: for when the writer has ended."""
        partial, self._partial = self._partial, b""
        return partial.decode("utf-8", errors="replace")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text in one instant: a reader sees the old text or the new one, also after a crash.

    Where the disk is full, a text that fits into the blocks of the old file is written over it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in DISK_FULL or not _write_over(path, text.encode()):
            raise
    finally:
        with contextlib.suppress(OSError):  # nothing to add to the error that is on its way
            temporary.unlink(missing_ok=True)


def _write_over(path: Path, content: bytes) -> bool:
    """Write into the blocks that a file has; returns whether that was possible."""
    try:
        with open(path, "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_blocks * 512 < len(content):
                return False
            file.write(content)
            file.truncate()
    except OSError:  # the caller raises the first error
        return False
    return True


def worker_number(directory: str) -> int | None:
    """Return k for "worker_k", None for another name."""
    prefix, _, number = directory.rpartition("_")
    is_number = number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS
    return int(number) if prefix == "worker" and is_number else None


def local_path(path: Path | str) -> str:
    """Return a path as a person would type it here: relative where it lies below the working directory."""
    whole = Path(os.path.abspath(path))
    try:
        return str(whole.relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # elsewhere; or the working directory was deleted
        return str(whole)
