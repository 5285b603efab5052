"""A worker's place among the others: how it reaches them, and the group that it is in.

A run of a fixed number of replicas has one group, over torch's default process group. An elastic run has one for each
generation of its membership. Where its replicas are of several workers, each replica is a world of its own to torch:
its workers' default process group has nobody else in it, and lives as long as the replica does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline import environment
from paceline.comm.algorithm_selection import AllReduceSettings, with_selected_algorithm
from paceline.comm.elastic.generation_group import ElasticGroup, GenerationGroup, connect_gloo, generation_name
from paceline.comm.elastic.lockstep_group import CrossReplicaGroup, Lockstep, LockstepGroup
from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import Disrupted, Group, SingleWorkerGroup, WorkerGroup
from paceline.comm.memory_checkpoint import MemoryCheckpoint, SnapshotSlot
from paceline.comm.messages.json_channel import Channel
from paceline.comm.rendezvous.torch_store import SupervisorStore
from paceline.comm.shared_memory.shared_group import shared_memory_unavailable, with_shared_memory
from paceline.elastic.membership_messages import MembershipView
from paceline.errors import LaunchError, PlanError, SyncError
from paceline.events import Event, Note
from paceline.plan import Gossip, ParameterServer, Plan
from paceline.plan.job import Assignment, Job
from paceline.worker.membership.consensus import CleanExit, Consensus, ElasticMembership, StateHolder
from paceline.worker.membership.coordinator_client import CoordinatorClient
from paceline.worker.membership.preemption import PreemptionNotice
from paceline.worker.membership.worker_collectives import SetupReplay
from paceline.worker.topology.device import backend_for
from paceline.worker.topology.parallel_groups import (
    ParallelGroups,
    default_group,
    parallel_groups_of,
    reduces_over_all_workers,
    replica_group_of,
    single_worker_replicas,
    spans_all_workers,
    workers_of,
)

__all__ = ["JoinContext", "WorkerContext", "join_run"]

MEETING_S = 20.0  # for those who were told to form at once
BACKSTOP_S = 15.0  # beyond Job.timeout_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContext:
    """What a worker is made of, beside its plan."""

    group: WorkerGroup
    agreement: Consensus
    prelude: SetupReplay
    shared: dist.Store  # of the whole run
    attach: Callable[[StateHolder], None]  # to be called with who has the run's state, once there is one
    recorder: FlightRecorder  # where this worker says what it does
    axes: ParallelGroups  # its groups inside its replica, and across the replicas
    link: Callable[[int], Mapping[int, Mapping[str, float]]]  # what sums among so many take, as far as it was measured
    memory_checkpoint: MemoryCheckpoint | None = (
        None  # memory that outlives this worker; None: nobody would begin again with it
    )
    address: str = "127.0.0.1"  # of this host, as the others see it
    begins_with: SnapshotSlot | None = None  # what a lost worker had at this place

    def is_first(self, rank: int) -> bool:
        """Whether the worker of this rank, which is this one, is the first: worker 0, or after its loss the next."""
        present = self.agreement.present
        return present[0] == rank if present else self.group.index == 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JoinContext:
    """What a worker comes with, on its way to its place."""

    assignment: Assignment
    job: Job
    plan: Plan  # resolved
    device: torch.device
    recorder: FlightRecorder
    store: dist.Store | None = None  # of a world that somebody else started
    notice: PreemptionNotice | None = None  # in such a world: hears whether this worker is asked to leave
    tell: Callable[[Event], None]  # says what has happened


@contextlib.contextmanager
def join_run(arrival: JoinContext) -> Iterator[WorkerContext]:
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
        with _join_fixed(arrival, store or dist.HashStore(), None) as place:
            yield place
        return
    # The supervisor ends a hang after timeout_s, and can say more about it than who waits.
    job = dataclasses.replace(arrival.job, timeout_s=arrival.job.timeout_s + BACKSTOP_S)
    arrival = dataclasses.replace(arrival, job=job)
    orders = CoordinatorClient(channel, assignment.rank, silence_s=job.silence_s)
    own_process = job.launcher != "inline" and threading.current_thread() is threading.main_thread()
    orders.begin(hears_sigterm=own_process)
    with contextlib.closing(orders):
        if is_elastic:
            with _reporting_end(orders), _join_elastic(arrival, channel, orders) as place:
                yield place
        else:
            with _join_fixed(arrival, SupervisorStore(channel, timeout_s=job.timeout_s), orders) as place:
                yield place


@contextlib.contextmanager
def _reporting_end(orders: CoordinatorClient) -> Iterator[None]:
    """Have the head hear no more of this worker, and miss nothing, once it has left what all do in good order: the
    program may go on for long behind it. Who fails says nothing, its end does."""
    try:
        yield
    except CleanExit:
        orders.tell("over")
        raise
    orders.tell("over")


@contextlib.contextmanager
def _join_fixed(arrival: JoinContext, shared: dist.Store, orders: CoordinatorClient | None) -> Iterator[WorkerContext]:
    """Join torch's default process group, so that code which calls torch.distributed itself works too."""
    assignment, device, recorder, timeout_s = (
        arrival.assignment,
        arrival.device,
        arrival.recorder,
        arrival.job.timeout_s,
    )
    recorder.join(generation_name(0), range(assignment.workers), is_main=True)
    meeting = recorder.enter("meeting", "the workers find each other")
    recorder.wait(meeting)
    dist.init_process_group(
        backend_for(device),
        store=shared,
        rank=assignment.rank,
        world_size=assignment.workers,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    group: WorkerGroup = SingleWorkerGroup()
    wanted = _allreduce_wishes(arrival)
    if assignment.workers > 1:
        group = over_torch = Group(default_group(), device=device)
        if assignment.hosts == 1 and device.type == "cpu":
            group, reason = with_shared_memory(over_torch, timeout_s=timeout_s)
            if reason is not None and assignment.rank == 0:
                arrival.tell(shared_memory_unavailable("workers sum gradients", reason))
        if reduces_over_all_workers(arrival.plan):
            group = with_selected_algorithm(
                group,
                wanted,
                ranks=range(assignment.workers),
                store=dist.PrefixStore("paceline/near", shared),
                tells=assignment.rank == 0,
            )
    recorder.leave()
    members = ElasticGroup(group, generation=0, ranks=tuple(range(assignment.workers)), recorder=recorder)
    agreement = Consensus(members, rank=assignment.rank, orders=orders, notice=arrival.notice, timeout_s=timeout_s)
    axes = parallel_groups_of(
        arrival.plan,
        members,
        worker_rank=assignment.rank,
        device=device,
        recorder=recorder,
        timeout_s=timeout_s,
        hosts=[_host(assignment)] * members.size
        if assignment.hosts == 1
        else members.gather_objects(_host(assignment)),
        tell=arrival.tell,
        streams=arrival.plan.compute.offload == "all",
        on_way=lambda one, name, ranks: with_selected_algorithm(
            one,
            wanted,
            ranks=ranks,
            store=dist.PrefixStore(f"paceline/near {name}", shared),
            tells=assignment.rank == 0,
        ),
    )
    algorithm, kind = _allreduce_algorithm(arrival.plan), type(arrival.plan.sync).__name__
    if algorithm != "auto" and axes.replica_group.size == 1 and assignment.workers > 1 and assignment.rank == 0:
        text = f"{kind}(algorithm={algorithm!r}) is not used: there is one replica, which sums with no other one"
        arrival.tell(Note(text=text))
    try:
        told = _Channels(shared=shared, prelude=SetupReplay(None), link=wanted.latest)
        yield _worker_context(arrival, members, agreement, axes=axes, told=told)
        axes.close()
        # Where something went wrong a transfer may be pending, and to destroy its group would wait for it.
        members.close()
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()


@contextlib.contextmanager
def _join_elastic(arrival: JoinContext, channel: Channel, orders: CoordinatorClient) -> Iterator[WorkerContext]:
    """Join the first generation, or, where this worker comes later, none yet."""
    assignment, layout, recorder, timeout_s = (
        arrival.assignment,
        arrival.plan.layout,
        arrival.recorder,
        arrival.job.timeout_s,
    )
    replicas = layout.replicas
    least, most = replicas if isinstance(replicas, tuple) else (assignment.workers, assignment.workers)
    shared = SupervisorStore(channel, timeout_s=timeout_s)
    orders.acknowledges = arrival.plan.is_asynchronous
    orders.tell("elastic", least=least, most=most, workers_each=layout.workers_each)
    with contextlib.ExitStack() as stack:
        if layout.workers_each == 1:
            members, across, lockstep = ElasticGroup(None, generation=-1, recorder=recorder), None, Lockstep()
            axes = single_worker_replicas(members)
        else:
            members, across, lockstep, axes = stack.enter_context(_join_replica(arrival, shared))
        generations = _GenerationBuilder(arrival, channel, orders, across=across)
        agreement = Consensus(
            members,
            rank=assignment.rank,
            orders=orders,
            timeout_s=timeout_s,
            elastic=ElasticMembership(
                build=generations.build,
                has_formed=generations.has_formed,
                lockstep=lockstep,
                workers_each=layout.workers_each,
            ),
        )
        if not assignment.joins:
            agreement.begin(tuple(range(assignment.workers)))
        told = _Channels(shared=shared, prelude=SetupReplay(shared), link=generations.link)
        yield _worker_context(arrival, members, agreement, axes=axes, told=told)
        axes.close()
        members.close()


@contextlib.contextmanager
def _join_replica(
    arrival: JoinContext, shared: dist.Store
) -> Iterator[tuple[ElasticGroup, CrossReplicaGroup | None, Lockstep, ParallelGroups]]:
    """Meet the other workers of this replica. Yields the group of the run and the one between replicas, which nobody
    is in yet, and the replica's own."""
    assignment, layout, recorder, timeout_s = (
        arrival.assignment,
        arrival.plan.layout,
        arrival.recorder,
        arrival.job.timeout_s,
    )
    recorder.join("replica", workers_of(layout, assignment.rank), is_main=True)
    recorder.wait(recorder.enter("meeting", "the workers of each replica find each other"))
    dist.init_process_group(
        backend_for(arrival.device),
        store=dist.PrefixStore(f"paceline/{_replica_life(arrival)}", shared),
        rank=assignment.rank % layout.workers_each,
        world_size=layout.workers_each,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        replica, hosts = replica_group_of(
            layout,
            worker_rank=assignment.rank,
            device=arrival.device,
            recorder=recorder,
            timeout_s=timeout_s,
            host=_host(assignment),
            num_workers=assignment.workers,
            tell=arrival.tell,
        )
        recorder.leave()
        lockstep = Lockstep(replica)
        members = LockstepGroup(lockstep, recorder=recorder)
        across = (
            None if spans_all_workers(arrival.plan) else CrossReplicaGroup(lockstep, recorder=recorder)
        )  # whole models: everybody is across
        axes = parallel_groups_of(
            arrival.plan,
            members,
            worker_rank=assignment.rank,
            device=arrival.device,
            recorder=recorder,
            timeout_s=timeout_s,
            hosts=hosts,
            tell=arrival.tell,
            across=members if across is None else across,
            num_workers=assignment.workers,
        )
        yield (
            members,
            across,
            lockstep,
            dataclasses.replace(axes, whole=replica, preparation_group=replica, life=_replica_life(arrival)),
        )
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Channels:
    """What a worker hears from others beside its groups (see Place)."""

    shared: dist.Store
    prelude: SetupReplay
    link: Callable[[int], Mapping[int, Mapping[str, float]]]


def _worker_context(
    arrival: JoinContext, group: WorkerGroup, agreement: Consensus, *, axes: ParallelGroups, told: _Channels
) -> WorkerContext:
    """A worker's place, with the memory that its supervisor has handed it."""
    fds, begins_at = arrival.assignment.snapshot_fds, arrival.assignment.begins_at
    return WorkerContext(
        group=group,
        agreement=agreement,
        prelude=told.prelude,
        shared=told.shared,
        link=told.link,
        attach=agreement.attach,
        recorder=arrival.recorder,
        axes=axes,
        address=arrival.assignment.address,
        memory_checkpoint=MemoryCheckpoint(fds[:2]) if fds else None,
        begins_with=None if begins_at is None else SnapshotSlot(fds[2]),
    )


def _replica_life(arrival: JoinContext) -> str:
    """A name for this replica that whoever had its number before did not have."""
    assignment, each = arrival.assignment, arrival.plan.layout.workers_each
    return f"_replica_{assignment.rank // each}_{assignment.incarnation}"


class _GenerationBuilder:
    """Builds the groups of one worker, generation by generation; its members meet through the key-value store."""

    def __init__(
        self, arrival: JoinContext, channel: Channel, orders: CoordinatorClient, *, across: CrossReplicaGroup | None
    ) -> None:
        """`across`: is given its group as well; None: there is no other one than the run's."""
        self._arrival, self._channel, self._orders, self._across = arrival, channel, orders, across
        self._each = arrival.plan.layout.workers_each
        self._wanted = _allreduce_wishes(arrival)
        self.link = self._wanted.latest
        prefix = f"paceline/{_replica_life(arrival)}/formed/"
        self._board = SupervisorStore(channel, timeout_s=arrival.job.timeout_s, prefix=prefix)

    def build(self, form: MembershipView, is_hurry: bool) -> WorkerGroup:
        """The group of a generation. Raises Disrupted where it is over already; nothing is left of it then."""
        self._arrival.recorder.join(generation_name(form.generation), form.members, is_main=True)
        meet_s = MEETING_S if is_hurry else self._arrival.job.timeout_s
        whole = self._group(form, form.members, "", meet_s)
        if self._across is not None:
            place = self._arrival.assignment.rank % self._each
            alike = tuple(worker for worker in form.members if worker % self._each == place)
            try:
                between = self._group(form, alike, f"across_{place}/", meet_s)
            except SyncError:
                whole.close()
                raise
            self._across.take(between, form.generation, ranks=alike)
        return whole

    def has_formed(self, generation: int, has_formed: bool) -> bool:
        """Whether all workers of this replica have formed a generation: they say so in the key-value store."""
        if self._each == 1:
            return has_formed
        place = self._arrival.assignment.rank % self._each
        self._board.set(f"{generation}/{place}", "yes" if has_formed else "no")
        keys = [f"{generation}/{number}" for number in range(self._each)]
        return has_formed and all(self._board.get(key) == b"yes" for key in keys)

    def _group(self, form: MembershipView, members: tuple[int, ...], name: str, meet_s: float) -> WorkerGroup:
        arrival, orders, timeout_s = self._arrival, self._orders, self._arrival.job.timeout_s
        if len(members) == 1:
            return SingleWorkerGroup()
        deadline = time.monotonic() + meet_s

        def check_meeting() -> None:
            orders.check_newest(form.generation)
            if time.monotonic() > deadline:
                raise Disrupted("the workers could not all meet in time")

        def check() -> None:
            orders.check(form.generation)

        prefix = f"paceline/generation_{form.generation}/{name}"
        store = SupervisorStore(self._channel, timeout_s=timeout_s, prefix=prefix, check_wait=check_meeting)
        backend = connect_gloo(
            store,
            index=members.index(arrival.assignment.rank),
            size=len(members),
            timeout_s=timeout_s,
            check=check_meeting,
        )
        group: WorkerGroup = GenerationGroup(backend, device=arrival.device, check=check, timeout_s=timeout_s)
        if not (form.is_spread if form.generation > 0 else arrival.assignment.hosts > 1):
            neighbours = len(form.members)
            try:
                group, reason = with_shared_memory(
                    group, timeout_s=timeout_s, is_lost=check, num_neighbours=neighbours, ranks=members
                )
            except SyncError:
                group.close()
                raise
            if reason is not None and arrival.assignment.rank == members[0]:
                arrival.tell(shared_memory_unavailable("workers sum gradients", reason))
        if not name and not reduces_over_all_workers(arrival.plan):
            return group
        return with_selected_algorithm(
            group,
            self._wanted,
            ranks=members,
            store=dist.PrefixStore("near", store),
            check=check,
            lost=Disrupted,
            tells=arrival.assignment.rank == members[0] == form.members[0],
        )


def _allreduce_wishes(arrival: JoinContext) -> AllReduceSettings:
    """How gradients are summed."""
    assignment = arrival.assignment
    return AllReduceSettings(
        algorithm=_allreduce_algorithm(arrival.plan),
        host=_host(assignment),
        timeout_s=arrival.job.timeout_s,
        tell=arrival.tell,
    )


def _host(assignment: Assignment) -> str:
    """A name of this host that no other one of the job has."""
    return f"{assignment.host_index} {assignment.host}"


def _allreduce_algorithm(plan: Plan) -> str:
    """How sums over replicas are taken: where servers take those of the gradients, what is left chooses for itself."""
    return "auto" if isinstance(plan.sync, ParameterServer | Gossip) else plan.sync.algorithm


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


def _interface_of(address: str) -> str:
    """The name of the network interface that has `address`."""
    import psutil  # only where there is more than one worker

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise LaunchError(f"no network interface of this host has the address {address}")
