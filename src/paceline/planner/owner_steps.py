"""What it costs that owners step whole parameters (`parallel/owner_steps`): bytes that parts travel in a step.

Each worker sends its parts of parameters and gradients to their owners, and owners send parts of new parameters back.
"""

from __future__ import annotations

__all__ = ["owner_traffic"]

TRIPS = 3  # a parameter and its gradient to the owner, the new parameter back


def owner_traffic(num_bytes: float, *, members: int) -> float:
    """Return the bytes that all members together send in a step, for so many bytes of parameters that owners step."""
    return TRIPS * num_bytes * (members - 1) / members
