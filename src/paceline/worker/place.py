"""A worker's place among the others: how it reaches them, and the group that it is in.

A run of a fixed number of replicas has one group, over torch's default process group. An elastic run has one for each
generation of its membership.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta

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
from paceline.worker.agreement import Agreement, Elastic, Holder
from paceline.worker.axes import Axes, axes_of, unsplit
from paceline.worker.device import backend_for
from paceline.worker.notice import Notice
from paceline.worker.orders import Orders
from paceline.worker.prelude import Prelude

__all__ = ["Arrival", "Place", "placed"]

MEETING_S = 20.0  # for those who were told to form at once
BACKSTOP_S = 15.0  # beyond Job.timeout_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a worker is made of, beside its plan."""

    group: WorkerGroup
    agreement: Agreement
    prelude: Prelude
    shared: dist.Store  # of the whole run
    attach: Callable[[Holder], None]  # to be called with who has the run's state, once there is one
    ring: Ring  # where this worker says what it does
    axes: Axes  # its groups inside its replica, and across the replicas


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """What a worker comes with, on its way to its place."""

    assignment: Assignment
    job: Job
    plan: Plan  # resolved
    device: torch.device
    ring: Ring
    store: dist.Store | None = None  # of a world that somebody else started
    notice: Notice | None = None  # in such a world: hears whether this worker is asked to leave
    note: Callable[[str], None]  # tells the user a sentence


@contextlib.contextmanager
def placed(arrival: Arrival) -> Iterator[Place]:
    """Reach the others. Raises PlanError where the plan is elastic and nobody is there who could replace a worker."""
    assignment, plan, store = arrival.assignment, arrival.plan, arrival.store
    is_elastic = plan.layout.is_elastic
    channel = Channel.inherited(assignment.channel_fd) if store is None and assignment.channel_fd >= 0 else None
    if store is None and channel is None and assignment.workers > 1:
        raise LaunchError(f"worker {assignment.rank} of {assignment.workers} was given no way to reach the others")
    if is_elastic:
        _refuse_where_fixed(plan, arrival.job, arrival.device, has_supervisor=channel is not None)
    if assignment.workers > 1 or is_elastic:
        environment.set_gloo_interface(_interface_of(assignment.address))
    if channel is None:
        with _fixed(arrival, store or dist.HashStore(), None) as place:
            yield place
        return
    # The supervisor ends a hang after timeout_s, and can say more about it than who waits.
    job = dataclasses.replace(arrival.job, timeout_s=arrival.job.timeout_s + BACKSTOP_S)
    arrival = dataclasses.replace(arrival, job=job)
    orders = Orders(channel, assignment.rank)
    own_process = job.launcher != "inline" and threading.current_thread() is threading.main_thread()
    orders.begin(hears_sigterm=own_process)
    with contextlib.closing(channel):
        if is_elastic:
            with _elastic(arrival, channel, orders) as place:
                yield place
        else:
            with _fixed(arrival, BoardStore(channel, timeout_s=job.timeout_s), orders) as place:
                yield place


@contextlib.contextmanager
def _fixed(arrival: Arrival, shared: dist.Store, orders: Orders | None) -> Iterator[Place]:
    """Join torch's default process group, so that code which calls torch.distributed itself works too."""
    assignment, device, ring, timeout_s = arrival.assignment, arrival.device, arrival.ring, arrival.job.timeout_s
    ring.join(name_of(0), range(assignment.workers), is_main=True)
    meeting = ring.enter("meeting", "the workers find each other")
    ring.wait(meeting)
    dist.init_process_group(
        backend_for(device),
        store=shared,
        rank=assignment.rank,
        world_size=assignment.workers,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    group: WorkerGroup = Alone()
    if assignment.workers > 1:
        group = over_torch = Group(_world(), device=device)
        if assignment.hosts == 1 and device.type == "cpu":
            group, reason = share(over_torch, timeout_s=timeout_s)
            if reason is not None and assignment.rank == 0:
                arrival.note(f"workers sum gradients over the loopback network, which is slower: {reason}")
    ring.leave()
    members = Members(group, generation=0, ranks=tuple(range(assignment.workers)), ring=ring)
    agreement = Agreement(members, rank=assignment.rank, orders=orders, notice=arrival.notice, timeout_s=timeout_s)
    axes = axes_of(
        arrival.plan.layout,
        members,
        worker_rank=assignment.rank,
        device=device,
        ring=ring,
        timeout_s=timeout_s,
        is_one_host=assignment.hosts == 1,
        streams=arrival.plan.compute.offload == "all",
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
def _elastic(arrival: Arrival, channel: Channel, orders: Orders) -> Iterator[Place]:
    """Join the first generation, or, where this worker comes later, none yet."""
    assignment, layout, ring, timeout_s = arrival.assignment, arrival.plan.layout, arrival.ring, arrival.job.timeout_s
    replicas = layout.replicas
    least, most = replicas if isinstance(replicas, tuple) else (assignment.workers, assignment.workers)
    shared = BoardStore(channel, timeout_s=timeout_s)
    members = Members(None, generation=-1, ring=ring)
    agreement = Agreement(
        members,
        rank=assignment.rank,
        orders=orders,
        timeout_s=timeout_s,
        elastic=Elastic(build=functools.partial(_generation, arrival, channel, orders)),
    )
    orders.tell("elastic", least=least, most=most, workers_each=layout.workers_each)
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


def _generation(arrival: Arrival, channel: Channel, orders: Orders, form: Form, is_hurry: bool) -> WorkerGroup:
    """The group of a generation: its members meet through the board. Disrupted where it is over already."""
    assignment, timeout_s = arrival.assignment, arrival.job.timeout_s
    arrival.ring.join(name_of(form.generation), form.members, is_main=True)
    if len(form.members) == 1:
        return Alone()

    deadline = time.monotonic() + (MEETING_S if is_hurry else timeout_s)

    def check_meeting() -> None:
        orders.check_newest(form.generation)
        if time.monotonic() > deadline:
            raise Disrupted("the workers could not all meet in time")

    def check() -> None:
        orders.check(form.generation)

    prefix = f"paceline/generation_{form.generation}/"
    store = BoardStore(channel, timeout_s=timeout_s, prefix=prefix, check_wait=check_meeting)
    backend = assemble(
        store,
        index=form.members.index(assignment.rank),
        size=len(form.members),
        timeout_s=timeout_s,
        check=check_meeting,
    )
    group = GenerationGroup(backend, device=arrival.device, check=check, timeout_s=timeout_s)
    if form.is_spread if form.generation > 0 else assignment.hosts > 1:
        return group
    return share(group, timeout_s=timeout_s, is_lost=check)[0]


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
