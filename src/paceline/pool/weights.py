"""How much a second of each run counts: the number of runs that finish after it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.pool.facts import PoolJob

__all__ = ["LEVEL_RATIO", "expected_work", "weights"]

LEVEL_RATIO = 8.0
FIRST_LEVEL_S = 600.0


def expected_work(job: PoolJob) -> float:
    """Return the work that a run has left, in seconds on one replica: as it says, or as much as it has had."""
    return job.remaining if job.remaining is not None else max(job.attained, 1.0)


def level(job: PoolJob) -> int:
    return max(0, math.floor(math.log(max(job.attained, 1.0) / FIRST_LEVEL_S, LEVEL_RATIO)) + 1)


def weights(jobs: Mapping[str, PoolJob]) -> dict[str, float]:
    """Return the weight of each run: its priority, times the number of runs that wait for it, itself included."""
    if all(job.remaining is not None for job in jobs.values()):
        order = sorted(jobs, key=lambda name: (expected_work(jobs[name]), name), reverse=True)
    else:
        order = sorted(jobs, key=lambda name: (level(jobs[name]), -jobs[name].age, name), reverse=True)
    return {name: jobs[name].priority * (at + 1) for at, name in enumerate(order)}
