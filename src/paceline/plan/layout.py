"""Layout says how many copies of the model there are, and how one copy is spread over workers."""

from __future__ import annotations

import dataclasses

from paceline.config import check_fields
from paceline.errors import PlanError
from paceline.plan.part import Part

__all__ = ["Layout"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Layout(Part):
    """`replicas` copies of the model, one worker each; None: as many as the job has workers."""

    replicas: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.replicas is not None and self.replicas < 1:
            raise PlanError(
                f"Layout.replicas is {self.replicas}; it must be at least 1, or None: as many as the job has workers."
            )

    @property
    def workers(self) -> int | None:
        """Workers that this layout needs in all; None when it takes any number."""
        return self.replicas
