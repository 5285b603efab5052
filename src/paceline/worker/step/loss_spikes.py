"""Says whether a step's loss is a spike: above what the losses before it let expect.

A pure function of the losses of the steps that were taken. They are those of the global batch, equal on all workers,
so all judge alike without a word. Median and median absolute deviation bear up to half of the window being odd; a
falling loss makes the estimate too high rather than too low. Spikes do not enter the window: the next one is measured
against good steps.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from paceline.plan import Guard

__all__ = ["LossSpike", "LossSpikeDetector", "spike_limit"]

NORMAL = 1.4826  # median absolute deviation -> standard deviation, for normal noise
FLAT = 0.01  # of the median: on a plateau without any noise the least rise would be a spike
TINY = 1e-6  # the same where losses have come to nothing


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossSpike:
    """A step that is not to be taken."""

    loss: float
    limit: float | None  # the loss was expected to be at most this; None: it, or a gradient, is not finite
    in_a_row: int  # of its series, with this one

    def __str__(self) -> str:
        if self.limit is not None:
            return f"loss {self.loss:.4g}, expected at most {self.limit:.4g}"
        if math.isfinite(self.loss):
            return f"loss {self.loss:.4g}, but its gradients are not finite"
        return f"loss {self.loss}"


class LossSpikeDetector:
    """Remembers the losses of the steps that were taken, of each series by itself, and judges the next one.

    A series is what one walk over the batches of one stream yields: the two losses of a GAN are two series.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._losses: dict[str, deque[float]] = {}
        self._in_a_row: dict[str, int] = {}  # spikes

    def judge(self, series: str, loss: float | None, *, finite: bool) -> LossSpike | None:
        """Return the spike that this step is, or None. `loss` is None where the step has none (a count of 0)."""
        if self._guard.on_spike == "none":
            return None
        in_a_row = self._in_a_row.get(series, 0) + 1
        if not finite or (loss is not None and not math.isfinite(loss)):
            return LossSpike(loss=math.nan if loss is None else loss, limit=None, in_a_row=in_a_row)
        known = self._losses.get(series, ())
        if loss is None or len(known) < self._guard.window // 2:
            return None
        limit = spike_limit(known, factor=self._guard.factor)
        return LossSpike(loss=loss, limit=limit, in_a_row=in_a_row) if loss > limit else None

    def settled(self, series: str, loss: float | None, spike: LossSpike | None) -> None:
        """Note what `judge` said, once all workers know it: until then the step may be done again."""
        if self._guard.on_spike == "none":
            return
        if spike is not None:
            self._in_a_row[series] = spike.in_a_row
        elif loss is not None and math.isfinite(loss):
            self._in_a_row[series] = 0
            self._losses.setdefault(series, deque(maxlen=self._guard.window)).append(loss)

    def plain(self) -> dict[str, Any]:
        """What it knows, for a checkpoint, a newcomer or a snapshot."""
        return {"losses": {name: list(known) for name, known in self._losses.items()}, "in_a_row": {**self._in_a_row}}

    def fill(self, state: Mapping[str, Any]) -> None:
        """Know what `plain` gave."""
        window = self._guard.window
        self._losses = {name: deque(known, maxlen=window) for name, known in state["losses"].items()}
        self._in_a_row = dict(state["in_a_row"])


def spike_limit(losses: Collection[float], *, factor: float) -> float:
    """Return what the next loss is expected not to exceed."""
    median = statistics.median(losses)
    deviation = statistics.median([abs(loss - median) for loss in losses])
    return median + factor * max(NORMAL * deviation, FLAT * abs(median), TINY)
