"""Programs that start their workers themselves, by `torch.multiprocessing.spawn(fn, args, nprocs=n)`.

Under `paceline run` the workers are there: each calls `fn` with its local rank, in its own process, in place of
starting others. That needs the same number. Where the program makes no process group, spawn is what it always was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from paceline.comm.call_site import is_user_code
from paceline.errors import PlanError
from paceline.plan.job import Assignment

__all__ = ["called_in_place", "require_own_process"]


class EndedSpawn:
    """What `spawn(..., join=False)` returns here: all has been done."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Return True: there is nothing to wait for."""
        return True


def called_in_place(spawn: Callable[..., Any], assignment: Assignment) -> Callable[..., Any]:
    """Return a `spawn` that calls the function with this worker's local rank."""

    @functools.wraps(spawn)
    def call(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *others: Any, **more: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename  # pyright: ignore[reportPrivateUsage]  # as in flight recording
        if not is_user_code(caller):
            return spawn(fn, args, nprocs, join, *others, **more)
        if nprocs != assignment.local_workers:
            remedy = f"Start it with --workers {nprocs * assignment.hosts}"
            if nprocs < 1:
                remedy = "Programs that start one for each GPU start none without GPUs: use a host that has some"
            raise PlanError(
                f"The program starts {nprocs} workers by itself (torch.multiprocessing.spawn), and this run has "
                f"{assignment.local_workers} on this host: each is to be one of them. {remedy}, or the program by "
                "python."
            )
        fn(assignment.local_rank, *args)
        return None if join else EndedSpawn()

    return call


def require_own_process(pid: int, own_pid: int) -> None:
    """Raise PlanError in a process that the worker `pid` has started."""
    if pid != own_pid:
        raise PlanError(
            "A process that this program has started makes a process group of torch. Under paceline run the workers "
            "are there already: have the program call init_process_group() itself, in each worker, and give --workers; "
            "or start it with python."
        )
