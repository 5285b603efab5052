"""A plan as names and values, so that two of them can be compared line by line."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from paceline import config
from paceline.errors import PlanError
from paceline.plan.plan import Plan
from paceline.units import printable

__all__ = ["plan_parts"]


@functools.lru_cache(maxsize=256)
def plan_parts(text: str) -> Mapping[str, str]:
    """Return the values of a plan's fields by dotted names, defaults too; empty where the text is no plan that this
    version reads.

    Example::

        plan_parts("replicas=2")["layout.replicas"]  # "2"
    """
    try:
        plan = Plan.parse(text)
    except (PlanError, ValueError):
        return {}
    return {name: printable(value) for name, value in _flat(config.to_table(plan), "")}


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", config.to_word(value)
