"""File locks by which a new start of a run waits for workers of the previous start that have lost their supervisor.

Each worker locks its own log until its process ends. A new start checks whether the locks of the newest attempt are
free. The kernel releases the locks, so nothing has to be cleaned up.

These are "open file description" locks, because they can be tested without being taken: two new starts at the same time
must not mistake each other for workers. They exist only on Linux; on other systems, and on file systems without locks,
a new start waits for no workers. Each host locks its own byte, because hosts that share a directory may see each
other's locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import LaunchError

__all__ = ["lock_worker_log", "running_workers", "wait_until_workers_ended"]

LOG = "stdout.log"  # created before anything else of a worker runs
POLL_S = 0.05
FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid (0: the open file owns the lock)
ALL_BYTES = (0, 0)


def lock_worker_log(worker_dir: Path) -> None:
    """Hold the lock of this worker until this process ends. Its log must exist."""
    fd = os.open(worker_dir / LOG, os.O_RDONLY | os.O_CLOEXEC)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, _own_byte()))


def running_workers(run_dir: Path, *, on_this_host: bool = False) -> list[int]:
    """Return the ranks of the newest attempt's running workers: only `on_this_host`, or all whose locks are visible."""
    return sorted(_locked_ranks(run_dir, _own_byte() if on_this_host else ALL_BYTES))


def wait_until_workers_ended(
    run_dir: Path,
    *,
    limit_s: float,
    say: Callable[[str], None],
    on_this_host: bool = False,
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """Return when no worker of an earlier start is running in this directory, or `unless()` they need not end; `say`
    informs the user of the wait.

    With `on_this_host` workers of other hosts are ignored: they may belong to the run that is starting. Raise
    LaunchError after `limit_s` seconds.
    """
    if not (found := running_workers(run_dir, on_this_host=on_this_host)):
        return
    # Only the head keeps a record. Where there is none, this host is a member of a run whose head is another one.
    has_record = os.path.exists(run_dir / "run.json")
    first = "the supervisor of the previous start is lost" if has_record else "another start is at work here"
    say(f"{first}: waiting for {_workers_text(found)} to save and leave")
    deadline = time.monotonic() + limit_s
    while (found := running_workers(run_dir, on_this_host=on_this_host)) and not unless():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{first[0].upper()}{first[1:]}, and {_workers_text(found)} did not leave {run_dir} within "
                f"{limit_s:.0f} s. End them (ps shows paceline-w{found[0]}), or use another run_dir."
            )
        time.sleep(POLL_S)  # a released lock wakes no one up, so poll


def _locked_ranks(run_dir: Path, span: tuple[int, int]) -> Iterator[int]:
    attempts = [path for path in run_dir.glob("attempt_*") if path.name.removeprefix("attempt_").isdecimal()]
    if not attempts:
        return
    newest = max(attempts, key=lambda path: int(path.name.removeprefix("attempt_")))
    for log in newest.glob(f"worker_*/{LOG}"):
        try:
            fd = os.open(log, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:  # another user's file, or being removed
            continue
        try:
            if _is_locked(fd, span):
                yield int(log.parent.name.removeprefix("worker_"))
        finally:
            os.close(fd)


def _is_locked(fd: int, span: tuple[int, int]) -> bool:
    """Return whether another open file has locked any of these bytes."""
    if sys.platform != "linux":
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, span))
    except OSError:  # a file system without locks
        return False
    return struct.unpack(FLOCK, found)[0] != fcntl.F_UNLCK


def _flock(kind: int, span: tuple[int, int]) -> bytes:
    """Return a `struct flock` for fcntl(2); the bytes need not exist in the file."""
    return struct.pack(FLOCK, kind, os.SEEK_SET, *span, 0)


def _own_byte() -> tuple[int, int]:
    """Return the offset and length that workers of this host lock."""
    return zlib.crc32(socket.gethostname().encode()), 1


def _workers_text(ranks: list[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
