"""How long a pipeline's stages idle, in micro-batches."""

from __future__ import annotations

import functools
import math

from paceline.planner.axes import Axes
from paceline.schedule.pipeline import build
from paceline.schedule.pipeline_timeline import StageCost, simulate

__all__ = ["idle_slots"]

MOST_FOLLOWED = 256  # stages of a schedule that is followed action by action


def idle_slots(axes: Axes, micro_batches: float) -> float:
    """Return for how many micro-batches' forward and backward each stage idles in a step, if all stages cost the same.

    (stages - 1) / chunks (Narayanan et al. 2021); a third of it where the weights' part of backward fills the rest, and
    forward and both parts of backward cost the same (ZB-H1 of Qi et al. 2023); nothing at twice the memory (ZB-2p).
    With fewer micro-batches than stages, the schedule itself is followed.
    """
    if 1 <= micro_batches < axes.stages <= MOST_FOLLOWED and axes.schedule != "zero-bubble-2p":
        return _followed(axes.schedule, axes.stages, axes.chunks, math.ceil(micro_batches))
    slots = (axes.stages - 1) / axes.chunks
    return {"zero-bubble": slots / 3, "zero-bubble-2p": 0.0}.get(axes.schedule, slots)


@functools.lru_cache(maxsize=1 << 12)
def _followed(schedule: str, stages: int, chunks: int, micros: int) -> float:
    pipeline = build(schedule, num_workers=stages, num_micro=micros, stages_per_worker=chunks)
    each = 1 / (3 * chunks)
    cost = StageCost(forward=each, backward_input=each, backward_weight=each)
    return simulate(pipeline, cost).makespan - micros
