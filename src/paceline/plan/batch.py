"""Batch says how many samples make one step, and the micro-batches they are divided into."""

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

    A micro-batch is the atom of the computation. It has its own random state, sees no other one, and is always whole on
    one worker. So `micro` changes the numbers (batch-norm statistics, in-batch losses, dropout). Its default depends on
    `size` alone, so that a plan trains the same on any machine. `micro=None` means size / 8, rounded up, which keeps up
    to eight workers busy.

    `shuffle` orders each epoch by (seed, epoch). `drop_last` leaves out the epoch's last step if it would be short.
    `seed` also seeds every micro-batch. Raises PlanError for sizes below 1 and seeds outside 0 to 2**63 - 1.

    Example::

        batch = paceline.Batch(size=512, micro=8)  # samples of all workers together
        assert batch.num_micro == 64
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
