"""From an assignment to a live worker and back: join the others, run the user's function, close the books."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from paceline import config, environment
from paceline.comm.channel import Channel
from paceline.comm.group import Alone, Group, WorkerGroup
from paceline.comm.store import BoardStore
from paceline.errors import LaunchError, SyncError
from paceline.events import Note, WorkerStarted
from paceline.plan import Plan
from paceline.plan.job import Assignment, Job
from paceline.worker import randomness
from paceline.worker.device import backend_for, choose_device
from paceline.worker.failure import is_echo, write_error
from paceline.worker.record import RunFiles
from paceline.worker.worker import Worker

__all__ = ["live", "merge_job", "merge_plan"]

T = TypeVar("T")

LEFT = "paceline/left/{}"  # in the store: the step after which a worker's function returned


def live(
    function: Callable[[Worker], T],
    assignment: Assignment,
    *,
    plan: Plan | None = None,
    fields: Mapping[str, Any] | None = None,
    store: dist.Store | None = None,
) -> T:
    """Be the worker that the assignment says: run `function(worker)` and return its value.

    `plan` and `fields` (of Job) are what the script itself said; the command's word wins. An error is written to
    error.json, with the step, before it is raised.
    """
    job = merge_job(assignment, fields or {})
    chosen = merge_plan(assignment, plan)
    files = RunFiles(assignment, job)
    worker: Worker | None = None
    leaving: SystemExit | None = None
    value = cast("T", None)  # what sys.exit() returns
    try:
        resolved = chosen.resolve(assignment.workers)
        resolved.require(workers=assignment.workers)
        device = choose_device(job.device, local_rank=assignment.local_rank, local_workers=assignment.local_workers)
        torch.set_num_threads(job.threads or environment.default_threads(assignment.local_workers))
        with _group(assignment, job, device, store) as (group, shared):
            randomness.seed_all(resolved.batch.seed, 3)
            worker = Worker(
                plan=resolved, group=group, device=device, files=files, host=assignment.host, timeout_s=job.timeout_s
            )
            files.emit(_started(assignment, resolved, worker))
            _say_what_is_not_used(assignment, files, plan, fields or {})
            try:
                value = _called(function, worker, shared)
            except SystemExit as stop:
                if stop.code:
                    raise
                leaving = stop  # sys.exit() or sys.exit(0): an end like any other
            shared.set(LEFT.format(worker.rank), str(worker.step))
            worker.end()
    except BaseException as error:
        write_error(error, assignment, step=worker.step if worker else 0)
        if worker is not None:
            worker.abandon()
        files.close()
        raise
    if leaving is not None:
        raise leaving
    return value


def merge_job(assignment: Assignment, fields: Mapping[str, Any]) -> Job:
    """The assignment's job, with the script's fields where the command did not set them."""
    free = {name: value for name, value in fields.items() if name not in assignment.given and name not in PLACE_FIELDS}
    return dataclasses.replace(assignment.job, **free)


def merge_plan(assignment: Assignment, plan: Plan | None) -> Plan:
    """The command's plan, or the script's, or the default, with the command's overrides."""
    chosen = Plan.parse(assignment.plan) if assignment.plan is not None else plan or Plan()
    for override in assignment.overrides:
        chosen = config.apply(chosen, override)
    return chosen


PLACE_FIELDS = (
    "program",
    "args",
    "workers",
    "launcher",
    "hosts",
    "head",
    "token_file",
    "run_dir",
)  # decided before a worker exists


def _say_what_is_not_used(
    assignment: Assignment, files: RunFiles, plan: Plan | None, fields: Mapping[str, Any]
) -> None:
    if assignment.rank != 0:
        return
    idle = [
        f"{name}={fields[name]!r}"
        for name in ("workers", "run_dir")
        if fields.get(name) not in (None, getattr(assignment.job, name))
    ]
    idle += [
        f"{name}={value!r}"
        for name, value in fields.items()
        if name in assignment.given and getattr(assignment.job, name) != value
    ]
    if plan is not None and assignment.plan is not None and Plan.parse(assignment.plan) != plan:
        idle.append("plan")
    if idle:
        files.emit(
            Note(
                text=f"the script says {', '.join(dict.fromkeys(idle))}; the command, or whoever started the workers, "
                "says otherwise, and that counts"
            )
        )


def _started(assignment: Assignment, plan: Plan, worker: Worker) -> WorkerStarted:
    return WorkerStarted(
        rank=assignment.rank,
        workers=assignment.workers,
        host=assignment.host,
        pid=os.getpid(),
        device=str(worker.device),
        startup_s=round(time.time() - assignment.command_started, 3),
        plan=str(plan),
        resumed_from_step=worker.step,
    )


def _called(function: Callable[[Worker], T], worker: Worker, store: dist.Store) -> T:
    """Call the user's function; where a peer is lost in it, look whether that one has left the function too early.

    To leave early is no error of the worker that leaves, and the others know only that a connection was closed.
    """
    try:
        return function(worker)
    except (SyncError, RuntimeError, ConnectionError) as error:
        gone = [index for index in range(worker.workers) if is_echo(error) and store.check([LEFT.format(index)])]
        if not gone:
            raise
        steps = ", ".join(dict.fromkeys(store.get(LEFT.format(index)).decode() for index in gone))
        raise SyncError(
            f"worker{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} left the training function after step {steps}, "
            "others are in it: all must take the same steps. Look for a return, break, continue or sys.exit() that "
            "only some reach"
        ).with_traceback(error.__traceback__) from None


@contextlib.contextmanager
def _group(
    assignment: Assignment, job: Job, device: torch.device, store: dist.Store | None
) -> Iterator[tuple[WorkerGroup, dist.Store]]:
    """Join torch's default process group, so that code which calls torch.distributed itself works too."""
    channel: Channel | None = None
    if store is None and assignment.channel_fd >= 0:
        channel = Channel.inherited(assignment.channel_fd)
        store = BoardStore(channel, timeout_s=job.timeout_s)
    elif store is None and assignment.workers > 1:
        raise LaunchError(f"worker {assignment.rank} of {assignment.workers} was given no way to reach the others")
    timeout = timedelta(seconds=job.timeout_s)
    if assignment.workers > 1:
        environment.set_gloo_interface(_interface_of(assignment.address))
    shared = store or dist.HashStore()
    dist.init_process_group(
        backend_for(device),
        store=shared,
        rank=assignment.rank,
        world_size=assignment.workers,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    group: WorkerGroup = Group(_world(), device=device) if assignment.workers > 1 else Alone()
    try:
        yield group, shared
        group.close()
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()
        if channel is not None:
            channel.close()


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed has no default group")
    return world


def _interface_of(address: str) -> str:
    """The name of the network interface that has `address`."""
    import psutil  # only where there is more than one worker

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise LaunchError(f"no network interface of this host has the address {address}")
