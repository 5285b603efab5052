"""Only one process is the pool of a folder: the folder's lock, and a number behind it.

A file server may give the lock of a host that it cannot reach to another one. Each process that becomes the pool counts
on `PoolRecord.term`. So one that comes back, and has not seen the other one's lock, sees by the number that it is over;
and what it has written meanwhile ends no later one.
"""

from __future__ import annotations

from pathlib import Path

from paceline import run_lock
from paceline.errors import PlanError
from paceline.pool.pool_state import PoolRecord

__all__ = ["hold", "require"]


def hold(pool: Path) -> bool:
    """Take the lock of the pool's folder, also again; False where another process has it.

    Raises PlanError where the disk has no locks, and OSError.
    """
    if not run_lock.hold(pool):
        return False
    if not run_lock.is_seen(pool):
        run_lock.release(pool)
        raise PlanError(
            f"{pool} lies on a disk without file locks, so two processes could take it at the same time. Use a folder "
            "on a disk that has them: a local one, NFS from version 4, or Lustre that is mounted with `flock`."
        )
    return True


def require(pool: Path, term: int, newest_term: int) -> None:
    """Raise PlanError where another process is the pool now. `newest_term`: the one on the disk. Raises OSError where
    that cannot be seen.
    """
    if newest_term > term or not run_lock.is_kept(pool):
        now = PoolRecord.load(pool)
        by = f": process {now.pid} on {now.host}" if now.term > term else ""
        raise PlanError(f"{pool} has another pool now{by}. This one ends; its runs go on.")
