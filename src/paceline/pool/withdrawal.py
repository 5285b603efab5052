"""Takes a run out of its pool, which has it save and end; its files stay."""

from __future__ import annotations

from pathlib import Path

from paceline.pool.pool_run import PoolRun, queued_run
from paceline.pool.pool_state import PoolRecord
from paceline.pool.run_control import ask_to_stop

__all__ = ["make_way", "take_out"]


def take_out(run: PoolRun, *, pool: Path) -> str:
    """Take a run out of the queue. The pool that is at work asks it to end; where none is, it is asked from here.

    Returns the host on which it goes on, and has to be ended, where that cannot be asked from this one; else "".
    """
    run.remove_from(pool)
    return "" if PoolRecord.load(pool).is_alive(pool) else ask_to_stop(run)


def make_way(run: PoolRun, *, pool: Path) -> None:
    """Take a run out of the queue that is over, where `run` goes on in its directory: with more epochs, for example."""
    entry, before = PoolRecord.load(pool).runs.get(run.name), queued_run(pool, run.name)
    is_same = before is not None and Path(before.run_dir).resolve() == Path(run.run_dir).resolve()
    if before is not None and is_same and entry is not None and entry.is_over:
        before.remove_from(pool)
