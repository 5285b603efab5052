"""Batch says how many samples make one step, and the pieces they are cut into."""

from __future__ import annotations

import dataclasses

from paceline.config import check_fields
from paceline.errors import PlanError
from paceline.plan.part import PlanPart

__all__ = ["Batch"]

MICROS_BY_DEFAULT = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Batch(PlanPart):
    """The *global* batch: `size` samples a step over all workers, in micro-batches of `micro` (the last may be short).

    A micro-batch is the atom of the computation: it has its own random state and sees no other one, and workers are
    only dealt whole micro-batches. So `micro` changes the numbers (batch-norm statistics, in-batch losses, dropout),
    and its default must be a function of `size` alone: if it followed the number of workers, the same plan would
    train differently on another machine. `micro=None` means size / 8, rounded up, which keeps up to eight workers
    busy.

    `shuffle` orders each epoch by (seed, epoch); `drop_last` leaves out the epoch's last step when it would be short.
    `seed` also seeds every micro-batch.
    """

    size: int = 32
    micro: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("size", "micro"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"Batch.{name} is {value}; it must be at least 1 sample.")
        if not 0 <= self.seed < 2**63:
            raise PlanError(f"Batch.seed is {self.seed}; it must be from 0 to 2**63 - 1.")

    @property
    def resolved_micro(self) -> int:
        """Samples of a micro-batch: `micro`, or its default."""
        return self.micro if self.micro is not None else -(-self.size // MICROS_BY_DEFAULT)

    @property
    def num_micro(self) -> int:
        """Micro-batches of a full step, over all workers."""
        return -(-self.size // self.resolved_micro)
