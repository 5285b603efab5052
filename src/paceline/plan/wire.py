"""Wire says what travels between replicas: one class for each encoding."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from paceline.config import check_fields
from paceline.plan.part import Part

__all__ = ["Cast", "Raw", "Wire"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Raw(Part):
    """Gradients travel as they are."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Cast(Part):
    """Gradients travel in 16 bits, half of fp32.

    "bf16" keeps the range of fp32; "fp16" keeps more digits, but overflows above 65504.
    """

    dtype: Literal["bf16", "fp16"]

    def __post_init__(self) -> None:
        check_fields(self)


Wire: TypeAlias = Raw | Cast
