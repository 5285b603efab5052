"""The process groups of one worker: data, fully sharded, tensor, pipeline, context and expert parallel.

Beside the whole run's group (`WorkerContext.group`), a worker has one group along each axis of the mesh:

 - `replica_group` (data parallel): the workers at the same index of each replica. They hold the same numbers and sum
   their gradients.
 - `shard_group` (fully sharded, ZeRO): the workers that split the rows of a replica's state.
 - `tensor`, `stages` (pipeline), `context` and `experts`: the workers of a replica along these axes.
 - `whole`: all workers of a replica.

Tensor, pipeline and context workers run the same micro-batches. Where a layout does not split a replica, a worker is
alone in every group but `replica_group`, which is the whole run. The same holds for context parallelism alone, since
each worker then has the whole model. In combined layouts context workers sum their gradients among themselves, after
`replica_group`.

Expert parallel workers hold everything but the experts whole, so `replica_group` is the whole run. Experts are summed
over `expert_replica_group`: the workers at the same index of each replica, with the very same state. In combined
layouts `replica_group` equals `expert_replica_group`, and expert parallel workers sum the rest of their gradients among
themselves afterwards. With `shard` they are all in `shard_group`, and split the rows of everything but the experts.

A `StateOwner` says which of a replica's workers stores a tensor, where the workers hold different tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.devices.host_staged_group import HostStagedGroup
from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import Group, SingleWorkerGroup, WorkerGroup
from paceline.comm.shared_memory.setup import shared_memory_unavailable, with_shared_memory
from paceline.comm.shared_memory.shared_group import SharedGroup
from paceline.events import Event
from paceline.parallel.fully_sharded.sharded_model import ShardGroup
from paceline.parallel.mesh import Mesh, mesh_of
from paceline.parallel.pipeline.stage_transfer import SharedMemoryTransport, StageTransport, TorchTransport
from paceline.parallel.pipeline.staged_transport import HostStagedTransport
from paceline.plan import Layout, Plan
from paceline.worker.topology.device import TensorWay
from paceline.worker.topology.recorded_groups import (
    RecordedContextGroup,
    RecordedExpertGroup,
    RecordedStageLink,
    RecordedTensorGroup,
)

__all__ = [
    "ParallelGroups",
    "StateOwner",
    "default_group",
    "parallel_groups_of",
    "reduces_over_all_workers",
    "replica_group_of",
    "single_worker_replicas",
    "spans_all_workers",
    "workers_of",
]

JOINT_AXES = {
    "rows": ("shard", "experts"),
    "parts": ("experts", "stages"),
}  # groups along two neighboring axes at once


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """One worker's groups along the axes of the mesh."""

    shard_group: WorkerGroup
    replica_group: WorkerGroup
    tensor: WorkerGroup
    stages: WorkerGroup
    context: WorkerGroup
    experts: WorkerGroup
    expert_replica_group: WorkerGroup  # for experts: the workers of other replicas with the same ones
    parted: WorkerGroup  # the workers of a replica with different tensors of its state: stages, experts, or both
    whole: WorkerGroup  # all workers of the replica; only this one where replicas take no steps by themselves
    link: StageTransport | None = None  # between the stages' workers; None: there is one stage
    rows: ShardGroup | None = None  # the shard group, as models use it; None: rows are not split
    expert_rows: ShardGroup | None = None  # the workers of it with the same experts; None: no expert parallelism
    tensor_parallel_group: RecordedTensorGroup | None = None  # as layers use it; None: no tensor parallelism
    context_parallel_group: RecordedContextGroup | None = None  # as models use it; None: no context parallelism
    expert_parallel_group: RecordedExpertGroup | None = None  # as models use it; None: no expert parallelism
    each: int = 1  # workers of a replica
    life: str = ""  # a name that no other replica of the attempt has, in an elastic run
    preparation_group: WorkerGroup  # the workers that prepare a model, and find its split, together
    spans_context: bool = False  # the replica group contains the context parallel workers

    def by_itself(self) -> ParallelGroups:
        """Return the groups of the same replica in a run that has no other one."""
        return dataclasses.replace(
            self,
            replica_group=self.whole if self.is_expert_parallel_only else SingleWorkerGroup(),
            expert_replica_group=SingleWorkerGroup(),
        )

    @property
    def sign(self) -> int:
        """A factor whose sum over the shard group is 0: weighted by it, numbers that are equal there cancel out."""
        return 1 - self.shard_group.size if self.shard_group.index == self.shard_group.size - 1 else 1

    @property
    def is_split(self) -> bool:
        return self.each > 1 or self.rows is not None

    @property
    def micro_batch_peers(self) -> WorkerGroup:
        """The workers that share this replica's micro-batches, and must make the same number of runs."""
        return self.shard_group if self.shard_group.size > 1 else self.experts

    @property
    def is_expert_parallel_only(self) -> bool:
        """Whether expert parallelism is the only split, so that all other gradients are summed over the whole run."""
        return self.each == self.experts.size > 1

    def place_of(self, home: StateOwner) -> int:
        """The index, in `parted`, of the worker that stores a tensor of this owner."""
        return (home.expert or 0) * self.stages.size + home.stage

    def is_at(self, home: StateOwner) -> bool:
        """Whether this worker has a tensor of this owner, or a part of it; all tensor parallel workers do."""
        if home.is_here is not None:
            return home.is_here
        return home.stage == self.stages.index and home.expert in (None, self.experts.index)

    @property
    def counts(self) -> bool:
        """Whether this worker reports the losses of the micro-batches that it runs: one of the workers that run the
        same ones does, on the last stage, which has the losses.
        """
        return self.tensor.index == self.context.index == 0 and self.stages.index == self.stages.size - 1

    @property
    def writers(self) -> int:
        """How many workers write checkpoints, each what it holds: those of the first replica; of context
        parallel workers, which hold the same, only the first."""
        return self.each // self.context.size

    def writer(self, index: int) -> int | None:
        """The writer number of the worker of this index in the run; None: it writes nothing."""
        if not 0 <= index < self.each or self.context.index > 0:
            return None
        before, rest = divmod(index, self.context.size * self.tensor.size)
        return before * self.tensor.size + rest

    @property
    def waited_s(self) -> float:
        """Seconds that layers have waited here for the others of the replica, in all."""
        return sum(one.waited_s for one in self.users)

    @property
    def num_bytes_sent(self) -> int:
        """Bytes that layers have sent to others of the replica, in all."""
        return sum(one.num_bytes_sent for one in self.users)

    @property
    def users(self) -> list[RecordedTensorGroup]:
        """The groups that models themselves use."""
        return [
            one
            for one in (self.tensor_parallel_group, self.context_parallel_group, self.expert_parallel_group)
            if one is not None
        ]

    def share_of(self, group: WorkerGroup) -> tuple[int, int]:
        """Return this worker's index among the workers of the whole run's group that run different micro-batches, and
        their number."""
        num_same = self.stages.size * self.context.size * self.tensor.size  # workers that run the same ones
        return group.index // num_same, group.size // num_same

    def close(self) -> None:
        """Close the groups."""
        if self.is_split:
            rows = [one.group for one in (self.rows, self.expert_rows) if one is not None]
            own = (
                *(self.shard_group, self.tensor, self.stages, self.context, self.experts),
                *(self.parted, self.whole, self.preparation_group),
            )
            for group in dict.fromkeys((*own, *rows)):
                group.close()
            if not self.spans_context:  # otherwise that is the whole run's group, which its owner closes
                self.expert_replica_group.close()


def single_worker_replicas(group: WorkerGroup) -> ParallelGroups:
    """Return the groups of a run whose replicas are single workers."""
    return ParallelGroups(
        shard_group=SingleWorkerGroup(),
        replica_group=group,
        expert_replica_group=group,
        tensor=SingleWorkerGroup(),
        stages=SingleWorkerGroup(),
        context=SingleWorkerGroup(),
        experts=SingleWorkerGroup(),
        parted=SingleWorkerGroup(),
        whole=SingleWorkerGroup(),
        preparation_group=group,
    )


def parallel_groups_of(
    plan: Plan,
    group: WorkerGroup,
    *,
    worker_rank: int,
    device: torch.device,
    recorder: FlightRecorder,
    timeout_s: float,
    hosts: Sequence[str],
    tell: Callable[[Event], None],
    way: TensorWay = "host",
    streams: bool = False,
    across: WorkerGroup | None = None,
    num_workers: int | None = None,
    on_way: Callable[[WorkerGroup, str, tuple[int, ...]], WorkerGroup] | None = None,
) -> ParallelGroups:
    """Build the groups that a layout needs beside the whole run's, over torch's default one. All of its workers must
    call it; blocks.

    `way`: how tensors on `device` travel. `hosts` names the host of each worker in torch's default group: workers of an
    axis on one host use its shared memory, and `tell` gets an event where they cannot. `streams`: parameters are loaded
    to the device unit by unit, so a single worker needs a mesh as well. `across`: the group between replicas of an
    elastic run, where torch's default group is this replica's alone; the run then has about `num_workers` workers, and
    `group` has no members yet.
    `on_way` gives the replica group, of this name and these workers, the plan's all-reduce algorithm.
    """
    layout = plan.layout
    if layout.workers_each == 1 and not streams:
        return single_worker_replicas(group)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = mesh_of(layout, group.size if across is None else layout.workers_each)
    first = 0 if across is None else worker_rank - worker_rank % layout.workers_each  # rank of the mesh's first worker

    def along(name: str) -> tuple[int, ...]:
        return tuple(first + number for number in mesh.group(joint.get(name, name), worker_rank - first))

    meeting = recorder.enter("meeting", "the workers of each replica find each other")
    recorder.wait(meeting)
    over_torch: Any = init_device_mesh(device.type, tuple(mesh.sizes.values()), mesh_dim_names=tuple(mesh.sizes))
    meshes = {axis: over_torch[axis] for axis in mesh.sizes}
    joint: dict[str, tuple[str, ...]] = {
        name: axes for name, axes in JOINT_AXES.items() if all(mesh.sizes[axis] > 1 for axis in axes)
    }
    of_replica = tuple(axis for axis, size in mesh.sizes.items() if axis != "replica" and size > 1)
    if plan.is_local and across is None and len(of_replica) > 1 and of_replica not in joint.values():
        joint["whole"] = of_replica
    meshes |= {name: over_torch[axes]._flatten(name) for name, axes in joint.items()}
    recorder.leave()
    groups: dict[str, WorkerGroup] = {}
    in_memory: dict[str, SharedGroup | None] = {}
    spans_context = spans_all_workers(plan)
    for axis, of_torch in meshes.items():
        members, size = along(axis), of_torch.size()
        groups[axis] = SingleWorkerGroup()
        if size > 1 or axis == "shard":  # a single worker may load its parameters unit by unit
            recorder.join(_group_name(axis, members), members)
        if axis == "replica" and spans_context:
            groups[axis] = group
        elif size > 1:
            on = torch.device("cpu") if way == "staged" else device
            one: Any = Group(of_torch.get_group(), device=on, objects_on=device)
            of_host = hosts[worker_rank - first]
            if way != "device" and all(hosts[member - first] == of_host for member in members):
                neighbours = num_workers or hosts.count(of_host)
                one, reason = with_shared_memory(one, timeout_s=timeout_s, num_local_workers=neighbours, ranks=members)
                if reason is not None and members[0] == worker_rank:
                    tell(shared_memory_unavailable(f"workers along {axis!r} exchange tensors", reason))
            in_memory[axis] = one if isinstance(one, SharedGroup) else None
            if axis == "replica" and on_way is not None:
                one = on_way(one, _group_name(axis, members), members)
            one = HostStagedGroup(one, device=device) if way == "staged" else one
            groups[axis] = ElasticGroup(one, generation=0, recorder=recorder, name=_group_name(axis, members))
    if across is not None:
        groups["replica"] = across
    whole: WorkerGroup = SingleWorkerGroup()
    if plan.is_local and across is None and of_replica:
        whole = groups[next((name for name, axes in joint.items() if axes == of_replica), of_replica[0])]
    link: StageTransport | None = None
    if layout.stages > 1:
        members = along("stages")
        link = _stage_link(
            over_torch.get_group("stages"),
            _second_group(mesh, members) if way == "device" else None,
            in_memory["stages"],
            members=members,
            index=members.index(worker_rank),
            recorder=recorder,
            timeout_s=timeout_s,
            staged_from=device if way == "staged" else None,
        )

    def rows(axis: str) -> ShardGroup:
        name, is_staged = _group_name(axis, along(axis)), way == "staged" and meshes[axis].size() > 1
        return ShardGroup(mesh=meshes[axis], group=groups[axis], name=name, is_staged=is_staged)

    splits = layout.shard > 1 or streams
    sharded = "rows" if "rows" in meshes else "shard"
    parted = "parts" if "parts" in meshes else "stages" if layout.stages > 1 else "experts"
    return ParallelGroups(
        shard_group=groups[sharded],
        replica_group=group if layout.workers_each == layout.experts > 1 else groups["replica"],
        expert_replica_group=groups["replica"],
        parted=groups[parted],
        whole=whole,
        tensor=groups["tensor"],
        stages=groups["stages"],
        context=groups["context"],
        context_parallel_group=RecordedContextGroup(groups["context"]) if layout.context > 1 else None,
        experts=groups["experts"],
        expert_parallel_group=RecordedExpertGroup(groups["experts"]) if layout.experts > 1 else None,
        link=link,
        rows=rows(sharded) if splits else None,
        expert_rows=rows("shard") if splits and layout.experts > 1 else None,
        tensor_parallel_group=RecordedTensorGroup(groups["tensor"]) if layout.tensor > 1 else None,
        each=layout.workers_each,
        preparation_group=group,
        spans_context=spans_context,
    )


def _stage_link(
    forward_group: Any,
    backward_group: Any,
    shared: SharedGroup | None,
    *,
    members: tuple[int, ...],
    index: int,
    recorder: FlightRecorder,
    timeout_s: float,
    staged_from: torch.device | None,
) -> StageTransport:
    """How a worker reaches the stages before and after its own: by shared memory where they have some."""
    transport: StageTransport = TorchTransport(forward_group, backward_group, worker_index=index, limit_s=timeout_s)
    if shared is not None:
        transport = SharedMemoryTransport(shared.mailboxes(), transport, worker_index=index)
    if staged_from is not None:
        transport = HostStagedTransport(transport, device=staged_from)
    return RecordedStageLink(transport, members=members, index=index, recorder=recorder)


def reduces_over_all_workers(plan: Plan) -> bool:
    """Whether the group of the whole run sums at least some of the gradients."""
    each = plan.layout.workers_each
    return each == 1 or spans_all_workers(plan) or (each == plan.layout.experts and not plan.is_local)


def spans_all_workers(plan: Plan) -> bool:
    """Whether the replica group is the whole run, context parallel workers included: there is no other axis, and
    replicas take no steps by themselves."""
    return plan.layout.workers_each == plan.layout.context > 1 and not plan.is_local


def replica_group_of(
    layout: Layout,
    *,
    worker_rank: int,
    device: torch.device,
    recorder: FlightRecorder,
    timeout_s: float,
    host: str,
    num_workers: int,
    tell: Callable[[Event], None],
    way: TensorWay = "host",
) -> tuple[ElasticGroup, list[str]]:
    """Return the group of all workers of this replica, over torch's default group, which has no others, and the host of
    each. `host` is this worker's; the run has about `num_workers` workers. `way`, `tell`: see `parallel_groups_of`."""
    name = _group_name("replica", members := workers_of(layout, worker_rank))
    recorder.join(name, members)
    on = torch.device("cpu") if way == "staged" else device
    whole: Any = Group(default_group(), device=on, objects_on=device)
    hosts: list[str] = whole.gather_objects(host)
    if len(set(hosts)) == 1 and way != "device":
        whole, reason = with_shared_memory(whole, timeout_s=timeout_s, num_local_workers=num_workers, ranks=members)
        if reason is not None and members[0] == worker_rank:
            tell(shared_memory_unavailable("workers of a replica exchange tensors", reason))
    whole = HostStagedGroup(whole, device=device) if way == "staged" else whole
    return ElasticGroup(whole, generation=0, recorder=recorder, name=name), hosts


def workers_of(layout: Layout, worker_rank: int) -> tuple[int, ...]:
    """The workers of a worker's replica."""
    first = worker_rank - worker_rank % layout.workers_each
    return tuple(range(first, first + layout.workers_each))


def default_group() -> dist.ProcessGroup:
    """torch's default process group; RuntimeError where there is none."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed has no default group")
    return group


def _second_group(mesh: Mesh, members: tuple[int, ...]) -> dist.ProcessGroup:
    """Another group of the same stages' workers, for the other direction; all workers make all of them."""
    made = {one: dist.new_group(list(one)) for one in mesh.groups("stages")}
    found = made[members]
    if not isinstance(found, dist.ProcessGroup):
        raise RuntimeError("torch.distributed made no group for the workers of this replica's stages")
    return found


def _group_name(axis: str, members: tuple[int, ...]) -> str:
    """The same on all workers of the group."""
    return f"{axis} {members[0]}-{members[-1]}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateOwner:
    """The worker of a replica that stores a tensor, as indices along the axes; None: each worker along it has a part.

    What such a tensor has only once (a count of steps, say) is stored by the first of them.
    """

    stage: int = 0
    expert: int | None = 0
    tensor: int | None = 0
    is_here: bool | None = None  # whether it is this worker, which knows it by itself; None: the indices tell
