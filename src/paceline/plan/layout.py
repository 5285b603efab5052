"""Layout says how many copies of the model there are, and how one copy is spread over workers."""

from __future__ import annotations

import dataclasses

from paceline.config import check_fields
from paceline.errors import PlanError
from paceline.plan.part import Part

__all__ = ["Layout"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Layout(Part):
    """`replicas` copies of the model, one worker each; None: as many as the job has workers.

    A pair (least, most) makes the run elastic: replicas may be lost, join and leave while it goes on.
    """

    replicas: int | tuple[int, ...] | None = None

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

    @property
    def is_elastic(self) -> bool:
        """Whether the number of replicas may change during a run."""
        return isinstance(self.replicas, tuple)

    @property
    def workers(self) -> int | None:
        """Workers that this layout begins with, unless the job says otherwise; None when it takes any number."""
        return self.replicas[1] if isinstance(self.replicas, tuple) else self.replicas

    @property
    def workers_each(self) -> int:
        """Workers of one replica."""
        return 1

    def takes(self, workers: int) -> bool:
        """Whether a run of this layout may begin with so many workers."""
        if isinstance(self.replicas, tuple):
            return self.replicas[0] <= workers <= self.replicas[1]
        return self.replicas in (None, workers)
