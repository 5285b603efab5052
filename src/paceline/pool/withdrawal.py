"""Takes a run out of its pool, which has it save and end; its files stay."""

from __future__ import annotations

from pathlib import Path

from paceline.pool.pool_run import PoolRun
from paceline.pool.pool_state import PoolRecord
from paceline.pool.run_control import ask_to_stop

__all__ = ["take_out"]


def take_out(run: PoolRun, *, pool: Path) -> str:
    """Take a run out of the queue. The pool that is at work asks it to end; where none is, it is asked from here.

    Returns the host on which it goes on, and has to be ended, where that cannot be asked from this one; else "".
    """
    run.remove_from(pool)
    return "" if PoolRecord.load(pool).is_alive(pool) else ask_to_stop(run)
