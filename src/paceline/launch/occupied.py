"""Workers that are still at work in a run's directory after their supervisor has gone: the next start waits for them.

Each worker holds a lock on its own log for as long as it lives, however it ends; whoever starts the run again looks
whether the locks of the newest attempt are free. The kernel keeps the account: nothing has to be cleaned up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import LaunchError

__all__ = ["occupants", "occupy", "wait_until_free"]

LOG = "stdout.log"  # every worker has one, from its first moment
LOOK_S = 0.05


def occupy(worker_dir: Path) -> None:
    """Hold the lock of this worker until this process ends. Its log is there already."""
    fd = os.open(worker_dir / LOG, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks: there nobody can be waited for
        fcntl.flock(fd, fcntl.LOCK_SH)


def occupants(run_dir: Path) -> list[int]:
    """Ranks of the newest attempt's workers on this host that have not ended."""
    return sorted(_held(run_dir))


def wait_until_free(run_dir: Path, *, limit_s: float, say: Callable[[str], None]) -> None:
    """Return when no worker of an earlier start is at work in this directory; `say` tells the user of a wait.

    Raises LaunchError after `limit_s` seconds.
    """
    if not (found := occupants(run_dir)):
        return
    say(f"the supervisor of the start before has gone: waiting for {_named(found)}, to save and leave")
    deadline = time.monotonic() + limit_s
    while found := occupants(run_dir):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"The supervisor of the start before has gone, and {_named(found)} did not leave {run_dir} within "
                f"{limit_s:.0f} s. End them (ps shows paceline-w{found[0]}), or use another run_dir."
            )
        time.sleep(LOOK_S)  # a lock that is free tells nobody


def _held(run_dir: Path) -> Iterator[int]:
    attempts = [path for path in run_dir.glob("attempt_*") if path.name.removeprefix("attempt_").isdecimal()]
    if not attempts:
        return
    newest = max(attempts, key=lambda path: int(path.name.removeprefix("attempt_")))
    for log in newest.glob(f"worker_*/{LOG}"):
        try:
            fd = os.open(log, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or on its way out: who cannot write there will hear of it soon
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield int(log.parent.name.removeprefix("worker_"))
        except OSError:  # a file system without locks
            continue
        finally:
            os.close(fd)


def _named(ranks: list[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
