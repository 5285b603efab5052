"""`hvd.elastic.run`: call a training function again until it returns, each time from the last commit."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.compat.horovod import membership
from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.basics import init, shutdown
from paceline.compat.horovod.commit_file import CommitFile
from paceline.compat.horovod.elastic_state import State, TorchState
from paceline.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from paceline.errors import CheckpointError
from paceline.worker.program_worker import program_place

__all__ = ["run", "run_fn"]

T = TypeVar("T")
MAX_RESETS = 3  # in a row, without a commit or a lost worker between them

_calls: Counter[str] = Counter()  # of elastic functions, by their names, in this process


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls `func(state, ...)` until it returns.

    First all workers get the state of rank 0. After HorovodInternalError the state goes back to the last commit, and
    after HostsUpdatedInterrupt it stays; then all begin again, in a session of the workers that are present.

    Where a run of a fixed number of workers has lost one, the error is raised: the run starts all workers again, and
    they go on from the last commit. Each function has commits of its own, by its name, and does not begin from those of
    another call of it. Raises CleanExit where an elastic run goes on without this worker, and where all were told to
    leave; CheckpointError where the state was lost with all workers that had it; and RunFileError where a commit could
    not be written.
    """
    return run_fn(func, reset_session)


def run_fn(func: Callable[..., T], reset: Callable[[], None]) -> Callable[..., T]:
    """As `run`; `reset()` begins again."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        if isinstance(state, TorchState):
            program_place().allow_restart()
            state.keep_in(_commit_file(func))
        skips_sync, resets, before = False, 0, _progress(state)
        while True:
            try:
                if not (skips_sync and membership.may_skip_sync()):
                    _sync(state)
                value = func(state, *args, **kwargs)
            except HorovodInternalError:
                resets = resets + 1 if _progress(state) == before else 1
                before = _progress(state)
                if resets > MAX_RESETS:
                    raise
                state.restore()
                skips_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skips_sync = interrupt.skip_sync
            else:
                if isinstance(state, TorchState):
                    state.forget_file()
                return value
            if isinstance(state, TorchState):
                state.settle_file()  # another worker may write it from now on
            membership.plan_sync(not skips_sync)
            reset()
            state.on_reset()

    return wrapper


def _sync(state: State) -> None:
    """Give all workers the state of rank 0. Raises CheckpointError where that is lost."""
    if membership.has_newcomers_only() and sessions.current_session().rank == 0 and not state.finds_commit():
        raise CheckpointError(
            "All workers that had the state of this program were lost before a newcomer had got it, and the run's "
            "directory holds no commit to begin from. Start the run again; with hvd.elastic.TorchState, and a first "
            "state.commit() early on, it goes on from the last commit."
        )
    state.sync()
    membership.has_state()


def _progress(state: State) -> tuple[int, int]:
    """What grows where it is of use to begin again."""
    return state.commit_count, membership.number_of_changes()


def _commit_file(func: Callable[..., Any]) -> CommitFile:
    """Return the file of a call of this function that begins."""
    name = f"{func.__module__}.{getattr(func, '__qualname__', type(func).__qualname__)}"
    _calls[name] += 1
    assignment = program_place().assignment
    return CommitFile(
        Path(assignment.run_dir), name, call=_calls[name], command=os.getppid(), is_fresh=assignment.job.fresh
    )


def reset_session() -> None:
    """Close the session and open the next one."""
    shutdown()
    init()
