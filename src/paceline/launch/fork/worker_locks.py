"""Workers that are still at work in a run's directory after their supervisor has gone: the next start waits for them.

Each worker holds a lock on its own log for as long as it lives, however it ends; whoever starts the run again asks
whether the locks of the newest attempt are free. The kernel keeps the account: nothing has to be cleaned up. These are
"open file description" locks, because one can ask for them without taking them: two starts that ask at once must not
take each other for workers. They belong to the open file, as flock's do; only Linux has them, and elsewhere, as on a
file system without locks, nobody can be waited for. Each host has a byte of its own, because hosts that share a
directory may see each other's locks.
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

LOG = "stdout.log"  # every worker has one, from its first moment
LOOK_S = 0.05
FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process (0: of the file)
ALL = (0, 0)  # from the first byte to the last


def lock_worker_log(worker_dir: Path) -> None:
    """Hold the lock of this worker until this process ends. Its log is there already."""
    fd = os.open(worker_dir / LOG, os.O_RDONLY | os.O_CLOEXEC)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, _own_byte()))


def running_workers(run_dir: Path, *, on_this_host: bool = False) -> list[int]:
    """Ranks of the newest attempt's workers that have not ended: `on_this_host`, or as far as it sees others' locks."""
    return sorted(_held(run_dir, _own_byte() if on_this_host else ALL))


def wait_until_workers_ended(
    run_dir: Path, *, limit_s: float, say: Callable[[str], None], on_this_host: bool = False
) -> None:
    """Return when no worker of an earlier start is at work in this directory; `say` tells the user of a wait.

    `on_this_host`: those on other hosts may be of a run that is at work. Raises LaunchError after `limit_s` seconds.
    """
    if not (found := running_workers(run_dir, on_this_host=on_this_host)):
        return
    say(f"the supervisor of the start before has gone: waiting for {_named(found)}, to save and leave")
    deadline = time.monotonic() + limit_s
    while found := running_workers(run_dir, on_this_host=on_this_host):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"The supervisor of the start before has gone, and {_named(found)} did not leave {run_dir} within "
                f"{limit_s:.0f} s. End them (ps shows paceline-w{found[0]}), or use another run_dir."
            )
        time.sleep(LOOK_S)  # a lock that is free tells nobody


def _held(run_dir: Path, span: tuple[int, int]) -> Iterator[int]:
    attempts = [path for path in run_dir.glob("attempt_*") if path.name.removeprefix("attempt_").isdecimal()]
    if not attempts:
        return
    newest = max(attempts, key=lambda path: int(path.name.removeprefix("attempt_")))
    for log in newest.glob(f"worker_*/{LOG}"):
        try:
            fd = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another user's, or on its way out: who cannot read there will hear of it soon
            continue
        try:
            if _is_locked(fd, span):
                yield int(log.parent.name.removeprefix("worker_"))
        finally:
            os.close(fd)


def _is_locked(fd: int, span: tuple[int, int]) -> bool:
    """Whether anybody else would keep us from having these bytes for ourselves."""
    if sys.platform != "linux":
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, span))
    except OSError:  # a file system without locks
        return False
    return struct.unpack(FLOCK, found)[0] != fcntl.F_UNLCK


def _flock(kind: int, span: tuple[int, int]) -> bytes:
    """A lock of some bytes, as fcntl(2) reads it; they need not be there."""
    return struct.pack(FLOCK, kind, os.SEEK_SET, *span, 0)


def _own_byte() -> tuple[int, int]:
    """Where in a log, and how far, the workers of this host lock it."""
    return zlib.crc32(socket.gethostname().encode()), 1


def _named(ranks: list[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
