"""Chooses which worker steps which parameter: a pure function of names and shapes, the same on every worker.

The cost of a step is taken to be that of matrix products, as Newton-Schulz iterations and preconditioners make them.
The most expensive parameters come first, each to the worker with the least so far (Graham 1969: at most 4/3 of the
optimum).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["LoadTable", "step_cost"]


class LoadTable:
    """What the workers of groups have to step so far; several optimizers share one."""

    def __init__(self) -> None:
        self._loads: dict[tuple[tuple[str, int], ...], list[float]] = {}

    def place(self, shapes: Mapping[str, Sequence[int]], axes: tuple[tuple[str, int], ...]) -> dict[str, int]:
        """Return the owner of each parameter among the workers along `axes`, (name, size) each.

        Owners are numbered with the last axis running fastest. Ties are decided by names.
        """
        size = math.prod(size for _, size in axes)
        loads, chosen = self._loads.setdefault(axes, [0.0] * size), dict[str, int]()
        costs = {name: step_cost(shape) for name, shape in shapes.items()}
        for name in sorted(costs, key=lambda one: (-costs[one], one)):
            chosen[name] = owner = min(range(size), key=lambda one: (loads[one], one))
            loads[owner] += costs[name]
        return {name: chosen[name] for name in shapes}


def step_cost(shape: Sequence[int]) -> float:
    """The cost of a step, up to a factor: products of a matrix m x n with its transpose, and a pass over it."""
    numel = math.prod(shape)
    if len(shape) < 2:
        return float(numel)
    rows = shape[0]
    return float(numel) * (1 + min(rows, numel // max(rows, 1)))
