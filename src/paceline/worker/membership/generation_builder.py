"""Builds the process groups of an elastic run, one set for each generation of its members.

The members of a generation meet through the key-value store of the coordinator, connect to each other, and use shared
memory where all of them are on one host. Tensors of devices take a way of their own above that: through the host's
memory, or on a communicator of the devices, which is made anew with each generation.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.comm.algorithm_selection import with_selected_algorithm
from paceline.comm.devices.abortable_group import AbortableGroup
from paceline.comm.devices.communicator import Communicator, connect_communicator
from paceline.comm.devices.host_staged_group import HostStagedGroup
from paceline.comm.devices.nccl import NcclCommunicator
from paceline.comm.elastic.generation_group import GenerationGroup, connect_backend, generation_name
from paceline.comm.elastic.lockstep_group import CrossReplicaGroup, Lockstep
from paceline.comm.group import Disrupted, SingleWorkerGroup, WorkerGroup
from paceline.comm.messages.json_channel import Channel
from paceline.comm.rendezvous.torch_store import SupervisorStore
from paceline.comm.shared_memory.setup import shared_memory_unavailable, with_shared_memory
from paceline.elastic.membership_messages import Limits, MembershipView
from paceline.errors import SyncError
from paceline.host_memory import machine_load
from paceline.worker.membership.coordinator_client import CoordinatorClient
from paceline.worker.membership.join_context import JoinContext, allreduce_settings, replica_name
from paceline.worker.topology.parallel_groups import reduces_over_all_workers

__all__ = ["ElasticMembership", "GenerationBuilder", "meeting_s"]


def meeting_s(members: int, load: float) -> float:
    """How long members that have to form a generation at once wait for each other.

    It is longer than the coordinator's limit with all extensions: it hears the heartbeats, and decides. A member that
    gave up before would only name itself.
    """
    limits = Limits(least=1, most=members)
    return (2 + limits.most_extensions) * limits.joining_s(members, load)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ElasticMembership:
    """What a run needs whose members change."""

    build: Callable[[MembershipView, bool], WorkerGroup]
    """Builds the group of a generation; the flag limits the wait for the others. Raises Disrupted where the generation
    is over already."""

    has_formed: Callable[[int, bool], bool]
    """Whether all workers of this replica have formed a generation, given whether this one has. A worker that has not
    reports so, and does not wait for the others."""

    lockstep: Lockstep  # of the workers of this replica
    workers_each: int  # of a replica

    cross_replica: CrossReplicaGroup | None = None
    """Between the replicas, where the run's group is not the only one that spans them."""


class GenerationBuilder:
    """Builds the groups of one worker, generation by generation."""

    make_communicator: Callable[..., Communicator] = NcclCommunicator

    def __init__(
        self,
        context: JoinContext,
        channel: Channel,
        coordinator: CoordinatorClient,
        *,
        cross_replica: CrossReplicaGroup | None,
    ) -> None:
        """`cross_replica` is given its group of each generation as well; None: the run's group is the only one."""
        self._context, self._channel, self._coordinator = context, channel, coordinator
        self._cross_replica = cross_replica
        self._each = context.plan.layout.workers_each
        self._settings = allreduce_settings(context)
        self.link = self._settings.latest
        prefix = f"paceline/{replica_name(context)}/formed/"
        self._store = SupervisorStore(channel, timeout_s=context.job.timeout_s, prefix=prefix)

    def build(self, view: MembershipView, is_hurry: bool) -> WorkerGroup:
        """The group of a generation. Raises Disrupted where it is over already; nothing is left of it then."""
        self._context.recorder.join(generation_name(view.generation), view.members, is_main=True)
        # A program with a loop of its own joins in a call of its own, such as hvd.init(): others may take long to it.
        is_limited = is_hurry and not self._context.ends_alone
        meet_s = meeting_s(len(view.members), machine_load()) if is_limited else self._context.job.timeout_s
        whole = self._group(view, view.members, "", meet_s)
        if self._cross_replica is not None:
            index = self._context.assignment.rank % self._each
            peers = tuple(worker for worker in view.members if worker % self._each == index)
            try:
                between = self._group(view, peers, f"across_{index}/", meet_s)
            except SyncError:
                whole.close()
                raise
            self._cross_replica.take(between, view.generation, ranks=peers)
        return whole

    def has_formed(self, generation: int, has_formed: bool) -> bool:
        """Whether all workers of this replica have formed a generation: each sets its key in the key-value store."""
        if self._each == 1:
            return has_formed
        index = self._context.assignment.rank % self._each
        self._store.set(f"{generation}/{index}", "yes" if has_formed else "no")
        keys = [f"{generation}/{number}" for number in range(self._each)]
        return has_formed and all(self._store.get(key) == b"yes" for key in keys)

    def _group(self, view: MembershipView, members: tuple[int, ...], name: str, meet_s: float) -> WorkerGroup:
        context, coordinator, timeout_s = self._context, self._coordinator, self._context.job.timeout_s
        if len(members) == 1:
            return SingleWorkerGroup()
        deadline = time.monotonic() + meet_s

        def check_rendezvous() -> None:
            coordinator.check_newest(view.generation)
            if time.monotonic() > deadline:
                raise Disrupted("the workers could not all meet in time")

        def check() -> None:
            coordinator.check(view.generation)

        is_spread = view.is_spread if view.generation > 0 else context.assignment.hosts > 1
        prefix = f"paceline/generation_{view.generation}/{name}"
        store = SupervisorStore(self._channel, timeout_s=timeout_s, prefix=prefix, check_wait=check_rendezvous)
        backend = connect_backend(
            store,
            index=members.index(context.assignment.rank),
            size=len(members),
            timeout_s=timeout_s,
            check=check_rendezvous,
            address=context.assignment.address if is_spread else None,
            over_gloo=context.job.private_network,
        )
        host = torch.device("cpu")  # tensors of devices take another way
        group: WorkerGroup = GenerationGroup(
            backend, device=host, objects_on=context.device, check=check, timeout_s=timeout_s
        )
        if not is_spread:
            neighbours = len(view.members)
            try:
                group, reason = with_shared_memory(
                    group, timeout_s=timeout_s, check_peers=check, num_local_workers=neighbours, ranks=members
                )
            except SyncError:
                group.close()
                raise
            if reason is not None and context.assignment.rank == members[0]:
                context.tell(shared_memory_unavailable("workers sum gradients", reason))
        if context.way != "device" and (name or reduces_over_all_workers(context.plan)):
            group = with_selected_algorithm(
                group,
                self._settings,
                ranks=members,
                store=dist.PrefixStore("near", store),
                check=check,
                lost=Disrupted,
                reports=context.assignment.rank == members[0] == view.members[0],
            )
        if context.way == "staged":
            return HostStagedGroup(group, device=context.device)
        return self._on_devices(group, store, check, check_rendezvous) if context.way == "device" else group

    def _on_devices(
        self, host: WorkerGroup, store: SupervisorStore, check: Callable[[], None], check_rendezvous: Callable[[], None]
    ) -> WorkerGroup:
        """Return the group whose members' devices exchange tensors; `host` is closed where they cannot connect."""
        device, timeout_s = self._context.device, self._context.job.timeout_s
        try:
            communicator = self.make_communicator(
                dist.PrefixStore("device", store),
                index=host.index,
                size=host.size,
                device=device,
                timeout_s=timeout_s,
            )
            connect_communicator(communicator, check_rendezvous)
        except SyncError:
            host.close()
            raise
        return AbortableGroup(host, communicator, device=device, check=check, timeout_s=timeout_s)
