"""Where a worker stands in its replica and among the replicas, and the groups that it is in there.

Three groups: the whole run (`Place.group`), the workers of the same replica (*inside*: they split its state), and those
at the same place in each replica (*across*: they hold the same rows, and sum their gradients). Without sharding a
worker is alone inside, and across is everybody.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paceline.comm.generation import Members
from paceline.comm.group import Alone, Group, WorkerGroup
from paceline.comm.ring import Ring
from paceline.comm.shared import share
from paceline.parallel.mesh import mesh_of
from paceline.plan import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Axes", "axes_of", "unsplit"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """One worker's groups along the axes of the mesh."""

    inside: WorkerGroup
    across: WorkerGroup
    mesh: DeviceMesh | None = None  # torch's own, of one dim, over the workers inside; None: the replica is one worker
    shard_name: str = ""  # what the ring calls the workers inside
    replicas: int = 1
    each: int = 1

    @property
    def sign(self) -> int:
        """Factors whose sum over the workers inside is 0: so weighted, numbers that are equal there cancel out."""
        return 1 - self.each if self.inside.index == self.each - 1 else 1

    @property
    def is_split(self) -> bool:
        return self.mesh is not None

    def close(self) -> None:
        """Let go of the transports."""
        if self.is_split:
            self.inside.close()
            self.across.close()


def unsplit(group: WorkerGroup) -> Axes:
    """Return the axes of a run whose replicas are single workers."""
    return Axes(inside=Alone(), across=group)


def axes_of(
    layout: Layout,
    group: WorkerGroup,
    *,
    worker_rank: int,
    device: torch.device,
    ring: Ring,
    timeout_s: float,
    is_one_host: bool,
) -> Axes:
    """Build the groups that a layout needs beside the whole run's; all workers must call; blocks."""
    if layout.shard == 1:
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
        ring.join(_name(axis, members), members)
        groups[axis] = Alone()
        if size > 1:
            one: Any = Group(over_torch.get_group(axis), device=device)
            if is_one_host and device.type == "cpu":
                one, _ = share(one, timeout_s=timeout_s)  # why it cannot be is told of the run's own group
            groups[axis] = Members(one, generation=0, ring=ring, name=_name(axis, members))
    return Axes(
        inside=groups["shard"],
        across=groups["replica"],
        mesh=over_torch["shard"],
        shard_name=_name("shard", mesh.group("shard", worker_rank)),
        replicas=mesh.sizes["replica"],
        each=layout.shard,
    )


def _name(axis: str, members: tuple[int, ...]) -> str:
    """The same on all workers of the group."""
    return f"{axis} {members[0]}-{members[-1]}"
