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
    """Replicas send gradients unchanged: the bytes of their type, 4 for each fp32 number. This is the default.

    It has no fields, and raises PlanError for any that is given.

    Example::

        assert paceline.Plan(wire=paceline.Raw()) == paceline.Plan()
    """

    exact: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    feedback: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Cast(PlanPart):
    """Replicas send gradients in 16 bits, rounded to nearest: half of fp32.

    "bf16" keeps the range of fp32; "fp16" keeps more digits, but overflows above 65504. `feedback` adds the rounding
    error to the next gradients (error feedback), for 8 bytes of memory for each number. Raises PlanError for any other
    `dtype`, and without one.

    Example::

        assert str(paceline.Plan(wire=paceline.Cast(dtype="bf16"))) == "cast(dtype=bf16)"
    """

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True

    dtype: Literal["bf16", "fp16"]
    feedback: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Int8(PlanPart):
    """Replicas send gradients in 8 bits, with a scale for each 256 of them: 0.254 of fp32.

    Rounding up or down is by chance, and right on average (QSGD; Alistarh et al. 2017). `feedback` adds the rounding
    error to the next gradients (error feedback), for 8 bytes of memory for each number. Raises PlanError for any other
    field or type.

    Example::

        assert str(paceline.Plan(wire=paceline.Int8(feedback=False))) == "int8(feedback=false)"
    """

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True

    feedback: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class OneBit(PlanPart):
    """Replicas send the sign of each gradient, and the mean magnitude of each 1,024 of them: 1/31 of fp32.

    What is left out is added to the next gradients (error feedback; Seide et al. 2014, Karimireddy et al. 2019), for 8
    bytes of memory for each number. It has no fields, and raises PlanError for any that is given.

    Example::

        assert str(paceline.Plan(wire=paceline.OneBit())) == "onebit"
    """

    exact: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    feedback: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TopK(PlanPart):
    """Replicas send the largest gradients, `ratio` of each 65,536, in bf16 with their positions: `ratio` of fp32.

    Each replica sends its own to all others, so with n replicas it is n ratio / 2. What is left out is added to the
    next gradients (error feedback; Stich et al. 2018), for 8 bytes of memory for each number. Raises PlanError for a
    `ratio` outside 0 to 1.

    Example::

        assert str(paceline.Plan(wire=paceline.TopK(ratio=0.01))) == "topk(ratio=0.01)"
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
    """Replicas send, for gradients that are matrices, one factor of rank `rank` in each step; all in bf16.

    For an n x m matrix one step sends n rank numbers and the next m rank (Vogels et al. 2019; alternating factors:
    Zhang et al. 2023, "ACP-SGD"). Matrices that would shrink by less than a factor of 4 travel whole. What is left out
    is added to the next gradients (error feedback), for 8 bytes of memory for each number. Raises PlanError for a
    `rank` below 1.

    Example::

        assert str(paceline.Plan(wire=paceline.PowerSGD(rank=2))) == "powersgd(rank=2)"
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
    """Replicas send, for gradients of embeddings, only the rows that the step has touched; all else unchanged.

    Nothing is rounded or lost: the numbers are those of `Raw`. Each replica sends its rows to all others. It has no
    fields, and raises PlanError for any that is given.

    Example::

        assert str(paceline.Plan(wire=paceline.Sparse())) == "sparse"
    """

    exact: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    feedback: ClassVar[bool] = False


Wire: TypeAlias = Raw | Cast | Int8 | OneBit | TopK | PowerSGD | Sparse
