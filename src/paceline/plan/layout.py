"""Layout says how many copies of the model there are, and how one copy is spread over workers."""

from __future__ import annotations

import dataclasses
from typing import Literal

from paceline.config import check_fields
from paceline.errors import PlanError
from paceline.plan.part import Part

__all__ = ["Layout"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Layout(Part):
    """`replicas` copies of the model, each over `shard` workers; replicas=None: as many as the job's workers make.

    A pair (least, most) makes the run elastic: replicas may be lost, join and leave while it goes on.

    `shard` workers split one replica's state by rows (ZeRO, Rajbhandari et al. 2020, by torch's `fully_shard`), and
    share its micro-batches. `zero` says what stays whole on each of them, with DeepSpeed's numbers. With P bytes of
    parameters, G of gradients, O of optimizer state (Adam: O = 2 P) over s workers, and U bytes of the largest unit (a
    repeated block; what is in no block is one more), one of them holds besides activations

        zero    between steps    at most, in a step            parameters are gathered    gradients are summed
        1       (P + O) / s      (P + O) / s + P + G           once a step                once a step
        2       (P + O) / s      (P + G + O) / s + P + ~2 U    once a step                after each micro-batch
        3       (P + O) / s      (P + G + O) / s + ~3 U        twice a micro-batch        after each micro-batch

    DeepSpeed's 1 and 2 keep the whole parameters between steps, too; here they go with a step's last backward.
    """

    replicas: int | tuple[int, ...] | None = None
    shard: int = 1
    zero: Literal[1, 2, 3] = 3

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.replicas, tuple):
            if len(self.replicas) != 2 or not 1 <= self.replicas[0] <= self.replicas[1]:
                raise PlanError(
                    f"Layout.replicas is {self.replicas}; a pair is (least, most), such as (2, 8), least at least 1."
                )
        elif self.replicas is not None and self.replicas < 1:
            raise PlanError(
                f"Layout.replicas is {self.replicas}; it must be at least 1, or None: as many as the job has workers."
            )
        if self.shard < 1:
            raise PlanError(f"Layout.shard is {self.shard}; it must be at least 1: every worker holds the whole model.")
        if self.shard == 1 and self.zero != 3:
            raise PlanError(
                f"Layout.zero is {self.zero}, but shard=1 splits nothing: use Layout(shard=n, zero={self.zero}), or "
                "leave zero out."
            )

    @property
    def is_elastic(self) -> bool:
        """Whether the number of replicas may change during a run."""
        return isinstance(self.replicas, tuple)

    @property
    def workers(self) -> int | None:
        """Workers that this layout begins with, unless the job says otherwise; None when it takes any number."""
        most = self.replicas[1] if isinstance(self.replicas, tuple) else self.replicas
        return None if most is None else most * self.workers_each

    @property
    def workers_each(self) -> int:
        """Workers of one replica."""
        return self.shard

    def takes(self, workers: int) -> bool:
        """Whether a run of this layout may begin with so many workers."""
        replicas, rest = divmod(workers, self.workers_each)
        if rest or not replicas:
            return False
        if isinstance(self.replicas, tuple):
            return self.replicas[0] <= replicas <= self.replicas[1]
        return self.replicas in (None, replicas)
