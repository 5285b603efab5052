"""`open_worker()`: have this process be a worker from now on to its end, for programs with a loop of their own.

Where Paceline has started the process, it is the worker that it was started as. Under torchrun, srun or mpirun it joins
that world. Anywhere else it is the only worker of a run of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from paceline import config, environment
from paceline.errors import PlanError
from paceline.plan import Job, Plan, read_plan
from paceline.runs.program_end import has_returned, last_error, note_exits, program_frame
from paceline.world_detection import World

if TYPE_CHECKING:
    from paceline.worker.worker import Worker

__all__ = ["open_worker"]


def open_worker(*, plan: Plan | str | None = None, ends_alone: bool = False, **fields: Any) -> Worker:
    """Return the worker that this process is; at the first call it joins the run, an operation of all workers.

    The worker ends with the process: the last line ends the run well, an error or `sys.exit(1)` as a failure. Where
    Paceline has not started the process, `raise SystemExit(1)` is known where the program's own files use that name for
    nothing but raising: Python keeps no trace of it.

    Example::

        def main():
            worker = paceline.open_worker()
            print(worker.rank, "of", worker.workers)

    :param plan: as of `paceline.run`; the command's wins.
    :param ends_alone: the program takes no common step: each worker ends by itself, and SIGTERM is left to it.
    :param fields: of `Job`, as of `paceline.run`; the command's win.
    :raises PlanError: the plan or the job cannot work, or `paceline.run` has had this process's run.
    """
    from paceline.worker.program_worker import join_as_program, program_worker

    found = program_worker()
    if found is not None:
        return found
    chosen = None if plan is None else read_plan(plan)
    wanted = config.read(Job, fields)
    if environment.is_preloading():
        raise PlanError("A module that workers import would join a run: do that in the program itself.")
    own = environment.assignment()
    if own is not None:
        return join_as_program(own, plan=chosen, fields=fields, ends_alone=ends_alone)
    if (directory := environment.run_dir()) is not None:  # of the command that goes on with a run
        fields = {**fields, "run_dir": directory, "fresh": False}
        wanted = config.read(Job, fields)
    return _join_world(wanted, chosen, fields, ends_alone=ends_alone)


def _join_world(job: Job, plan: Plan | None, fields: dict[str, Any], *, ends_alone: bool) -> Worker:
    """Join the world that another launcher has started, or one of this process alone, until the process ends."""
    from paceline.runs.join_world import joining_world
    from paceline.runs.own_script import own_script
    from paceline.worker.program_worker import ending_with_program, join_as_program

    world = environment.detect() or World(
        source="alone", worker_rank=0, workers=1, local_rank=0, local_workers=1, job_id=str(os.getpid())
    )
    script = own_script()
    stack = contextlib.ExitStack()
    program = "a program" if script is None else script.name
    place, notice = stack.enter_context(joining_world(world, job, plan, program=program))
    stack.enter_context(ending_with_program())
    worker = join_as_program(
        place.assignment, plan=plan, fields=fields, store=place.store, notice=notice, ends_alone=ends_alone
    )
    _end_at_exit(stack)
    return worker


def _end_at_exit(stack: contextlib.ExitStack) -> None:
    """Leave the contexts when this process ends, with the error that ends it; not when a child of it does."""
    owner, program = os.getpid(), program_frame()
    note_exits()

    def end() -> None:
        if os.getpid() != owner:  # a loader's process, which was forked and ends by itself
            return
        error = None if program is None or has_returned(program) else last_error()
        try:
            stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except SystemExit as stop:
            if stop.code:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(stop.code if isinstance(stop.code, int) else 1)  # at exit no exception changes the status

    # Before Python waits for threads: what `atexit` calls comes later, and may start none.
    threading._register_atexit(end)  # pyright: ignore[reportAttributeAccessIssue]
