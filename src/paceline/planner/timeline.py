"""A predicted step as a timeline, in the form of `paceline trace`: each stage's micro-batches as the schedule has them.

Workers of other replicas, shards and tensor groups do the same at the same time, so one of each stage is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.logs.trace_events import TraceSlice
from paceline.planner.search import PricedPlan
from paceline.schedule.pipeline import BACKWARD, FORWARD, build
from paceline.schedule.pipeline_timeline import StageCost, simulate

__all__ = ["step_slices"]

BLOCKS = ("products", "attention", "moves", "launches", "head", "tensor", "context", "experts")
NAMES = {FORWARD: "forward", BACKWARD: "backward"}
MOST_MICRO = 512


def step_slices(one: PricedPlan) -> Iterator[TraceSlice]:
    """Yield the slices of a step. Forward takes a third of a micro-batch's time without recompute, as schedules count.

    Beyond 512 micro-batches only these are followed, and the rest is one slice.
    """
    axes, parts = one.case.axes, one.step.parts
    micros = min(MOST_MICRO, math.ceil(one.case.micro_batches))
    share = one.case.micro_batches * axes.chunks
    each = sum(parts.get(name, 0.0) for name in BLOCKS) / share
    cost = StageCost(
        forward=each / 3,
        backward_input=each / 3 + parts.get("recompute", 0.0) / share,
        backward_weight=each / 3,
        send=parts.get("sends", 0.0) / share / 2,
    )
    pipeline = build(axes.schedule, num_workers=axes.stages, num_micro=micros, stages_per_worker=axes.chunks)
    timeline = simulate(pipeline, cost)
    rest = (one.case.micro_batches - micros) * each * axes.chunks
    for stage, spans in enumerate(timeline.spans):
        row = f"stage worker {stage}" if axes.stages > 1 else "worker"
        for action, begin, end in spans:
            name = f"{NAMES.get(action.kind, action.kind)} {action.micro}"
            yield TraceSlice(group="predicted", row=row, name=name, begin_s=begin, duration_s=end - begin)
        end_s = timeline.makespan
        tail = {"more micro-batches": rest} | {
            name: parts.get(part, 0.0)
            for name, part in (
                ("gradients", "data"),
                ("coding", "coding"),
                ("offload", "offload"),
                ("optimizer", "optimizer"),
                ("waiting", "straggle"),
                ("other", "other"),
            )
        }
        # Sends are priced as if nothing hid them; the schedule hides what it can, so the rest is shown in one piece.
        left = one.step.step_s - end_s - sum(tail.values())
        if axes.stages > 1 and left > 1e-6 * one.step.step_s:
            tail = {"waiting for sends": left} | tail
        for name, seconds in tail.items():
            if seconds > 0:
                yield TraceSlice(group="predicted", row=row, name=name, begin_s=end_s, duration_s=seconds)
                end_s += seconds
