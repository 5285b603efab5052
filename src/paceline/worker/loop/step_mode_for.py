"""Chooses how a worker takes its steps. No other module of the loop asks the plan for its mode.

Only synchronous steps, which most runs take, are imported before they are chosen.
"""

from __future__ import annotations

from paceline.plan import Plan
from paceline.worker.loop.step_mode import StepMode
from paceline.worker.loop.synchronous import Synchronous

__all__ = ["step_mode_for"]


def step_mode_for(plan: Plan) -> type[StepMode]:
    """Return the mode in which workers take steps under this plan."""
    if plan.is_asynchronous:
        from paceline.worker.loop.asynchronous import Asynchronous

        return Asynchronous
    if plan.is_local:
        from paceline.worker.loop.local_rounds import LocalRounds

        return LocalRounds
    return Synchronous
