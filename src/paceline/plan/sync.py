"""Sync says how replicas agree on an update: one class for each way."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from paceline.config import check_fields
from paceline.errors import PlanError
from paceline.plan.part import Part
from paceline.units import MiB

__all__ = ["AllReduce", "Sync"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class AllReduce(Part):
    """Every replica gets the weighted sum of all gradients, in buckets that travel while backward still runs.

    `bucket_bytes` counts gradients as they are in memory, before the wire shrinks them. `algorithm="auto"` leaves the
    choice to the communication library.
    """

    algorithm: Literal["auto"] = "auto"
    bucket_bytes: int = 8 * MiB

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bucket_bytes < 1:
            raise PlanError(
                f"AllReduce.bucket_bytes is {self.bucket_bytes}; it must be at least 1 (the default is {8 * MiB})."
            )


Sync: TypeAlias = AllReduce
