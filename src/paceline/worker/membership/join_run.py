"""How a worker joins its run: it reaches the others and builds the process groups that it trains with.

A run of a fixed number of replicas has one group, over torch's default process group. An elastic run has one for each
generation of its members. Where its replicas have several workers, each replica is a world of its own to torch: the
default process group of its workers has no other members, and lives as long as the replica does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline import environment
from paceline.comm.algorithm_selection import with_selected_algorithm
from paceline.comm.devices.host_staged_group import HostStagedGroup
from paceline.comm.elastic.generation_group import ElasticGroup, GenerationGroup, generation_name
from paceline.comm.elastic.lockstep_group import CrossReplicaGroup, Lockstep, LockstepGroup
from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import Group, SingleWorkerGroup, WorkerGroup, sign_objects
from paceline.comm.memory_checkpoint import MemoryCheckpoint, SnapshotSlot
from paceline.comm.messages.json_channel import Channel
from paceline.comm.peer_sockets.meeting import file_namespace
from paceline.comm.peer_sockets.process_group import create_peer_group, listen_at, listening_address
from paceline.comm.rendezvous.torch_store import SupervisorStore
from paceline.comm.shared_memory.setup import shared_memory_unavailable, with_shared_memory
from paceline.errors import LaunchError, PlanError
from paceline.events import Note
from paceline.plan import Plan
from paceline.plan.job import Assignment, Job
from paceline.worker.membership.clean_exit import CleanExit
from paceline.worker.membership.consensus import Consensus
from paceline.worker.membership.coordinator_client import CoordinatorClient
from paceline.worker.membership.generation_builder import ElasticMembership, GenerationBuilder
from paceline.worker.membership.join_context import (
    JoinContext,
    allreduce_algorithm,
    allreduce_settings,
    host_name,
    replica_name,
)
from paceline.worker.membership.state_transfer import StateHolder
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

__all__ = ["WorkerContext", "join_run", "open_network_remark"]

LOOPBACK = "127.0.0.1"
BACKSTOP_S = 15.0  # beyond Job.timeout_s
UNTRIED_ON_DEVICES = (
    "workers that come and go, with a GPU each, have not been run on several GPUs yet: NCCL's communicators are "
    "aborted and made anew, as tested with a stand-in. Save checkpoints often"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContext:
    """What a worker has joined: its groups, the run's key-value store, and the memory that it inherits."""

    group: WorkerGroup
    consensus: Consensus
    setup_replay: SetupReplay
    shared: dist.Store  # of the whole run
    attach: Callable[[StateHolder], None]  # to be called with the owner of the run's state, once there is one
    recorder: FlightRecorder  # of what this worker is doing
    axes: ParallelGroups  # its groups inside its replica, and between the replicas
    link: Callable[[int], Mapping[int, Mapping[str, float]]]  # by group size: the measured times of all-reduces
    memory_checkpoint: MemoryCheckpoint | None = None  # outlives this worker; None: a lost worker would not use it
    address: str = "127.0.0.1"  # of this host, as the others see it
    begins_with: SnapshotSlot | None = None  # the snapshot of the lost worker that this one replaces

    def is_first(self, rank: int) -> bool:
        """Whether the worker of this rank, which is this one, is the first: worker 0, or after its loss the next."""
        present = self.consensus.present
        return present[0] == rank if present else self.group.index == 0


@contextlib.contextmanager
def join_run(context: JoinContext) -> Iterator[WorkerContext]:
    """Join the run while entered. Raises PlanError where the plan is elastic and no launcher could replace a worker."""
    assignment, plan, store = context.assignment, context.plan, context.store
    is_elastic = plan.layout.is_elastic
    channel = Channel.inherited(assignment.channel_fd) if store is None and assignment.channel_fd >= 0 else None
    if store is None and channel is None and assignment.workers > 1:
        raise LaunchError(f"worker {assignment.rank} of {assignment.workers} was given no way to reach the others")
    if is_elastic:
        _refuse_where_fixed(plan, context.job, has_supervisor=channel is not None)
    if assignment.workers > 1 or is_elastic:
        environment.set_gloo_interface(_interface_of(assignment.address))
        listen_at(assignment.address if _may_be_spread(assignment) else None)
    if channel is None:
        if store is not None and assignment.workers > 1 and not _may_be_spread(assignment):
            listen_at(None if _see_same_files(store, assignment) else LOOPBACK)
        with _join_fixed(context, store or dist.HashStore(), None) as joined:
            yield joined
        return
    # The supervisor ends a hang after timeout_s, and can report more about it than the worker that waits.
    job = dataclasses.replace(context.job, timeout_s=context.job.timeout_s + BACKSTOP_S)
    context = dataclasses.replace(context, job=job)
    coordinator = CoordinatorClient(channel, assignment.rank, silence_s=job.silence_s)
    own_process = job.launcher != "inline" and threading.current_thread() is threading.main_thread()
    # A program with a loop of its own takes no common step after which all would leave: SIGTERM is the program's.
    coordinator.begin(hears_sigterm=own_process and not context.ends_alone)
    with contextlib.closing(coordinator):
        if is_elastic:
            with _reporting_end(coordinator), _join_elastic(context, channel, coordinator) as joined:
                yield joined
        else:
            with _join_fixed(context, SupervisorStore(channel, timeout_s=job.timeout_s), coordinator) as joined:
                yield joined


@contextlib.contextmanager
def _reporting_end(coordinator: CoordinatorClient) -> Iterator[None]:
    """Report to the coordinator that this worker has left the run in good order, since its program may go on for long.
    A worker that fails reports nothing: its exit does."""
    try:
        yield
    except CleanExit:
        coordinator.tell("over")
        raise
    coordinator.tell("over")


@contextlib.contextmanager
def _join_fixed(
    context: JoinContext, shared: dist.Store, coordinator: CoordinatorClient | None
) -> Iterator[WorkerContext]:
    """Join torch's default process group, so that code which calls torch.distributed itself works too; or a group of
    the run's own, where that place is for the group of a program that trains itself."""
    assignment, device, recorder = context.assignment, context.device, context.recorder
    timeout_s = context.job.timeout_s
    recorder.join(generation_name(0), range(assignment.workers), is_main=True)
    meeting = recorder.enter("meeting", "the workers find each other")
    recorder.wait(meeting)
    _sign_over_gloo(context, shared)
    remark = open_network_remark(device, hosts=assignment.hosts, is_private=context.job.private_network)
    if remark is not None and assignment.rank == 0:
        context.tell(Note(text=remark))
    if not context.trains_itself:
        dist.init_process_group(
            _backend(context),
            store=shared,
            rank=assignment.rank,
            world_size=assignment.workers,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if context.way == "device" else None,
        )
    group: WorkerGroup = SingleWorkerGroup()
    settings = allreduce_settings(context)
    if context.trains_itself:
        group = _group_beside_programs(context, shared)
    elif assignment.workers > 1:
        group = over_torch = Group(default_group(), device=context.host_device, objects_on=device)
        if assignment.hosts == 1 and context.way != "device":
            group, reason = with_shared_memory(over_torch, timeout_s=timeout_s)
            if reason is not None and assignment.rank == 0:
                context.tell(shared_memory_unavailable("workers sum gradients", reason))
        if reduces_over_all_workers(context.plan):
            group = with_selected_algorithm(
                group,
                settings,
                ranks=range(assignment.workers),
                store=dist.PrefixStore("paceline/near", shared),
                reports=assignment.rank == 0,
            )
        if context.way == "staged":
            group = HostStagedGroup(group, device=device)
    recorder.leave()
    members = ElasticGroup(group, generation=0, ranks=tuple(range(assignment.workers)), recorder=recorder)
    consensus = Consensus(
        members, rank=assignment.rank, coordinator=coordinator, notice=context.notice, timeout_s=timeout_s
    )
    host = host_name(assignment)
    axes = parallel_groups_of(
        context.plan,
        members,
        worker_rank=assignment.rank,
        device=device,
        way=context.way,
        recorder=recorder,
        timeout_s=timeout_s,
        hosts=[host] * members.size if assignment.hosts == 1 else members.gather_objects(host),
        tell=context.tell,
        streams=context.plan.compute.offload == "all",
        on_way=lambda one, name, ranks: with_selected_algorithm(
            one,
            settings,
            ranks=ranks,
            store=dist.PrefixStore(f"paceline/near {name}", shared),
            reports=assignment.rank == 0,
        ),
    )
    algorithm, kind = allreduce_algorithm(context.plan), type(context.plan.sync).__name__
    if algorithm != "auto" and axes.replica_group.size == 1 and assignment.workers > 1 and assignment.rank == 0:
        text = f"{kind}(algorithm={algorithm!r}) is not used: there is one replica, which sums with no other one"
        context.tell(Note(text=text))
    try:
        channels = _Channels(shared=shared, setup_replay=SetupReplay(None), link=settings.latest)
        yield _worker_context(context, members, consensus, axes=axes, channels=channels)
        axes.close()
        # Where something went wrong a transfer may be pending, and to destroy its group would wait for it.
        members.close()
    finally:
        if dist.is_initialized():  # a program that trains itself may have destroyed its own, or not
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dist.destroy_process_group()


def _group_beside_programs(context: JoinContext, shared: dist.Store) -> WorkerGroup:
    """The run's own group, over sockets, where torch's default process group is the program's: what the program does
    with that one, to its end and to a new one, does not reach the run."""
    assignment, timeout_s = context.assignment, context.job.timeout_s
    if assignment.workers == 1:
        return SingleWorkerGroup()
    members = create_peer_group(
        dist.PrefixStore("paceline/beside", shared),
        index=assignment.rank,
        size=assignment.workers,
        address=listening_address(),
        timeout_s=timeout_s,
        check=_nothing,
    )
    return GenerationGroup(members, device=torch.device("cpu"), check=_nothing, timeout_s=timeout_s)


def _nothing() -> None:
    """There is no other generation that would interrupt a wait."""


@contextlib.contextmanager
def _join_elastic(context: JoinContext, channel: Channel, coordinator: CoordinatorClient) -> Iterator[WorkerContext]:
    """Join the first generation; a worker that starts later joins none yet."""
    assignment, layout, timeout_s = context.assignment, context.plan.layout, context.job.timeout_s
    replicas = layout.replicas
    least, most = replicas if isinstance(replicas, tuple) else (assignment.workers, assignment.workers)
    shared = SupervisorStore(channel, timeout_s=timeout_s)
    _sign_over_gloo(context, shared)
    if context.way == "device" and assignment.rank == 0 and not assignment.joins:
        context.tell(Note(text=UNTRIED_ON_DEVICES))
    coordinator.acknowledges = context.plan.is_asynchronous
    coordinator.tell(
        "elastic", least=least, most=most, workers_each=layout.workers_each, joins_in_calls=context.ends_alone
    )
    with contextlib.ExitStack() as stack:
        cross_replica, lockstep = None, Lockstep()
        if layout.workers_each == 1:
            members = ElasticGroup(None, generation=-1, recorder=context.recorder)
            axes = single_worker_replicas(members)
        else:
            members, cross_replica, lockstep, axes = stack.enter_context(_join_replica(context, shared))
        generations = GenerationBuilder(context, channel, coordinator, cross_replica=cross_replica)
        consensus = Consensus(
            members,
            rank=assignment.rank,
            coordinator=coordinator,
            timeout_s=timeout_s,
            elastic=ElasticMembership(
                build=generations.build,
                has_formed=generations.has_formed,
                lockstep=lockstep,
                workers_each=layout.workers_each,
                cross_replica=cross_replica,
            ),
        )
        if not assignment.joins:
            consensus.begin(tuple(range(assignment.workers)))
        channels = _Channels(shared=shared, setup_replay=SetupReplay(shared), link=generations.link)
        yield _worker_context(context, members, consensus, axes=axes, channels=channels)
        axes.close()
        members.close()


@contextlib.contextmanager
def _join_replica(
    context: JoinContext, shared: dist.Store
) -> Iterator[tuple[ElasticGroup, CrossReplicaGroup | None, Lockstep, ParallelGroups]]:
    """Meet the other workers of this replica. Yields the group of the run and the one between replicas, which have no
    members yet, and the replica's own."""
    assignment, layout, recorder = context.assignment, context.plan.layout, context.recorder
    timeout_s = context.job.timeout_s
    recorder.join("replica", workers_of(layout, assignment.rank), is_main=True)
    recorder.wait(recorder.enter("meeting", "the workers of each replica find each other"))
    dist.init_process_group(
        _backend(context),
        store=dist.PrefixStore(f"paceline/{replica_name(context)}", shared),
        rank=assignment.rank % layout.workers_each,
        world_size=layout.workers_each,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        replica, hosts = replica_group_of(
            layout,
            worker_rank=assignment.rank,
            device=context.device,
            way=context.way,
            recorder=recorder,
            timeout_s=timeout_s,
            host=host_name(assignment),
            num_workers=assignment.workers,
            tell=context.tell,
        )
        recorder.leave()
        lockstep = Lockstep(replica)
        members = LockstepGroup(lockstep, recorder=recorder)
        # Where the whole run sums the gradients, there is no other group between replicas.
        cross_replica = None if spans_all_workers(context.plan) else CrossReplicaGroup(lockstep, recorder=recorder)
        axes = parallel_groups_of(
            context.plan,
            members,
            worker_rank=assignment.rank,
            device=context.device,
            way=context.way,
            recorder=recorder,
            timeout_s=timeout_s,
            hosts=hosts,
            tell=context.tell,
            across=members if cross_replica is None else cross_replica,
            num_workers=assignment.workers,
        )
        axes = dataclasses.replace(axes, whole=replica, preparation_group=replica, life=replica_name(context))
        yield members, cross_replica, lockstep, axes
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Channels:
    """What a worker learns from others beside its groups (see `WorkerContext`)."""

    shared: dist.Store
    setup_replay: SetupReplay
    link: Callable[[int], Mapping[int, Mapping[str, float]]]


def _worker_context(
    context: JoinContext, group: WorkerGroup, consensus: Consensus, *, axes: ParallelGroups, channels: _Channels
) -> WorkerContext:
    """What a worker has joined, with the memory that its supervisor has handed it."""
    fds, begins_at = context.assignment.snapshot_fds, context.assignment.begins_at
    return WorkerContext(
        group=group,
        consensus=consensus,
        setup_replay=channels.setup_replay,
        shared=channels.shared,
        link=channels.link,
        attach=consensus.attach,
        recorder=context.recorder,
        axes=axes,
        address=context.assignment.address,
        memory_checkpoint=MemoryCheckpoint(fds[:2]) if fds else None,
        begins_with=None if begins_at is None else SnapshotSlot(fds[2]),
    )


def _refuse_where_fixed(plan: Plan, job: Job, *, has_supervisor: bool) -> None:
    """Raise PlanError where workers cannot come and go."""
    shown = f"Layout(replicas={plan.layout.replicas})"
    if not has_supervisor or job.launcher == "inline":
        cause = "launcher='inline'" if job.launcher == "inline" else "the program that started these workers"
        raise PlanError(
            f"{shown} lets workers come and go, but {cause} keeps their number fixed. Use Layout(replicas=n), or start "
            "the workers with paceline run (on every host, where there are several)."
        )


def _may_be_spread(assignment: Assignment) -> bool:
    """Whether this worker's groups may have members on other hosts, now or later."""
    return assignment.hosts > 1 or assignment.job.head is not None


def _see_same_files(store: dist.Store, assignment: Assignment) -> bool:
    """Whether all workers of this host see each other's Unix sockets; a launcher may give each a container."""
    store.set(f"paceline/files_{assignment.rank}", file_namespace())
    return len({store.get(f"paceline/files_{rank}") for rank in range(assignment.workers)}) == 1


def open_network_remark(device: torch.device, *, hosts: int, is_private: bool) -> str | None:
    """What to say of workers whose tensors travel between hosts over NCCL; None where nothing is to be said."""
    if device.type != "cuda" or hosts == 1 or is_private:
        return None
    return (
        "NCCL and gloo move tensors between these hosts in the clear, and accept any process that reaches their ports: "
        "a stranger there could change numbers or end the run. Give --private-network where nobody else reaches that "
        "network"
    )


def _backend(context: JoinContext) -> str:
    return backend_for(
        context.device, way=context.way, over_gloo=context.job.private_network and _may_be_spread(context.assignment)
    )


def _sign_over_gloo(context: JoinContext, shared: dist.Store) -> None:
    """Where objects travel over gloo, whose ports accept any process, have all workers sign what they send."""
    if context.device.type != "cpu" or context.job.private_network:
        key = shared.compare_set("paceline/object_key", "", secrets.token_hex(32))
        sign_objects(bytes.fromhex(key.decode()))


def _interface_of(address: str) -> str:
    """The name of the network interface that has `address`."""
    import psutil  # only where there is more than one worker

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise LaunchError(f"no network interface of this host has the address {address}")
