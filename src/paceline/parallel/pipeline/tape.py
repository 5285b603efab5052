"""The tape: what a model's forward does between and with its units, in order, as data.

A *call* is a call of a unit, or an operation of root-level code on something that a unit made. It belongs to a unit:
the one called, or the latest of those whose values the operation takes. What it makes are *values*, numbered in order.
What is computed from the inputs alone (masks, positions) belongs to no unit: every stage computes it.

All stages run the same code, so they meet the same calls in the same order. A stage runs its own calls, and returns
placeholders for the others: tensors of the recorded kind, without contents. The tape does not know of stages; any
partition of the units into stages can be derived from it (`stage_partition.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.parallel.meta.tensor_tree import TensorSpec

__all__ = ["NewValue", "PassedArgument", "RandomDraw", "SameStage", "Tape", "TapeCall", "TapeValue"]


class NewValue:
    """Stands in a call's recorded output for the value with this number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class PassedArgument:
    """Stands in a call's recorded output for the argument tensor at this place, which was returned as it is."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TapeValue:
    """A tensor that a unit's part of the forward makes. `has_gradient`: a gradient arrives at it from the result."""

    unit: int
    spec: TensorSpec
    has_gradient: bool
    says: str  # a description for messages


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TapeCall:
    """One call; `unit` is the index of the unit to which it belongs, in the order of first calls.

    `needs` are the values that it uses. `output` is what it returns, with `NewValue` and `PassedArgument` for tensors.
    `changed` are arguments changed in place, as (place, number of the new value, number of the old one). `left` are
    tensors that a unit leaves in attributes of its modules, as (module's name inside the unit, attribute, number).
    `hook_outputs` are outputs of modules inside the unit that their hooks hand out, as (name inside the unit, output).
    `is_open`: values come in by other ways than arguments, so placeholders must be replaced inside, too.
    """

    name: str
    unit: int
    is_unit: bool
    needs: frozenset[int]
    output: Any
    changed: tuple[tuple[int, int, int | None], ...]
    left: tuple[tuple[str, str, int], ...]
    hook_outputs: tuple[tuple[str, Any], ...] = ()
    is_open: bool
    effort: float  # by the meter of the recording: floating-point operations, for example

    @property
    def only(self) -> int | None:
        """The number of the value that it returns, if that is its only effect, as for most calls."""
        is_all = not (self.changed or self.left or self.hook_outputs)
        return self.output.number if is_all and isinstance(self.output, NewValue) else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SameStage:
    """Units `first` to `last` must be on one stage, for this reason."""

    first: int
    last: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RandomDraw:
    """Root-level code draws random numbers: after `after` unit calls, for unit `unit`, or (-1) on every stage."""

    after: int
    unit: int
    where: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tape:
    """The forward for one kind of input; `units` are the names of the called units in the order of their first calls.

    `parameters`: for each parameter's name the units in whose calls it takes part; `buffers`: the same of buffers that
    are not of units. `unused`: units that are never called, with the index of the unit beside which they are kept.
    `results`: numbers of what the forward returns.
    `queries`: functions that only read shapes and the like. `placeholders`: those that replays have made, by number,
    for reuse; None where the forward changes values in place, so that each replay needs its own. `draws` are torch's,
    as far as names tell. `draws_between` says whether root-level code draws at all, from Python's generator too, or
    could: a dropout that is 0 may grow.
    """

    units: tuple[str, ...]
    calls: tuple[TapeCall, ...]
    values: tuple[TapeValue, ...]
    results: tuple[int, ...]
    parameters: dict[str, frozenset[int]]
    buffers: dict[str, frozenset[int]]
    unused: dict[str, int]
    joints: tuple[SameStage, ...]
    draws: tuple[RandomDraw, ...]
    draws_between: bool
    queries: frozenset[Callable[..., Any]]
    placeholders: dict[int, Tensor] | None

    def costs(self) -> list[float]:
        """Return what the meter read in each unit's calls, root-level operations included."""
        costs = [0.0] * len(self.units)
        for call in self.calls:
            costs[call.unit] += call.effort
        return costs
