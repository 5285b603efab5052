"""Reads plain data that others wrote: JSON within limits, and dataclasses whose fields have the types they declare.

A file may be damaged, and a message forged. What passes here cannot overflow, recurse without end or be of another
type than its reader expects; everything else is a ValueError, whose text names the value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "LATEST",
    "MAX_DEPTH",
    "MOST_WHOLE",
    "DataRefused",
    "finite",
    "fitted",
    "read_object",
    "shown",
    "text_of",
    "whole",
]

MAX_DEPTH = 64  # lists and objects within each other
MAX_DIGITS = 100  # of a whole number, with its sign; so it fits a float
LATEST = 1e11  # seconds since the epoch, of any moment: three thousand years from now
MOST_WHOLE = (1 << 62) - 1  # of whole numbers of runs: sums of two fit 64 bits
NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no such numbers: they travel as text

T = TypeVar("T")
Check = Callable[[Any], Any]


class DataRefused(ValueError):
    """A line is not plain data within the limits; the text says why, without the line."""


def read_object(line: str | bytes | bytearray, *, is_strict: bool = False) -> dict[str, Any]:
    """Return the JSON object that a line holds; raises DataRefused where it is none, or is nested too deeply.

    `is_strict`: also where a number is too large. Without it that is left to `whole`, `finite` and `fitted`, three
    times as fast.
    """
    try:
        text = line if isinstance(line, str) else bytes(line).decode()
        found = (STRICT if is_strict else QUICK).decode(text)
    except RecursionError:
        raise DataRefused("is nested too deeply") from None
    except _NumberRefused as refused:
        raise DataRefused(f"is not JSON that Paceline writes: a number is {refused}") from None
    except ValueError:  # not JSON, or not UTF-8
        raise DataRefused("is not JSON") from None
    if not isinstance(found, dict):
        raise DataRefused("is not a JSON object")
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(found):
        raise DataRefused("is nested too deeply")
    return found


class _NumberRefused(Exception):
    """A number that no message has."""


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _NumberRefused(f"too large ({len(digits)} digits)")
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _NumberRefused("too large")
    return number


def _constant(name: str) -> float:
    raise _NumberRefused(f"not finite ({name})")


QUICK = json.JSONDecoder(parse_constant=_constant)
STRICT = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_constant)


def _is_too_deep(found: object) -> bool:
    level: list[object] = [found]
    for _ in range(MAX_DEPTH):
        deeper = [list(one.values()) if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [inner for one in deeper for inner in one]
        if not level:
            return False
    return True


def shown(value: object, most: int = 80) -> str:
    """Return a value as an error shows it, cut off after `most` characters."""
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."


def whole(value: object, *, least: int = 0, most: int = MOST_WHOLE) -> int:
    """Return a whole number within bounds; raises ValueError for everything else, also for true and for 3.0."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{shown(value)} is not a whole number from {least} to {most}")
    return value


def finite(value: object) -> float:
    """Return a number that is neither infinite nor NaN; raises ValueError for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 <= value <= 1e300:
        raise ValueError(f"{shown(value)} is not a number")
    return value


def text_of(value: object) -> str:
    """Return a text; raises ValueError for everything else."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not text")
    return value


def fitted(kind: type[T], fields: Mapping[str, Any]) -> T:
    """Make a dataclass from the fields of a JSON object.

    Raises ValueError where one is missing, unknown, or of another type than the class declares.
    """
    checks, needed = _fields_of(kind)
    if not needed <= fields.keys() <= checks.keys():
        odd = sorted(needed - fields.keys()) or sorted(map(str, fields.keys() - checks.keys()))
        raise ValueError(f"{kind.__name__} and {shown(odd)} do not fit together")
    values: dict[str, Any] = {}
    for name, value in fields.items():
        try:
            values[name] = checks[name](value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return kind(**values)


@functools.cache
def _fields_of(kind: type[Any]) -> tuple[dict[str, Check], frozenset[str]]:
    """How the fields of a dataclass are checked, and which are needed."""
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    missing = dataclasses.MISSING
    needed = frozenset(one.name for one in fields if one.default is missing and one.default_factory is missing)
    return {one.name: _check(hints[one.name]) for one in fields}, needed


def _check(hint: Any) -> Check:
    """How a value of a declared type is checked; the check returns the value as the class has it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return functools.partial(_either, tuple(_check(one) for one in inner))
    if origin in (Sequence, list, tuple):
        return functools.partial(_listed, _check(inner[0]), tuple if origin is tuple else list)
    if origin in (Mapping, dict):
        return functools.partial(_mapped, _check(inner[1]))
    return SIMPLE[hint] if hint in SIMPLE else functools.partial(_nested, hint)


def _either(checks: Sequence[Check], value: Any) -> Any:
    for check in checks[:-1]:
        try:
            return check(value)
        except ValueError:
            continue
    return checks[-1](value)


def _listed(check: Check, kind: type[Any], value: Any) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is not a list")
    return kind(map(check, value))


def _mapped(check: Check, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is not an object")
    return {name: check(one) for name, one in value.items()}


def _nested(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is not an object")
    return fitted(kind, value)


def _number(value: Any) -> float:
    return float(value) if value in NOT_FINITE else finite(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{shown(value)} is neither true nor false")
    return value


def _nothing(value: Any) -> None:
    if value is not None:
        raise ValueError(f"{shown(value)} is not null")


SIMPLE: Mapping[Any, Check] = {
    int: functools.partial(whole, least=-MOST_WHOLE),
    float: _number,
    str: text_of,
    bool: _flag,
    type(None): _nothing,
    Path: lambda value: Path(text_of(value)),
    Any: lambda value: value,
}
