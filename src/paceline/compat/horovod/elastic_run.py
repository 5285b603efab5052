"""`hvd.elastic.run`: call a training function again until it returns, each time from the last commit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.compat.horovod.basics import init, shutdown
from paceline.compat.horovod.commit_file import CommitFile
from paceline.compat.horovod.elastic_state import State, TorchState
from paceline.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from paceline.worker.program_worker import program_place

__all__ = ["run", "run_fn"]

T = TypeVar("T")
MAX_RESETS = 3  # in a row, without a commit between them


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls `func(state, ...)` until it returns.

    First all workers get the state of rank 0. After HorovodInternalError the state goes back to the last commit, and
    after HostsUpdatedInterrupt it stays; then all begin again. The error is raised where a worker was lost: the run
    starts all workers again, and they go on from the last commit.
    """
    return run_fn(func, reset_session)


def run_fn(func: Callable[..., T], reset: Callable[[], None]) -> Callable[..., T]:
    """As `run`; `reset()` begins again."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        if isinstance(state, TorchState):
            program_place().allow_restart()
            state.keep_in(_commit_file())
        skips_sync, resets, commits = False, 0, state.commit_count
        while True:
            try:
                if not skips_sync:
                    state.sync()
                value = func(state, *args, **kwargs)
            except HorovodInternalError:
                resets = resets + 1 if state.commit_count == commits else 1
                commits = state.commit_count
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
            reset()
            state.on_reset()

    return wrapper


def _commit_file() -> CommitFile:
    assignment = program_place().assignment
    return CommitFile(Path(assignment.run_dir), command=os.getppid(), is_fresh=assignment.job.fresh)


def reset_session() -> None:
    """Close the session and open the next one."""
    shutdown()
    init()
