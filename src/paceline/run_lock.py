"""Only one supervisor works in a run's directory: a lock that the kernel frees with its holder, and a fence behind it.

The lock is an "open file description" lock on `RUN/.lock`. It holds while its process is stopped, and on a shared disk
for other hosts, too. A file server may take it from a host that it cannot reach, and some file systems have no locks.
So what a run leaves for its next start (`run.json`, the marks of checkpoints) is written only while no other start has
entered itself in `run.json`: `newer_start`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
from pathlib import Path

from paceline.plain_data import read_object
from paceline.regular_files import read_regular

__all__ = ["hold", "is_held", "is_kept", "is_seen", "newer_start", "release"]

NAME = ".lock"
FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid (0: the open file owns the lock)
_held: dict[str, int] = {}  # by directory: the open file


def hold(run_dir: Path) -> bool:
    """Take the lock until `release` or this process's end, also again; False where another process has it.

    Where the file system has no locks: True. Raises OSError if the file cannot be made.
    """
    place = os.path.realpath(run_dir)
    if place in _held:
        return True
    file = os.open(run_dir / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        has_taken = _take(file)
    except OSError:  # the file system has no locks
        has_taken = True
    if not has_taken:
        os.close(file)
        return False
    _held[place] = file
    return True


def is_kept(run_dir: Path) -> bool:
    """Whether no other process has the lock that this process took with `hold`. One that the file server has taken
    away, and that is free, is taken again. Raises OSError where that cannot be seen now.
    """
    file = _held.get(os.path.realpath(run_dir))
    return file is not None and _take(file)


def is_seen(run_dir: Path) -> bool:
    """Whether other processes see the lock that this process has: not where the file system has no locks. On systems
    other than Linux, for which Paceline has none: True.
    """
    return sys.platform != "linux" or is_held(run_dir)


def _take(file: int) -> bool:
    """Lock an open file, also again; False where another process has the lock. Raises OSError for all else."""
    if sys.platform == "linux":
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
    return True


def is_held(run_dir: Path) -> bool:
    """Whether another process has the lock, on this host or on one that shares the disk, as far as that can be seen."""
    if sys.platform != "linux":
        return False
    try:
        file = os.open(run_dir / NAME, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        finally:
            os.close(file)
    except OSError:  # there is no run, or the file system has no locks
        return False
    return bool(struct.unpack(FLOCK, found)[0] != fcntl.F_UNLCK)


def release(run_dir: Path) -> None:
    """Give the lock back, if this process has it."""
    file = _held.pop(os.path.realpath(run_dir), None)
    if file is not None:
        os.close(file)


def newer_start(run_dir: Path, attempt: int) -> str | None:
    """Return the start of a later attempt in this directory ("attempt 3, process 4711 on host b"), or None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: reported elsewhere
        fields = read_object(read_regular(run_dir / "run.json"))
        newest = max((int(each["attempt"]) for each in fields["attempts"]), default=0)
        if newest > attempt:
            return f"attempt {newest}, process {fields['pid']} on host {fields['host']}"
    return None
