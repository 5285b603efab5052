"""Compute says how a worker does its arithmetic, and what it keeps in memory for it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from paceline.config import check_fields
from paceline.plan.part import Part

__all__ = ["Compute"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Compute(Part):
    """`precision` of forward and backward, what to `recompute` in backward, and whether to `compile` the model.

    precision "bf16" computes in bf16 and keeps the weights and the optimizer in fp32; "fp64" keeps everything in
    fp64: slow, the reference that parity compares with. recompute "blocks" keeps only the inputs of the model's
    repeated blocks.
    """

    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    recompute: Literal["none", "blocks"] = "none"
    compile: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
