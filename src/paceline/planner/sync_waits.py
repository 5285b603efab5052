"""Waiting for each other where workers compute on processors that they share, as `paceline doctor` has measured it.

Workers come apart by the square root of the time since they last waited for each other (`doctor/sync_waits.py`). So
with n synchronisations in C seconds of compute, the waits of a step are n w sqrt(C / n) = w sqrt(n C), where w is the
wait after one second.
"""

from __future__ import annotations

import math

from paceline.plan import LocalSGD
from paceline.planner.case import Case

__all__ = ["sync_waits_s", "synchronisations"]


def sync_waits_s(case: Case, compute_s: float) -> float:
    """Return the seconds of a step with so many of compute; 0 where the device's waits are not measured."""
    wait_s = case.cluster.device.sync_wait
    if wait_s is None or case.axes.workers == 1:
        return 0.0
    return wait_s * math.sqrt(synchronisations(case) * compute_s)


def synchronisations(case: Case) -> float:
    """Return how often a worker waits for others in a step with compute since the last time."""
    axes, micros = case.axes, case.micro_batches
    blocks = max(1.0, case.model.count / axes.stages)
    found = 1.0 if axes.zero else 0.0  # gradients
    if axes.replicas > 1:
        found = max(found, 1.0 / case.sync.every if isinstance(case.sync, LocalSGD) else 1.0)
    if axes.zero == 3:
        found += 2 * blocks * micros  # a unit's gather in forward, its sum in backward
    if axes.tensor > 1:
        found += 4 * blocks * micros  # attention and feed-forward, in both passes
    if axes.context > 1:
        found += 3 * blocks * micros  # keys and values, in backward their gradients, too
    if axes.experts > 1:
        found += 4 * blocks * micros  # to the experts and back, in both passes
    if axes.stages > 1:
        found += 2 * axes.chunks * micros  # what the neighbours send
    return found
