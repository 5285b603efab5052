"""Load balancing: a worker that stays slower than the others gets fewer micro-batches of the same global batch.

Every few steps the workers exchange their times for a micro-batch, and each computes the same shares from them.
Gradients are weighted by samples, so shares change only which worker runs a micro-batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.schedule.micro_batches import split_by_speed, split_evenly

__all__ = ["EVERY_STEPS", "LoadBalancer"]

EVERY_STEPS = 10  # steps between two comparisons
LEAST_GAIN = 0.05  # the slowest must get faster by this share, or shares stay


class LoadBalancer:
    """Measures this worker's times, and keeps those of all workers."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._measured: list[float] = []  # seconds for a micro-batch, in each step since the last comparison
        self._seconds: tuple[float, ...] | None = None  # of all workers, by index; None: equal

    def note(self, seconds: float, num_micro: int) -> None:
        """Add the time that this worker needed for a step's micro-batches."""
        if self.is_on and num_micro:
            self._measured.append(seconds / num_micro)

    def is_due(self, step: int) -> bool:
        """Whether the workers exchange their times after this step."""
        return self.is_on and step > 0 and step % EVERY_STEPS == 0

    def measured(self) -> float:
        """The typical time for a micro-batch since the last comparison; 0: none was run."""
        typical = statistics.median(self._measured) if self._measured else 0.0
        self._measured.clear()
        return typical

    def agree(self, seconds: Sequence[float], num_micro: int) -> bool:
        """Take over the times of all workers, by index; returns whether shares of `num_micro` change."""
        known = [one for one in seconds if one > 0]
        if len(known) < len(seconds):
            return False
        new = tuple(seconds)
        before, after = (
            _slowest(shares, new) for shares in (self.shares(num_micro, len(new)), split_by_speed(num_micro, new))
        )
        if after > before * (1 - LEAST_GAIN):
            return False
        self._seconds = new
        return True

    def shares(self, num_micro: int, size: int) -> tuple[range, ...]:
        """Which micro-batches of a step each worker runs, by index."""
        if self._seconds is None or len(self._seconds) != size:
            return split_evenly(num_micro, size)
        return split_by_speed(num_micro, self._seconds)

    def forget(self) -> None:
        """The members have changed: forget their times."""
        self._seconds = None
        self._measured.clear()


def _slowest(shares: Sequence[range], seconds: Sequence[float]) -> float:
    return max(len(share) * one for share, one in zip(shares, seconds, strict=True))
