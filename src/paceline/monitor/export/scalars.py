"""The numbers of a run by name, as points over its steps: for TensorBoard and for experiment trackers.

An attempt's first 20,000 steps have a point each. Later points are the means of 10 steps, and after 500,000 steps of
100; `loss_range/least` and `loss_range/most` come with them, so that no spike disappears.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.events import Evaluated, Record, Reported, TaskUsage
from paceline.monitor.export.run_logger import ScalarPoint
from paceline.monitor.records.steps import IdleShares, Step, parts_of

__all__ = ["ScalarPoints"]

MOST_IDLE = 32  # workers that have a curve of their own
EACH, TENS = 20_000, 500_000  # steps of an attempt: until the one each has a point, until the other ten have one


class ScalarPoints:
    """Makes points from the events and steps of an attempt, thinned as its steps grow many."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._mean = _Mean()
        self._began = math.inf  # of another framework's program: when its usage was told first

    def take(self, item: Record | Step) -> list[ScalarPoint]:
        """Return the points that an event or a step completes; most events complete none."""
        if isinstance(item, Step):
            self._num_steps += 1
            if self._num_steps <= EACH:
                return [ScalarPoint(step=item.step, time=item.time, values=_scalars(item))]
            self._mean.add(item.time, item.step, _scalars(item))
            if self._mean.num >= (10 if self._num_steps <= TENS else 100):
                return [self._mean.taken()]
        elif isinstance(item.event, Evaluated):
            return [ScalarPoint(step=item.event.step, time=item.time, values=_below("eval", item.event.metrics))]
        elif isinstance(item.event, TaskUsage):
            return [self._usage(item.time, item.event)]
        elif isinstance(item.event, Reported):
            return [ScalarPoint(step=item.event.step, time=item.time, values=dict(item.event.metrics))]
        return []

    def _usage(self, when: float, usage: TaskUsage) -> ScalarPoint:
        """A task's point, by the seconds since the first one was told: its steps are not known."""
        self._began = min(self._began, when)
        values = {"cores": usage.cores, "memory_gib": usage.memory_bytes / 2**30}
        return ScalarPoint(step=int(when - self._began), time=when, values=_below(f"tasks/{usage.name}", values))

    def rest(self) -> list[ScalarPoint]:
        """Return the point of the steps that wait for others."""
        return [self._mean.taken()] if self._mean.num else []


class _Mean:
    """Scalars of steps that follow each other, on their way to one point."""

    def __init__(self) -> None:
        self.num = 0
        self._place = 0.0, 0  # time and step of the last one
        self._values: dict[str, list[float]] = {}

    def add(self, when: float, step: int, scalars: Mapping[str, float]) -> None:
        self.num += 1
        self._place = when, step
        for name, value in scalars.items():
            self._values.setdefault(name, []).append(value)

    def taken(self) -> ScalarPoint:
        """The point, and forget it: of each name the mean of its numbers; NaN where it had no other value."""
        points: dict[str, float] = {}
        for name, values in self._values.items():
            numbers = [value for value in values if not math.isnan(value)]
            points[name] = sum(numbers) / len(numbers) if numbers else math.nan
            if name == "loss" and numbers:
                points |= {"loss_range/least": min(numbers), "loss_range/most": max(numbers)}
        self.num = 0
        self._values.clear()
        when, step = self._place
        return ScalarPoint(step=step, time=when, values=points)


def _scalars(row: Step) -> dict[str, float]:
    scalars = {"loss": row.loss, **row.measured, "samples_per_second": row.samples_per_s, "progress/epoch": row.epoch}
    scalars["progress/workers"] = len(row.workers)
    scalars["noise_scale"] = row.noise_scale
    total_s = row.seconds.get("total", 0.0)
    if not row.num_samples and total_s > 0:
        scalars["steps_per_second"] = 1 / total_s
    scalars.update(_below("seconds", {**row.seconds, **parts_of(row.seconds)}))
    scalars.update(_below("idle", _idle(row)))
    return {name: value for name, value in scalars.items() if value is not None and not math.isinf(value)}


def _below(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _idle(row: Step) -> dict[str, float]:
    idle = IdleShares()
    idle.add(row)
    shares = idle.shares
    if len(shares) < 2:
        return {}
    if len(shares) > MOST_IDLE:
        return {"least": min(shares.values()), "most": max(shares.values())}
    return {f"worker_{worker}": share for worker, share in shares.items()}
