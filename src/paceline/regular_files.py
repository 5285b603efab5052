"""Opens files that others may have put there, to be read: regular ones only.

Reading a named pipe waits for a writer, and a device may have no end. Such a thing is refused by an OSError, as a
directory is.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_regular", "read_regular"]

OTHERS = (
    (stat.S_ISFIFO, "it is a named pipe, not a file"),
    (stat.S_ISSOCK, "it is a socket, not a file"),
    (stat.S_ISCHR, "it is a device, not a file"),
    (stat.S_ISBLK, "it is a device, not a file"),
)


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a file to be read; raises OSError, also where it is no regular file."""
    return open(path, "rb", buffering=buffering, opener=_opened)


def read_regular(path: Path, most_bytes: int = -1) -> bytes:
    """Return what a file has, or its first bytes; raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read(most_bytes)


def _opened(path: str, flags: int) -> int:
    opened = os.open(path, flags | os.O_NONBLOCK)  # of a named pipe without a writer it would wait
    try:
        _require_regular(os.fstat(opened).st_mode, path)
    except OSError:
        os.close(opened)
        raise
    return opened


def _require_regular(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, next((text for is_one, text in OTHERS if is_one(mode)), "it is no file"), path)
