"""Wire says what travels between replicas: one class for each encoding.

Each class also says three things that hold for all its values: `exact`, whether the sums are those of the gradients
themselves; `elementwise`, whether any slice of a parameter can be sent by itself; and `feedback`, whether what could
not be sent is added to what is sent next (with some it is a field).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, TypeAlias

from paceline.config import check_fields
from paceline.errors import PlanError
from paceline.plan.part import PlanPart

__all__ = ["Cast", "Int8", "OneBit", "PowerSGD", "Raw", "Sparse", "TopK", "Wire"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Raw(PlanPart):
    """Gradients travel as they are."""

    exact: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    feedback: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Cast(PlanPart):
    """Gradients travel in 16 bits, half of fp32.

    "bf16" keeps the range of fp32; "fp16" keeps more digits, but overflows above 65504. `feedback` sends later what
    rounding has left behind: 8 bytes of memory for each number.
    """

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True

    dtype: Literal["bf16", "fp16"]
    feedback: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Int8(PlanPart):
    """Gradients travel in 8 bits with a scale for each 256 of them, rounded up or down by chance; 0.254 of fp32.

    `feedback` sends later what rounding has left behind: 8 bytes of memory for each number.
    """

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True

    feedback: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class OneBit(PlanPart):
    """The sign of each gradient travels, and the mean magnitude of each 1,024 of them; 1/31 of fp32.

    What is left behind is sent later: 8 bytes of memory for each number.
    """

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    feedback: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TopK(PlanPart):
    """The largest gradients travel, `ratio` of each 65,536, and where they are; `ratio` of fp32.

    What is left behind is sent later: 8 bytes of memory for each number.
    """

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    feedback: ClassVar[bool] = True

    ratio: float

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.ratio <= 1:
            raise PlanError(f"TopK.ratio is {self.ratio}; it must be above 0 and at most 1, for example 0.01.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PowerSGD(PlanPart):
    """Of gradients that are matrices one factor of rank `rank` travels in each step, in bf16; all else in bf16.

    What is left behind is sent later: 8 bytes of memory for each number.
    """

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    feedback: ClassVar[bool] = True

    rank: int = 4

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rank < 1:
            raise PlanError(f"PowerSGD.rank is {self.rank}; it must be at least 1 (the default is 4).")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Sparse(PlanPart):
    """Of gradients of embeddings only the rows travel that the step has touched; all else as it is. Nothing is lost."""

    exact: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    feedback: ClassVar[bool] = False


Wire: TypeAlias = Raw | Cast | Int8 | OneBit | TopK | PowerSGD | Sparse
