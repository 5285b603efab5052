"""From an assignment to a live worker and back: join the others, run the user's function, end the run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from paceline import clock, environment
from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.messages.json_channel import ChannelClosed
from paceline.end_mark import mark_end
from paceline.errors import PlanError, SyncError
from paceline.events import Note, Warned, WorkerStarted
from paceline.parallel import partial_parameter
from paceline.parallel.absent_files import keeping_parts
from paceline.parallel.float8 import require_float8
from paceline.parallel.fully_sharded import sharded_numbers
from paceline.parallel.offload.memory import refuse_useless
from paceline.plan import Plan
from paceline.plan.job import Assignment, Job
from paceline.worker.build import build_worker
from paceline.worker.data import random_state
from paceline.worker.lifecycle import WorkerLifecycle
from paceline.worker.membership.clean_exit import CleanExit
from paceline.worker.membership.join_context import JoinContext
from paceline.worker.membership.join_run import WorkerContext, join_run
from paceline.worker.membership.preemption import PreemptionNotice, TerminatedBySignal
from paceline.worker.record.error_report import is_peer_failure, write_error
from paceline.worker.record.flight_recording import recording_flight
from paceline.worker.record.parity_capture import ParityCapture
from paceline.worker.record.run_files import RunFiles
from paceline.worker.topology.device import choose_device, peak_memory_bytes, why_gpus_are_idle
from paceline.worker.worker import Worker

__all__ = [
    "JoinedWorker",
    "being_worker",
    "explaining_losses",
    "has_run",
    "merge_job",
    "present_worker",
    "run_worker",
    "working_alone",
]

T = TypeVar("T")

FAULTS = "paceline.testing.injection"  # by name: it is above this room, and only a drill has use of it
CALLBACK = "Got the following error when running the callback: DistBackendError: "  # what torch puts before an error
LEFT = "paceline/left/{}"  # in the store: the step after which a worker's function returned


_workers_run: set[str] = set()  # directories of workers that this process has been: a script must not call us twice


_present: list[Worker] = []  # of this process: none or one


def present_worker() -> Worker | None:
    """The worker that this process is now; None before it has joined its run, and after that has ended."""
    return _present[-1] if _present else None


def has_run(assignment: Assignment) -> bool:
    """Whether this process has been this worker already."""
    return assignment.worker_dir in _workers_run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JoinedWorker:
    """A worker that has joined its run, and what its session needs of it."""

    worker: Worker
    lifecycle: WorkerLifecycle
    place: WorkerContext
    left_what: str = "the training function"  # that a worker leaves at its end


def run_worker(
    function: Callable[[Worker], T],
    assignment: Assignment,
    *,
    plan: Plan | None = None,
    fields: Mapping[str, Any] | None = None,
    store: dist.Store | None = None,
    notice: PreemptionNotice | None = None,
) -> T:
    """Be the worker that the assignment says: run `function(worker)` and return its value.

    `plan` and `fields` (of Job) are what the script itself said; the command's word wins. `store` and `notice` are
    those of a world that another launcher started. An error is written to error.json, with the step, before the raise.
    Raises CleanExit, with the exit status, where all have saved and this worker is to end.
    """
    job = merge_job(assignment, fields or {})
    files = RunFiles(assignment, job)
    if files.capture is not None and files.capture.wants_bare_loop:
        return _run_bare_loop(function, assignment, plan, files, job)
    leaving: SystemExit | None = None
    value = cast("T", None)  # what sys.exit() returns
    with being_worker(
        assignment, files, function, job=job, plan=plan, fields=fields or {}, store=store, notice=notice
    ) as joined:
        try:
            value = _call_function(function, joined)
        except SystemExit as stop:
            if stop.code or isinstance(stop, CleanExit):
                raise
            leaving = stop  # sys.exit() or sys.exit(0): an end like any other
    if leaving is not None:
        raise leaving
    return value


@contextlib.contextmanager
def being_worker(
    assignment: Assignment,
    files: RunFiles,
    function: Callable[..., object],
    *,
    job: Job,
    plan: Plan | None,
    fields: Mapping[str, Any],
    store: dist.Store | None,
    notice: PreemptionNotice | None,
    trains_itself: bool = False,
    ends_alone: bool = False,
) -> Iterator[JoinedWorker]:
    """Be the worker of the assignment while entered (see `run_worker`). `function` is the user's, for messages.

    `trains_itself`: the program has a loop and process groups of its own. `ends_alone`: its workers end one by one, as
    they come to their ends, and SIGTERM is left to it.
    """
    _workers_run.add(assignment.worker_dir)
    lifecycle: WorkerLifecycle | None = None
    try:
        resolved, device = _settled(assignment, job, plan)
        with contextlib.ExitStack() as stack:
            recorder = stack.enter_context(recording_flight(assignment, job, function, layout=resolved.layout))
            arrival = JoinContext(
                assignment=assignment,
                job=job,
                plan=resolved,
                device=device,
                recorder=recorder,
                store=store,
                notice=notice,
                tell=files.emit,
                trains_itself=trains_itself,
                ends_alone=ends_alone,
            )
            place = stack.enter_context(join_run(arrival))
            _inject_faults(assignment, recorder, num_alike=resolved.layout.tensor)
            if not trains_itself:  # else the program has seeded before it joined, or wants no seed
                random_state.seed_all(resolved.batch.seed, 3)
            worker, lifecycle = build_worker(
                rank=assignment.rank,
                plan=resolved,
                place=place,
                device=device,
                files=files,
                host=assignment.host,
                timeout_s=job.timeout_s,
            )
            stack.push(lifecycle.ask_for_restart)
            stack.enter_context(keeping_parts(not trains_itself and _keeps_parts(resolved, device)))
            # A program that trains itself uses nothing of the plan but the number of workers.
            shown = Plan(layout=resolved.layout) if trains_itself else lifecycle.plan
            files.emit(_started(assignment, shown, device=worker.device, step=worker.step))
            _warn_of_idle_gpus(assignment, job, files)
            _note_unused_values(assignment, files, plan, fields)
            _present.append(worker)
            try:
                yield JoinedWorker(
                    worker=worker,
                    lifecycle=lifecycle,
                    place=place,
                    left_what="the program" if ends_alone else "the training function",
                )
            except CleanExit:
                lifecycle.leave()
                raise
            finally:
                _present.remove(worker)
            with contextlib.suppress(ChannelClosed):  # the supervisor is lost: what is left is to save
                place.shared.set(LEFT.format(worker.rank), str(worker.step))
            if ends_alone:
                lifecycle.leave()
            else:
                lifecycle.end()
    except CleanExit:
        mark_end()
        raise  # in good order: its record is closed
    except BaseException as error:
        if not isinstance(error, TerminatedBySignal):  # its cause is outside of the worker
            write_error(error, assignment, step=lifecycle.step if lifecycle else 0)
        files.give_up()
        if lifecycle is not None:
            lifecycle.abandon()
        files.close()
        raise
    mark_end()


def _keeps_parts(plan: Plan, device: torch.device) -> bool:
    """Whether models are split before any worker needs one as a whole. On a device they move there before, slices of
    tokens are tried on copies of the whole model, and the reference converts all of it."""
    layout = plan.layout
    is_split = layout.shard * layout.tensor * layout.stages * layout.experts > 1
    return is_split and layout.context == 1 and device.type == "cpu" and plan.compute.precision != "fp64"


@contextlib.contextmanager
def working_alone(assignment: Assignment) -> Iterator[torch.device]:
    """Be the worker that the assignment says without joining the others, for a program that only looks at the hosts of
    a run. Yields its device; its record is that of a worker that has ended well, unless an error passes.
    """
    job = assignment.job
    files = RunFiles(assignment, job)
    _workers_run.add(assignment.worker_dir)
    try:
        resolved, device = _settled(assignment, job, None)
        files.emit(_started(assignment, resolved, device=device, step=0))
        yield device
    except BaseException as error:
        write_error(error, assignment, step=0)
        files.give_up()
        files.close()
        raise
    files.finish(0, peak_memory_bytes=peak_memory_bytes(device), state_bytes=0)
    mark_end()


def _run_bare_loop(
    function: Callable[[Worker], T], assignment: Assignment, plan: Plan | None, files: RunFiles, job: Job
) -> T:
    """Run the function with a plain torch loop in place of a worker, for `paceline parity --bare`."""
    from paceline.worker.bare.bare_worker import BareWorker  # no other run has use of it

    _workers_run.add(assignment.worker_dir)
    try:
        resolved, device = _settled(assignment, job, plan)
        random_state.seed_all(resolved.batch.seed, 3)
        capture = cast("ParityCapture", files.capture)
        worker = BareWorker(resolved, device, capture=capture, emit=files.emit, max_steps=job.max_steps)
        files.emit(_started(assignment, resolved, device=worker.device, step=worker.step))
        value = function(cast("Worker", worker))
        worker.end()
    except BaseException as error:
        if not isinstance(error, TerminatedBySignal):
            write_error(error, assignment, step=0)
        files.give_up()
        files.close()
        raise
    files.finish(worker.step, peak_memory_bytes=peak_memory_bytes(device), state_bytes=0)
    mark_end()
    return value


def _settled(assignment: Assignment, job: Job, plan: Plan | None) -> tuple[Plan, torch.device]:
    """Return the plan and the device of `_checked`, and take this worker's share of the cores."""
    resolved, device = _checked(assignment.plan.over(plan), assignment, job)
    torch.set_num_threads(job.threads or environment.default_threads(assignment.local_workers))
    return resolved, device


def _checked(plan: Plan, assignment: Assignment, job: Job) -> tuple[Plan, torch.device]:
    """Return the plan with nothing left open, and this worker's device; raise PlanError where they cannot work."""
    resolved = plan.resolve(assignment.workers)
    resolved.require(workers=assignment.workers)
    _refuse_capture(resolved, job)
    device = choose_device(job.device, local_rank=assignment.local_rank, local_workers=assignment.local_workers)
    refuse_useless(resolved.compute, device)
    require_float8(resolved.compute, device)
    return resolved, device


def _warn_of_idle_gpus(assignment: Assignment, job: Job, files: RunFiles) -> None:
    idle_gpus = why_gpus_are_idle(job.device, local_workers=assignment.local_workers)
    if idle_gpus and assignment.local_rank == 0:
        files.emit(Warned(text=idle_gpus))


def _refuse_capture(plan: Plan, job: Job) -> None:
    """Raise PlanError where numbers are to be compared with those of one process that are others by intention."""
    if job.capture_dir is not None and plan.is_local and plan.layout.replicas != 1:
        raise PlanError(
            f"paceline parity compares each step with that of one process, and with {plan.sync!r} the replicas take "
            "steps by themselves: their numbers are others. Compare layouts with workers for one replica, or "
            "sync=AllReduce(); compare local SGD by its held-out loss."
        )
    if job.capture_dir is not None and plan.is_asynchronous and plan.layout.replicas != 1:
        raise PlanError(
            f"paceline parity compares each step with that of one process, and with {plan.sync!r} updates are made of "
            "what comes first: their numbers are others. Compare with staleness=0 and drop=0, or by the held-out loss."
        )


def merge_job(assignment: Assignment, fields: Mapping[str, Any]) -> Job:
    """The assignment's job, with the script's fields where the command did not set them."""
    free = {name: value for name, value in fields.items() if name not in assignment.given and name not in PLACE_FIELDS}
    if free.get("remote_dir", assignment.job.remote_dir) != assignment.job.remote_dir:
        raise PlanError(
            f"The script says remote_dir={free['remote_dir']!r}, which is to be known before workers start: give it to "
            f"the command, --remote-dir {free['remote_dir']}, or start the script with `python`."
        )
    return dataclasses.replace(assignment.job, **free)


PLACE_FIELDS = (
    "program",
    "args",
    "workers",
    "launcher",
    "hosts",
    "head",
    "token_file",
    "private_network",
    "run_dir",
)  # decided before a worker exists


def _inject_faults(assignment: Assignment, recorder: FlightRecorder, *, num_alike: int) -> None:
    """In a drill: have the faults of its programme come. `num_alike` neighbours have the same outputs."""
    programme = environment.fault_programme()
    if programme is not None:
        importlib.import_module(FAULTS).install_faults(
            programme, worker_rank=assignment.rank, recorder=recorder, num_alike=num_alike
        )


def _note_unused_values(assignment: Assignment, files: RunFiles, plan: Plan | None, fields: Mapping[str, Any]) -> None:
    if assignment.rank != 0:
        return
    idle = [
        f"{name}={fields[name]!r}"
        for name in ("workers", "run_dir")
        if fields.get(name) is not None and not _is_same(name, fields[name], getattr(assignment.job, name))
    ]
    idle += [
        f"{name}={value!r}"
        for name, value in fields.items()
        if name in assignment.given and not _is_same(name, value, getattr(assignment.job, name))
    ]
    if plan is not None and (replaced := assignment.plan.replaced(plan)):
        files.emit(Note(text=replaced))
    if idle:
        files.emit(
            Note(
                text=f"the script says {', '.join(dict.fromkeys(idle))}; the command, or the launcher, "
                "says otherwise, and that counts"
            )
        )


def _is_same(name: str, said: Any, counts: Any) -> bool:
    """Whether two values of a Job's field mean the same; directories may be written in several ways."""
    if name == "run_dir" and said is not None and counts is not None:
        return Path(said).resolve() == Path(counts).resolve()
    return said == counts


def _started(assignment: Assignment, plan: Plan, *, device: torch.device, step: int) -> WorkerStarted:
    return WorkerStarted(
        rank=assignment.rank,
        workers=assignment.workers,
        host=assignment.host,
        pid=os.getpid(),
        device=str(device),
        startup_s=round(clock.now() - assignment.command_started, 3),
        plan=str(plan),
        resumed_from_step=step,
    )


def _without_callback(error: Exception) -> dist.DistBackendError | None:
    """The error of a collective that reached the program through C++ code, which has put its own frames into the text;
    None for other errors."""
    said, is_ours, rest = str(error).partition(CALLBACK)
    if type(error) is not RuntimeError or said or not is_ours:
        return None
    return dist.DistBackendError(rest.partition("\n")[0])


def _call_function(function: Callable[[Worker], T], joined: JoinedWorker) -> T:
    """Call the user's function; see `explaining_losses`."""
    with explaining_losses(joined):
        return function(joined.worker)


@contextlib.contextmanager
def explaining_losses(joined: JoinedWorker) -> Iterator[None]:
    """Where a peer is lost in the user's code, look whether that one has left it too early.

    To leave early is no error of the worker that leaves, and the others know only that a connection was closed.
    """
    lifecycle, place = joined.lifecycle, joined.place
    try:
        yield
    except (SyncError, RuntimeError, ConnectionError) as error:
        if (said := sharded_numbers.explained(error) or partial_parameter.explained(error)) is not None:
            raise said from error
        if lifecycle.blames_server(error):
            raise  # where replicas do not wait for each other, some may have left before
        if is_peer_failure(error):
            place.consensus.await_end()
        may_be, store = isinstance(error, SyncError) or is_peer_failure(error), place.shared
        ranks = place.consensus.present or place.consensus.ranks  # members may have been lost
        left: dict[int, str] = {}  # rank -> the step after which it left
        with contextlib.suppress(ChannelClosed):  # the supervisor is lost: only the error can be reported
            names = {rank: LEFT.format(rank) for rank in ranks if may_be}
            left = {rank: store.get(name).decode() for rank, name in names.items() if store.check([name])}
        if not left:
            if (plain := _without_callback(error)) is not None:
                raise plain.with_traceback(error.__traceback__) from None
            raise
        steps = ", ".join(dict.fromkeys(left.values()))
        raise SyncError(
            f"worker{'s' * (len(left) > 1)} {', '.join(map(str, left))} left {joined.left_what} after step {steps}, "
            "others are in it: all must take the same steps. Look for a return, break, continue or sys.exit() that "
            "only some reach"
        ).with_traceback(error.__traceback__) from None
