"""How fast a directory's disk takes and gives a file."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["disk_rates"]

PIECE = 1 << 22
SYNCED = 1 << 25  # bytes after which they are waited for
MOST = 1 << 28  # bytes of the file


def disk_rates(directory: Path, *, name: str, seconds: float) -> tuple[float, float]:
    """Return bytes per second of writing a file to the disk itself, and of reading it from there.

    Writing ends after `seconds`, or 256 MiB. Raises OSError where the directory takes no file; none is left behind.
    """
    path, piece = directory / name, os.urandom(PIECE)
    try:
        started, written = time.perf_counter(), 0
        with path.open("wb", buffering=0) as file:
            while written < MOST and (written == 0 or time.perf_counter() - started < seconds):
                for _ in range(SYNCED // PIECE):
                    written += file.write(piece)
                os.fdatasync(file.fileno())
            took = time.perf_counter() - started
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started, num_read = time.perf_counter(), 0
        with path.open("rb", buffering=0) as file:
            while time.perf_counter() - started < seconds and (found := len(file.read(PIECE))):
                num_read += found
        return written / took, num_read / max(1e-9, time.perf_counter() - started)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
