"""The parameters of a study: ranges and choices that Optuna proposes values of, and values that stay.

lr = { kind = "float", low = 1e-4, high = 1e-1, log = true }
width = { kind = "int", low = 16, high = 128, step = 16 }
optimizer = ["sgd", "adamw"]                  the same as { kind = "categorical", choices = [...] }
momentum = 0.9                                fixed
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from paceline import config
from paceline.errors import PlanError

__all__ = ["Categorical", "Float", "Int", "Range", "Space", "Value", "value_text"]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Value: TypeAlias = str | int | float | bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Float:
    """A number from `low` to `high`; `log`: small and large ones alike; `step`: only multiples of it above `low`."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        _check_range(self)
        if self.step is not None and not 0 < self.step < math.inf:
            raise PlanError(f"step is {self.step!r}; it must be above 0, or left out.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Int:
    """A whole number from `low` to `high`; `log`: small and large ones alike; `step`: only multiples above `low`."""

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        _check_range(self)
        if self.step < 1:
            raise PlanError(f"step is {self.step}; it must be at least 1.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Categorical:
    """One of several values."""

    choices: tuple[str | int | float | bool, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise PlanError("choices is empty; name at least one value.")
        texts = [value_text(value) for value in self.choices]
        if len(set(texts)) < len(texts):
            twice = next(text for text in texts if texts.count(text) > 1)
            raise PlanError(f"choices has {twice!r} twice; name each value once.")


Range: TypeAlias = Float | Int | Categorical


def _check_range(one: Float | Int) -> None:
    if not -math.inf < one.low <= one.high < math.inf:
        raise PlanError(f"low is {one.low!r} and high is {one.high!r}; low must not be above high, and both finite.")
    if one.log and one.low <= 0:
        raise PlanError(f"log = true needs a low above 0, and low is {one.low!r}.")
    if one.log and one.step not in (None, 1):
        raise PlanError(f"log = true and step = {one.step!r} exclude each other; leave one out.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The parameters by name, in the file's order: `ranges` that are searched, `fixed` values."""

    ranges: Mapping[str, Range]
    fixed: Mapping[str, Value]

    @property
    def log(self) -> list[str]:
        """The parameters of which small and large values are tried alike."""
        return [name for name, one in self.ranges.items() if not isinstance(one, Categorical) and one.log]

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Space:
        """Read the table `[parameters]`; raises PlanError for what is no range and no value."""
        ranges: dict[str, Range] = {}
        fixed: dict[str, Value] = {}
        for name, said in table.items():
            path = f"parameters.{name}"
            if not NAME.fullmatch(name):
                raise PlanError(f"{path}: a parameter's name has letters, digits and '_', and begins with no digit.")
            if isinstance(said, Mapping | list):
                ranges[name] = _read_range(said, path)
            elif isinstance(said, str | bool | int) or (isinstance(said, float) and math.isfinite(said)):
                fixed[name] = said
            else:
                raise PlanError(
                    f"{path} is {said!r}; give a number, a text, true or false, an array of choices, or a table, for "
                    'example { kind = "float", low = 0.0, high = 1.0 }.'
                )
        if not ranges:
            raise PlanError(
                "[parameters] has nothing to search: add a line such as "
                'lr = { kind = "float", low = 1e-4, high = 1e-1, log = true }, or choices = ["a", "b"].'
            )
        return cls(ranges=ranges, fixed=fixed)

    @property
    def names(self) -> list[str]:
        return [*self.ranges, *self.fixed]

    def example(self) -> dict[str, Value]:
        """A value for each parameter: the lowest, or the first choice."""
        firsts = {
            name: one.choices[0] if isinstance(one, Categorical) else one.low for name, one in self.ranges.items()
        }
        return {**firsts, **self.fixed}

    def table(self) -> dict[str, Any]:
        """All of it as plain data for JSON."""
        kinds = {
            name: {config.KIND: type(one).__name__.lower()} | config.to_table(one) for name, one in self.ranges.items()
        }
        return {**kinds, **self.fixed}


def value_text(value: Value) -> str:
    """Return a value as a word of a command: 0.001, 16, sgd, true."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_range(said: Mapping[str, Any] | list[Any], path: str) -> Range:
    if isinstance(said, list):
        said = {config.KIND: "categorical", "choices": said}
    try:
        found: Range = config.convert_value(said, Range, path=path, owner=Space, name=path)
    except PlanError as error:
        text = str(error)
        raise PlanError(text if text.startswith(path) else f"{path}: {text}") from None
    return found
