"""The steps of a program, as events of the run: `paceline status` and the live page show that it comes further.

The steps of the optimizer that was made first count. A program's losses and samples are not known here.
"""

from __future__ import annotations

import time
from typing import Any

from paceline.compat.horovod import session as sessions
from paceline.events import StepDone

__all__ = ["begin_at", "count", "step_done"]

_first: list[Any] = []  # the optimizer that counts: none or one
_counted = 0
_ended_s = 0.0  # when its last step ended


def count() -> int:
    """Return how many steps were taken, in attempts before this one as well."""
    return _counted


def begin_at(step: int) -> None:
    """Go on counting from here."""
    global _counted
    _counted = step


def step_done(optimizer: Any, *, waited_s: float, stepped_s: float) -> None:
    """An optimizer has taken a step, for which it waited `waited_s` for gradients and computed `stepped_s` seconds."""
    global _counted, _ended_s
    if not _first:
        _first.append(optimizer)
    if _first[0] is not optimizer:
        return
    now = time.perf_counter()
    total_s = now - _ended_s if _ended_s else waited_s + stepped_s
    _ended_s, _counted = now, _counted + 1
    if sessions.is_open():
        seconds = {
            "data": 0.0,
            "compute": max(0.0, total_s - waited_s - stepped_s),
            "communication": waited_s,
            "optimizer": stepped_s,
            "total": total_s,
        }
        sessions.current_session().emit(
            StepDone(step=_counted, epoch=0, num_samples=0, loss=None, metrics={}, seconds=seconds)
        )
