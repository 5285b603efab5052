"""Which worker is where: the arithmetic of the mesh that a layout spans, and its named axes.

Workers are numbered with the last axis fastest: those of one replica are neighbours, so that what they exchange in each
forward stays on one host where it can. A group along an axis is of the workers that differ in that place alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

from paceline.plan import Layout

__all__ = ["Mesh", "mesh_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes, the slowest first."""

    sizes: Mapping[str, int]

    @property
    def workers(self) -> int:
        return math.prod(self.sizes.values())

    def place(self, worker_rank: int) -> dict[str, int]:
        """Return the worker's place along each axis; ValueError where the mesh has no such worker."""
        if not 0 <= worker_rank < self.workers:
            raise ValueError(f"worker {worker_rank} is not in a mesh of {self.workers} workers")
        found: dict[str, int] = {}
        rest = worker_rank
        for axis in reversed(list(self.sizes)):
            rest, found[axis] = divmod(rest, self.sizes[axis])
        return {axis: found[axis] for axis in self.sizes}

    def rank(self, place: Mapping[str, int]) -> int:
        """Return the worker at a place."""
        number = 0
        for axis, size in self.sizes.items():
            number = number * size + place[axis]
        return number

    def group(self, axis: str | tuple[str, ...], worker_rank: int) -> tuple[int, ...]:
        """Return the workers along `axis`, or several, through this one, in order."""
        place, axes = self.place(worker_rank), (axis,) if isinstance(axis, str) else axis
        places = itertools.product(*(range(self.sizes[one]) for one in axes))
        return tuple(self.rank({**place, **dict(zip(axes, indices, strict=True))}) for indices in places)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups along `axis`: every worker is in one of them."""
        found = (self.group(axis, number) for number in range(self.workers))
        return tuple(dict.fromkeys(found))


def mesh_of(layout: Layout, workers: int) -> Mesh:
    """Return the mesh of a resolved layout over so many workers."""
    return Mesh(
        {
            "replica": workers // layout.workers_each,
            "shard": layout.shard,
            "experts": layout.experts,
            "stages": layout.stages,
            "context": layout.context,
            "tensor": layout.tensor,
        }
    )
