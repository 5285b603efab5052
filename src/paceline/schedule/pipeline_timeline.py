"""What a pipeline schedule costs: when each action begins and ends, how long workers idle, and the ideal by formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.schedule.pipeline import BACKWARD, BACKWARD_INPUT, FORWARD, Action, Pipeline, StageMessage, made, needed

__all__ = ["PipelineTimeline", "StageCost", "ideal_bubble_share", "simulate"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """Seconds that one micro-batch takes one stage; `send` is what its values, or their gradients, take to arrive."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    send: float = 0.0

    def of(self, kind: str) -> float:
        """Seconds of an action of this kind."""
        if kind == FORWARD:
            return self.forward
        if kind == BACKWARD:
            return self.backward_input + self.backward_weight
        return self.backward_input if kind == BACKWARD_INPUT else self.backward_weight


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimeline:
    """When each worker does what: `spans[w]` holds (action, begin, end), in seconds."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first begin to the last end."""
        return max((end for spans in self.spans for _, _, end in spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of work, by worker."""
        return tuple(sum(end - begin for _, begin, end in spans) for spans in self.spans)

    @property
    def bubble_share(self) -> float:
        """The part of all workers' time in which they have nothing to do, between 0 and 1."""
        return 1 - sum(self.busy) / (self.makespan * len(self.spans)) if self.makespan else 0.0


def simulate(pipeline: Pipeline, costs: Sequence[StageCost] | StageCost) -> PipelineTimeline:
    """Follow a schedule that `problems` finds right; `costs`: one for each stage, or one for all.

    Messages to another worker take the sender's `send`, during which both compute on; within a worker they take none.
    """
    if isinstance(costs, StageCost):
        costs = [costs] * pipeline.num_stages
    if len(costs) != pipeline.num_stages:
        raise ValueError(f"{len(costs)} costs were given for {pipeline.num_stages} stages. Give one for each stage.")
    arrival: dict[StageMessage, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in pipeline.orders]
    clock = [0.0] * pipeline.num_workers
    moved = True
    while moved:
        moved = False
        for worker_index, order in enumerate(pipeline.orders):
            while len(spans[worker_index]) < len(order):
                action = order[len(spans[worker_index])]
                message = needed(action, pipeline.num_stages)
                if message and message not in arrival:
                    break
                begin = max(clock[worker_index], arrival[message] if message else 0.0)
                clock[worker_index] = end = begin + costs[action.stage].of(action.kind)
                spans[worker_index].append((action, begin, end))
                if sent := made(action, pipeline.num_stages):
                    away = pipeline.worker_of(sent.to) != worker_index
                    arrival[sent] = end + (costs[action.stage].send if away else 0.0)
                moved = True
    return PipelineTimeline(spans=tuple(map(tuple, spans)))


def ideal_bubble_share(pipeline: Pipeline, cost: StageCost | None = None) -> float:
    """The bubble's share when all stages cost the same and sending costs nothing, by the papers' formulas.

    With n workers, m micro-batches, v stages on each worker, and F, I, W of one worker's whole part of a micro-batch:
    gpipe and 1f1b idle (n-1)(F+I+W) (GPipe, section 2.3: a share of (n-1)/(m+n-1); PipeDream-2BW's flush is the same);
    interleaved a v-th of it (Narayanan et al. 2021, section 2.2); zero-bubble (n-1)(F+I-W) (Qi et al. 2023, table 1,
    ZB-H1). Formulas of the last two hold where m is a multiple of n (interleaved) or at least n (zero-bubble).
    """
    cost = cost or StageCost()
    v, n, m = pipeline.stages_per_worker, pipeline.num_workers, pipeline.num_micro
    forward, inputs, weights = v * cost.forward, v * cost.backward_input, v * cost.backward_weight
    idle = (n - 1) * (forward + inputs + weights) / v
    if pipeline.name == "zero-bubble":
        idle = (n - 1) * max(0.0, forward + inputs - weights)
    return idle / (idle + m * (forward + inputs + weights)) if n > 1 else 0.0
