"""What it costs that owners step whole parameters (`parallel/owner_steps`): bytes that parts travel in a step.

Each worker sends its parts of parameters and gradients to their owners, and owners send parts of new parameters back.
Along each axis that splits a parameter this is one all-to-all, and nothing hides it: gradients must be complete before,
and the next forward needs the parameters. The optimizer's own products are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.planner.case import Case
from paceline.planner.collectives import exchange_s
from paceline.planner.constants import Constants

__all__ = ["owner_steps_s", "owner_traffic"]

TRIPS = 3  # a parameter and its gradient to the owner, the new parameter back
NUMBER_BYTES = 4.0  # parameters and gradients are in fp32


def owner_traffic(num_bytes: float, sizes: Sequence[int]) -> float:
    """Return the bytes that all workers together send in a step, for so many bytes of parameters that owners step.
    `sizes`: of the axes that split them."""
    return TRIPS * num_bytes * sum((size - 1) / size for size in sizes)


def owner_steps_s(case: Case, constants: Constants) -> float:
    """Return the seconds of the exchanges in a step."""
    axes, cluster = case.axes, case.cluster
    held = TRIPS * NUMBER_BYTES * case.model.stepped_whole * case.trained_split
    if not held:
        return 0.0
    seconds = 0.0
    for size, inner in ((axes.tensor, 1), (axes.shard if axes.zero else 1, axes.tensor * axes.context)):
        seconds += exchange_s(held, size, axes.inside(size, inner, cluster.devices_per_host), cluster, constants)
    return seconds
