"""Where a worker stands in its replica and among the replicas, and the groups that it is in there.

The groups are those along the axes of the mesh, beside the whole run's (`Place.group`): *across*, at the same place in
each replica, who hold the same numbers and sum their gradients; *inside*, who split the rows of a replica's state;
*stages*, who have its units one after the other; *context*, who share its sequences; and *tensor*, who cut its layers.
Those of the last three run the same micro-batches. Where a layout does not cut a replica, a worker is alone in all but
across, which is everybody; so it is, too, where sequences are shared, as whoever shares them holds the whole model.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.comm.generation import Members
from paceline.comm.group import Alone, Group, WorkerGroup
from paceline.comm.ring import Ring
from paceline.comm.shared import share
from paceline.parallel.mesh import Mesh, mesh_of
from paceline.parallel.stages.link import Link, TorchLink
from paceline.plan import Layout
from paceline.worker.cutters import Cutters, Sharers
from paceline.worker.links import NotedLink

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Axes", "axes_of", "unsplit"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """One worker's groups along the axes of the mesh."""

    inside: WorkerGroup
    across: WorkerGroup
    tensor: WorkerGroup
    stages: WorkerGroup
    context: WorkerGroup
    link: Link | None = None  # between the stages' workers; None: there is one stage
    mesh: DeviceMesh | None = None  # torch's own, of one dim, over the workers inside; None: rows are not split
    cutters: Cutters | None = None  # the tensor group, as layers use it; None: layers are not cut
    sharers: Sharers | None = None  # the context group, as models use it; None: each worker has whole sequences
    shard_name: str = ""  # what the ring calls the workers inside
    each: int = 1  # workers of a replica

    @property
    def sign(self) -> int:
        """Factors whose sum over the workers inside is 0: so weighted, numbers that are equal there cancel out."""
        return 1 - self.inside.size if self.inside.index == self.inside.size - 1 else 1

    @property
    def is_split(self) -> bool:
        return self.each > 1 or self.mesh is not None

    @property
    def counts(self) -> bool:
        """Whether this worker's word counts for the micro-batches that it runs: one of those does that run the same,
        and of stages the last one, which has the losses."""
        return self.tensor.index == self.context.index == 0 and self.stages.index == self.stages.size - 1

    @property
    def writers(self) -> int:
        """How many workers write checkpoints, each what it holds: the first ones."""
        return self.each // self.context.size

    @property
    def waited_s(self) -> float:
        """Seconds that layers have waited here for the others of the replica, in all."""
        return sum(one.waited_s for one in (self.cutters, self.sharers) if one is not None)

    @property
    def num_bytes_sent(self) -> int:
        """Bytes that layers have given to others of the replica, in all."""
        return sum(one.num_bytes_sent for one in (self.cutters, self.sharers) if one is not None)

    def share_of(self, group: WorkerGroup) -> tuple[int, int]:
        """Return (index, size) of this worker among those who run different micro-batches, of the whole run's group."""
        alike = self.stages.size * self.context.size * self.tensor.size
        return group.index // alike, group.size // alike

    def close(self) -> None:
        """Let go of the transports."""
        if self.is_split:
            own = (self.inside, self.tensor, self.stages, self.context)
            for group in own if self.context.size > 1 else (*own, self.across):
                group.close()


def unsplit(group: WorkerGroup) -> Axes:
    """Return the axes of a run whose replicas are single workers."""
    return Axes(inside=Alone(), across=group, tensor=Alone(), stages=Alone(), context=Alone())


def axes_of(
    layout: Layout,
    group: WorkerGroup,
    *,
    worker_rank: int,
    device: torch.device,
    ring: Ring,
    timeout_s: float,
    is_one_host: bool,
    streams: bool = False,
) -> Axes:
    """Build the groups that a layout needs beside the whole run's; all workers must call; blocks.

    `streams`: parameters come to the device unit by unit, so there is a mesh also over a worker that is alone inside.
    """
    if layout.workers_each == 1 and not streams:
        return unsplit(group)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = mesh_of(layout, group.size)
    meeting = ring.enter("meeting", "the workers of each replica find each other")
    ring.wait(meeting)
    over_torch = init_device_mesh(device.type, tuple(mesh.sizes.values()), mesh_dim_names=tuple(mesh.sizes))
    ring.leave()
    groups: dict[str, WorkerGroup] = {}
    for axis, size in mesh.sizes.items():
        members = mesh.group(axis, worker_rank)
        groups[axis] = Alone()
        if size > 1 or axis == "shard":  # a worker alone inside may have its parameters brought unit by unit
            ring.join(_name(axis, members), members)
        if axis == "replica" and layout.context > 1:  # there is no other axis beside these two
            groups[axis] = group
        elif size > 1:
            one: Any = Group(over_torch.get_group(axis), device=device)
            if is_one_host and device.type == "cpu":
                one, _ = share(one, timeout_s=timeout_s)  # why it cannot be is told of the run's own group
            groups[axis] = Members(one, generation=0, ring=ring, name=_name(axis, members))
    cutters: Cutters | None = None
    if layout.tensor > 1:
        name = _name("tensor", mesh.group("tensor", worker_rank))
        cutters = Cutters(groups["tensor"], over_torch.get_group("tensor"), ring=ring, name=name)
    sharers: Sharers | None = None
    if layout.context > 1:
        name = _name("context", mesh.group("context", worker_rank))
        sharers = Sharers(groups["context"], over_torch.get_group("context"), ring=ring, name=name)
    link: Link | None = None
    if layout.stages > 1:
        members = mesh.group("stages", worker_rank)
        rising = over_torch.get_group("stages")
        falling = _second(mesh, members) if device.type == "cuda" else None
        index = members.index(worker_rank)
        straight = TorchLink(rising, falling, worker_index=index, limit_s=timeout_s)
        link = NotedLink(straight, members=members, index=index, ring=ring)
    return Axes(
        inside=groups["shard"],
        across=groups["replica"],
        tensor=groups["tensor"],
        stages=groups["stages"],
        context=groups["context"],
        sharers=sharers,
        link=link,
        mesh=over_torch["shard"] if layout.shard > 1 or streams else None,
        cutters=cutters,
        shard_name=_name("shard", mesh.group("shard", worker_rank)),
        each=layout.workers_each,
    )


def _second(mesh: Mesh, members: tuple[int, ...]) -> dist.ProcessGroup:
    """Another group of the same stages' workers, for what goes the other way; all workers make all of them."""
    made = {one: dist.new_group(list(one)) for one in mesh.groups("stages")}
    found = made[members]
    if not isinstance(found, dist.ProcessGroup):
        raise RuntimeError("torch.distributed made no group for the workers of this replica's stages")
    return found


def _name(axis: str, members: tuple[int, ...]) -> str:
    """The same on all workers of the group."""
    return f"{axis} {members[0]}-{members[-1]}"
