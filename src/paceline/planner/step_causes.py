"""Why a step took longer than predicted, as far as the workers' own records say it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from paceline.units import duration_text

__all__ = ["REST", "WorkObserved", "cause_of"]

REST = "what is in no part"
SLOW = 1.15  # times the others' median work: one worker is slower than all others
LEAST_SHARE = 0.3  # of the difference that the slow worker's excess explains; below it is not named
CORE_WAIT = 0.1  # of the time: workers wait for cores


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkObserved:
    """`work_s`: by worker, mean seconds of a step without waiting for other workers. `core_wait`: the share of the time
    in which the typical worker's first thread was ready and had no core; None where the system does not tell.
    """

    work_s: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])
    core_wait: float | None = None


def cause_of(name: str, error_s: float, seen: WorkObserved) -> str:
    """Return what is known of a part that differs by `error_s` from its prediction, as a clause; "" if nothing is.

    `name` is a part of a worker's step log, or REST.
    """
    if error_s <= 0:
        return ""
    if name == "data":
        return "the loop waited for samples, which no prediction has"
    if name == REST:
        return "the script's own code between steps, and its records"
    if name == "communication":
        return _communication(error_s, seen.work_s)
    return _cores(seen.core_wait)


def _communication(error_s: float, work_s: Mapping[int, float]) -> str:
    if len(work_s) < 2:
        return ""
    slow = max(work_s, key=lambda worker: work_s[worker])
    others = statistics.median(seconds for worker, seconds in work_s.items() if worker != slow)
    if work_s[slow] >= SLOW * others and work_s[slow] - others >= LEAST_SHARE * error_s:
        return (
            f"the others wait for worker {slow}, which works {duration_text(work_s[slow])} a step and the others "
            f"{duration_text(others)}"
        )
    return "no worker is slower than the others over many steps, so it is the exchange itself, or hiccups of all"


def _cores(core_wait: float | None) -> str:
    if core_wait is None or core_wait < CORE_WAIT:
        return ""
    return (
        f"workers had no core in {core_wait * 100:.0f} % of the time: other processes run there, or more threads than "
        "cores"
    )
