"""How many workers split what, and how many of a group are on one host."""

from __future__ import annotations

import dataclasses
from typing import Literal

from paceline.errors import PlanError
from paceline.plan import Layout

__all__ = ["Axes", "Schedule"]

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2p"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """A layout with all numbers known. `chunks` are `Layout.stages_per_worker`.

    `zero` is what the workers of `shard` split (0: nothing; they are replicas). Groups are laid out innermost first:
    tensor, context, shard and experts, replicas, stages.
    """

    replicas: int = 1
    shard: int = 1
    zero: Literal[0, 1, 2, 3] = 3
    tensor: int = 1
    sequence: bool = False
    stages: int = 1
    chunks: int = 1
    schedule: Schedule = "1f1b"
    context: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        for name in ("replicas", "shard", "tensor", "stages", "chunks", "context", "experts"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    @classmethod
    def of(cls, layout: Layout, workers: int) -> Axes:
        """Return the axes of a layout on so many workers; PlanError if it does not take them."""
        if not layout.takes(workers):
            raise PlanError(
                f"The layout {layout} does not take {workers} workers: {layout.workers_each} make a replica."
            )
        return cls(
            replicas=workers // layout.workers_each,
            shard=layout.shard,
            zero=layout.zero if layout.shard > 1 else 0,
            tensor=layout.tensor,
            sequence=layout.sequence,
            stages=layout.stages,
            chunks=layout.stages_per_worker,
            schedule=layout.schedule,
            context=layout.context,
            experts=layout.experts,
        )

    @property
    def workers(self) -> int:
        return self.data * self.context * self.tensor * self.stages

    @property
    def data(self) -> int:
        """Workers that run micro-batches of their own."""
        return self.replicas * self.shard * self.experts

    def inside(self, size: int, stride: int, per_host: int) -> int:
        """How many workers of a group of `size` share a host, where neighbors in it are `stride` workers apart."""
        return max(1, min(size, per_host // min(stride, per_host)))
