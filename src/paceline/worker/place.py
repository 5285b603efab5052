"""A worker's place among the others: how it reaches them, and the group that it is in.

A run of a fixed number of replicas has one group, over torch's default process group. An elastic run has one for each
generation of its membership.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline import environment
from paceline.comm.channel import Channel
from paceline.comm.generation import GenerationGroup, Members, assemble, name_of
from paceline.comm.group import Alone, Disrupted, Group, WorkerGroup
from paceline.comm.ring import Ring
from paceline.comm.shared import share
from paceline.comm.store import BoardStore
from paceline.elastic.notices import Form
from paceline.errors import LaunchError, PlanError
from paceline.plan import Plan
from paceline.plan.job import Assignment, Job
from paceline.worker.agreement import Agreement, Elastic
from paceline.worker.axes import Axes, axes_of, unsplit
from paceline.worker.device import backend_for
from paceline.worker.orders import Orders
from paceline.worker.prelude import Prelude

if TYPE_CHECKING:
    from paceline.worker.worker import Worker

__all__ = ["Place", "placed"]

MEETING_S = 20.0  # for those who were told to form at once
BACKSTOP_S = 15.0  # a supervisor ends a hang after Job.timeout_s, and can say more about it than who waits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a worker is made of, beside its plan."""

    group: WorkerGroup
    agreement: Agreement
    prelude: Prelude
    shared: dist.Store  # of the whole run
    attach: Callable[[Worker], None]  # to be called with the worker, once it is made
    ring: Ring  # where this worker says what it does
    axes: Axes  # its groups inside its replica, and across the replicas


@contextlib.contextmanager
def placed(
    assignment: Assignment,
    job: Job,
    plan: Plan,
    device: torch.device,
    store: dist.Store | None,
    note: Callable[[str], None],
    ring: Ring,
) -> Iterator[Place]:
    """Reach the others; `store`, where given, is that of a world that somebody else started.

    Raises PlanError where the plan is elastic and nobody is there who could replace a worker.
    """
    channel = Channel.inherited(assignment.channel_fd) if store is None and assignment.channel_fd >= 0 else None
    if store is None and channel is None and assignment.workers > 1:
        raise LaunchError(f"worker {assignment.rank} of {assignment.workers} was given no way to reach the others")
    if plan.layout.is_elastic:
        _refuse_where_fixed(plan, job, device, has_supervisor=channel is not None)
    if assignment.workers > 1 or plan.layout.is_elastic:
        environment.set_gloo_interface(_interface_of(assignment.address))
    orders = None
    if channel is not None:
        job = dataclasses.replace(job, timeout_s=job.timeout_s + BACKSTOP_S)
        orders = Orders(channel, assignment.rank)
        own_process = job.launcher != "inline" and threading.current_thread() is threading.main_thread()
        orders.begin(hears_sigterm=own_process)
    make = _elastic if plan.layout.is_elastic and channel is not None else _fixed
    with contextlib.ExitStack() as stack:
        if channel is not None:
            stack.callback(channel.close)
        yield stack.enter_context(make(assignment, job, plan, device, store, channel, orders, note, ring))


@contextlib.contextmanager
def _fixed(
    assignment: Assignment,
    job: Job,
    plan: Plan,
    device: torch.device,
    store: dist.Store | None,
    channel: Channel | None,
    orders: Orders | None,
    note: Callable[[str], None],
    ring: Ring,
) -> Iterator[Place]:
    """Join torch's default process group, so that code which calls torch.distributed itself works too."""
    if store is None and channel is not None:
        store = BoardStore(channel, timeout_s=job.timeout_s)
    shared = store or dist.HashStore()
    ring.join(name_of(0), range(assignment.workers), is_main=True)
    meeting = ring.enter("meeting", "the workers find each other")
    ring.wait(meeting)
    dist.init_process_group(
        backend_for(device),
        store=shared,
        rank=assignment.rank,
        world_size=assignment.workers,
        timeout=timedelta(seconds=job.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    group: WorkerGroup = Alone()
    if assignment.workers > 1:
        group = over_torch = Group(_world(), device=device)
        if assignment.hosts == 1 and device.type == "cpu":
            group, reason = share(over_torch, timeout_s=job.timeout_s)
            if reason is not None and assignment.rank == 0:
                note(f"workers sum gradients over the loopback network, which is slower: {reason}")
    ring.leave()
    members = Members(group, generation=0, ring=ring)
    agreement = Agreement(members, rank=assignment.rank, orders=orders, timeout_s=job.timeout_s)
    axes = axes_of(
        plan.layout,
        members,
        worker_rank=assignment.rank,
        device=device,
        ring=ring,
        timeout_s=job.timeout_s,
        is_one_host=assignment.hosts == 1,
    )
    try:
        yield Place(
            group=members,
            agreement=agreement,
            prelude=Prelude(None),
            shared=shared,
            attach=agreement.attach,
            ring=ring,
            axes=axes,
        )
        axes.close()
        # Where something went wrong a transfer may be pending, and to destroy its group would wait for it.
        members.close()
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()


@contextlib.contextmanager
def _elastic(
    assignment: Assignment,
    job: Job,
    plan: Plan,
    device: torch.device,
    store: dist.Store | None,
    channel: Channel | None,
    orders: Orders | None,
    note: Callable[[str], None],
    ring: Ring,
) -> Iterator[Place]:
    """Join the first generation, or, where this worker comes later, none yet."""
    if channel is None or orders is None:
        raise LaunchError("an elastic run needs a supervisor")
    replicas = plan.layout.replicas
    least, most = replicas if isinstance(replicas, tuple) else (assignment.workers, assignment.workers)

    def build(form: Form, is_hurry: bool) -> WorkerGroup:
        ring.join(name_of(form.generation), form.members, is_main=True)
        if len(form.members) == 1:
            return Alone()

        deadline = time.monotonic() + (MEETING_S if is_hurry else job.timeout_s)

        def check_meeting() -> None:
            orders.check_newest(form.generation)
            if time.monotonic() > deadline:
                raise Disrupted("the workers could not all meet in time")

        store = BoardStore(
            channel,
            timeout_s=job.timeout_s,
            prefix=f"paceline/generation_{form.generation}/",
            check_wait=check_meeting,
        )
        backend = assemble(
            store,
            index=form.members.index(assignment.rank),
            size=len(form.members),
            timeout_s=job.timeout_s,
            check=check_meeting,
        )

        def check() -> None:
            orders.check(form.generation)

        group = GenerationGroup(backend, device=device, check=check, timeout_s=job.timeout_s)
        if assignment.hosts > 1:
            return group
        return share(group, timeout_s=job.timeout_s, is_lost=check)[0]

    shared = BoardStore(channel, timeout_s=job.timeout_s)
    members = Members(None, generation=-1, ring=ring)
    agreement = Agreement(
        members, rank=assignment.rank, orders=orders, timeout_s=job.timeout_s, elastic=Elastic(build=build)
    )
    orders.tell("elastic", least=least, most=most, workers_each=plan.layout.workers_each)
    if not assignment.joins:
        agreement.begin(tuple(range(assignment.workers)))
    yield Place(
        group=members,
        agreement=agreement,
        prelude=Prelude(shared),
        shared=shared,
        attach=agreement.attach,
        ring=ring,
        axes=unsplit(members),
    )
    members.close()


def _refuse_where_fixed(plan: Plan, job: Job, device: torch.device, *, has_supervisor: bool) -> None:
    """Raise PlanError where workers cannot come and go."""
    shown = f"Layout(replicas={plan.layout.replicas})"
    if not has_supervisor or job.launcher == "inline":
        who = "launcher='inline' keeps" if job.launcher == "inline" else "whoever started these workers keeps"
        raise PlanError(
            f"{shown} lets workers come and go, but {who} their number fixed. Use Layout(replicas=n), or start the "
            "workers with paceline run (on every host, where there are several)."
        )
    if device.type != "cpu":
        raise PlanError(
            f"{shown} lets workers come and go, which is built for the CPU so far, not for {device.type}. Use "
            "Layout(replicas=n), or device='cpu'."
        )


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
