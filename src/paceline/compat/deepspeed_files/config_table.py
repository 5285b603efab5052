"""DeepSpeed's configuration as a table: how it is read, and its values by their keys. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from paceline.errors import PlanError
from paceline.regular_files import read_regular

__all__ = ["AUTO", "count_of", "leaves_of", "load_config", "lookup", "mapping_of", "number_of", "without_auto"]

AUTO = "auto"


def load_config(source: object) -> dict[str, Any]:
    """Return a configuration as a dict: it is one, or the path of a JSON file.

    Raises PlanError for what is no JSON object, and for a key that is written twice.
    """
    if isinstance(source, Mapping):
        return dict(cast("Mapping[str, Any]", source))
    if not isinstance(source, (str, Path)):
        raise PlanError(
            f"The DeepSpeed configuration is a {type(source).__name__}; it must be a dict, or the path of a JSON file."
        )
    try:
        text = read_regular(Path(source)).decode()
    except OSError as error:
        raise PlanError(f"The DeepSpeed configuration {source} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"The DeepSpeed configuration {source} is no text in UTF-8.") from error
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"The DeepSpeed configuration {source} is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise PlanError(f"The DeepSpeed configuration {source} holds a {type(found).__name__}, and no JSON object.")
    return cast("dict[str, Any]", found)


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is written twice in one section")
        found[key] = value
    return found


def mapping_of(value: Any) -> Mapping[str, Any]:
    """A section, or an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def without_auto(params: Any) -> dict[str, Any]:
    """Options but for those that are open."""
    return {key: value for key, value in mapping_of(params).items() if value != AUTO}


def leaves_of(table: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """All keys that are no sections, with dots for the sections, and their values."""
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        key = f"{above}.{name}" if above else str(name)
        found += leaves_of(cast("Mapping[str, Any]", value), key) if isinstance(value, Mapping) else [(key, value)]
    return found


def lookup(table: Mapping[str, Any], key: str) -> Any:
    """The value of a key with dots; None where there is none."""
    found: Any = table
    for name in key.split("."):
        found = mapping_of(found).get(name)
    return found


def count_of(table: Mapping[str, Any], name: str) -> int | None:
    """A whole number of at least 1; None where it is open. Raises PlanError for other values."""
    value = table.get(name)
    if value is None or value == AUTO:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
        raise PlanError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    return int(value)


def number_of(table: Mapping[str, Any], name: str) -> float | None:
    """A number of at least 0; None where it is open. Raises PlanError for other values."""
    value = table.get(name)
    if value is None or value == AUTO:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise PlanError(f"{name} is {value!r}; it must be a number of at least 0.")
    return float(value)
