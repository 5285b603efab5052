"""The worker that a whole program is: one that trains in a loop of its own and calls no `paceline.run(train)`.

It joins the run when the program asks for it first (`hvd.init()`, `Accelerator()`, `init_process_group()`), and ends
with the program. What such a call opens stays open: the same worker is returned to every later call of the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import WorkerGroup
from paceline.errors import PlanError
from paceline.events import Event
from paceline.plan import Plan
from paceline.plan.job import Assignment, Job
from paceline.worker.membership.consensus import Consensus
from paceline.worker.membership.preemption import PreemptionNotice
from paceline.worker.record.run_files import RunFiles
from paceline.worker.session import JoinedWorker, being_worker, explaining_losses, has_run, merge_job
from paceline.worker.worker import Worker

__all__ = [
    "ProgramPlace",
    "at_program_end",
    "ending_with_program",
    "join_as_program",
    "program_place",
    "program_worker",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramPlace:
    """Where a program that has joined runs, for the packages that stand in for its framework."""

    assignment: Assignment
    job: Job
    shared: dist.Store  # of the whole run
    recorder: FlightRecorder  # of this worker
    emit: Callable[[Event], None]  # appends to this worker's events
    group: WorkerGroup  # of the run's workers that are present
    consensus: Consensus  # on who is present, where workers come and go
    allow_restart: Callable[[], None]  # its state outlives it: after the loss of a worker all may begin again


_stack = contextlib.ExitStack()
_joined: list[JoinedWorker] = []  # of this process: none or one
_places: list[ProgramPlace] = []  # likewise


def program_worker() -> Worker | None:
    """The worker that this program has joined as; None before that, and in a script whose function is the worker."""
    return _joined[0].worker if _joined else None


def program_place() -> ProgramPlace:
    """The place of the worker that this program has joined as. Raises PlanError before that."""
    if not _places:
        raise PlanError("This program has not joined a run yet: call open_worker() first.")
    return _places[0]


def at_program_end(call: Callable[[], None], *, after_error: Callable[[], None] | None = None) -> None:
    """Call something when the program has ended well, before its worker ends. All workers must ask for it.

    `after_error`: what is called in its place when an error has ended the program; it waits for no other worker.
    """

    def leave(kind: object, *_: object) -> None:
        if kind is None:
            call()
        elif after_error is not None:
            after_error()

    _stack.push(leave)


def join_as_program(
    assignment: Assignment,
    *,
    plan: Plan | None = None,
    fields: Mapping[str, Any] | None = None,
    store: dist.Store | None = None,
    notice: PreemptionNotice | None = None,
    trains_itself: bool = False,
    ends_alone: bool = False,
) -> Worker:
    """Be the worker that the assignment says, until `ending_with_program` ends; returns it. An operation of all
    workers. The parameters are those of `run_worker`. Raises PlanError where this process was that worker already.

    `trains_itself`: the program steps optimizers and calls collectives by itself, over process groups of its own. The
    run counts its steps, leaves torch's default process group to it, and lets each worker end by itself.
    `ends_alone`: the last of these alone, and SIGTERM is left to the program.
    """
    if has_run(assignment):
        raise PlanError(
            "This process was a worker of the run already, and has left it: a program joins its run once. Start the "
            "next part as a program of its own."
        )
    job = merge_job(assignment, fields or {})
    files = RunFiles(assignment, job)
    joined = _stack.enter_context(
        being_worker(
            assignment,
            files,
            join_as_program,
            job=job,
            plan=plan,
            fields=fields or {},
            store=store,
            notice=notice,
            trains_itself=trains_itself,
            ends_alone=ends_alone or trains_itself,
        )
    )
    if trains_itself:
        _stack.enter_context(joined.lifecycle.counting_steps(may_restart=job.restart_lost))
    _joined.append(joined)
    place = ProgramPlace(
        assignment=assignment,
        job=job,
        shared=joined.place.shared,
        recorder=joined.place.recorder,
        emit=files.emit,
        group=joined.place.group,
        consensus=joined.place.consensus,
        allow_restart=joined.place.consensus.allow_restart,
    )
    _places.append(place)
    _stack.enter_context(explaining_losses(joined))
    return joined.worker


@contextlib.contextmanager
def ending_with_program() -> Iterator[None]:
    """End the worker that the program joins as, if it does, when this is left: after the program's last line, or with
    the error that ended it. An operation of all workers where there is no error."""
    leaving: SystemExit | None = None
    with contextlib.ExitStack() as stack:
        stack.push(_end)
        try:
            yield
        except SystemExit as stop:
            if stop.code or not isinstance(stop.code, (int, type(None))):
                raise
            leaving = stop  # sys.exit() or sys.exit(0): an end like any other
    if leaving is not None:
        raise leaving


def _end(*error: Any) -> bool | None:
    _joined.clear()
    _places.clear()
    return _stack.__exit__(*error)
