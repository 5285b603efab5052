"""What a loss function may return, and whether a step's loss is a spike.

A loss is the mean over a micro-batch, or (sum, count).

A *spike* is a loss far above those of the steps before it. The judgement is a pure function of the losses of the steps
that were taken. They are those of the global batch, equal on all workers, so all judge alike without communication.
Median and median absolute deviation tolerate up to half of the window being outliers; a falling loss makes the estimate
too high rather than too low. Spikes do not enter the window: the next one is measured against good steps.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.plan import Guard

__all__ = [
    "WEIGHT_UNIT",
    "LossLike",
    "LossSpike",
    "LossSpikeDetector",
    "as_weight",
    "halves_of",
    "loss_and_weight",
    "single",
    "spike_limit",
    "split_loss",
    "weighed",
]

LossLike = Tensor | tuple[Tensor, Any] | list[Any]

WEIGHT_UNIT = 4096
NORMAL = 1.4826  # median absolute deviation -> standard deviation, for normal noise
FLAT = 0.01  # of the median: on a plateau without noise any rise would be a spike
TINY = 1e-6  # the same where losses are about 0


def split_loss(loss: LossLike) -> tuple[Any, Any]:
    """Return (value, count), the count None for a mean; raises ValueError for anything else."""
    if not isinstance(loss, (tuple, list)):
        return loss, None
    if len(loss) != 2:
        raise ValueError(f"the loss returned {len(loss)} values; return the mean, or (sum, count)")
    value, count = loss
    if isinstance(count, Tensor) and count.numel() != 1:
        raise ValueError(f"the loss returned a count of shape {list(count.shape)}; return the mean, or (sum, count)")
    return value, count


def as_weight(count: Any) -> Tensor | float:
    """Return a count as a number, or as a tensor without dims, without a device synchronization."""
    return count.detach().double().reshape(()) if isinstance(count, Tensor) else float(count)


def single(value: Any) -> Tensor:
    """Return a loss's value as a tensor without dims, of at least single precision; raises where it is none."""
    if not isinstance(value, Tensor):
        raise TypeError(f"the loss is a {type(value).__name__}; it must be a tensor, or (sum, count)")
    if value.numel() != 1:
        raise ValueError(
            f"the loss has shape {list(value.shape)}; return its mean over the micro-batch, or (sum, count)"
        )
    value = value.reshape(())
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossSpike:
    """A step whose loss, or gradient, is so bad that the optimizer must not step."""

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
    """Keeps the losses of the steps that were taken, for each series, and judges the next one.

    A series has one gradient pass over each batch of a stream: the two losses of a GAN are two series.
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
        """Note the verdict of `judge`, once all workers have it: until then the step may be done again."""
        if self._guard.on_spike == "none":
            return
        if spike is not None:
            self._in_a_row[series] = spike.in_a_row
        elif loss is not None and math.isfinite(loss):
            self._in_a_row[series] = 0
            self._losses.setdefault(series, deque(maxlen=self._guard.window)).append(loss)

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint, a newcomer or a snapshot."""
        return {"losses": {name: list(known) for name, known in self._losses.items()}, "in_a_row": {**self._in_a_row}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        window = self._guard.window
        self._losses = {name: deque(known, maxlen=window) for name, known in state["losses"].items()}
        self._in_a_row = dict(state["in_a_row"])


def spike_limit(losses: Collection[float], *, factor: float) -> float:
    """Return the limit that the next loss is expected not to exceed."""
    median = statistics.median(losses)
    deviation = statistics.median([abs(loss - median) for loss in losses])
    return median + factor * max(NORMAL * deviation, FLAT * abs(median), TINY)


def halves_of(loss: float, weight: float) -> tuple[float, float, float, float]:
    """Numbers whose sums stay precise in single precision: a loss and its rest, a weight as units and rest."""
    with np.errstate(over="ignore"):
        rounded = float(np.float32(loss))
    units = weight // WEIGHT_UNIT
    return rounded, loss - rounded if math.isfinite(rounded) else 0.0, units, weight - units * WEIGHT_UNIT


def loss_and_weight(losses: Sequence[tuple[Tensor, Tensor | float, bool]]) -> tuple[float, float]:
    """The sums of weighted losses and of weights over this worker's micro-batches."""
    if not losses:
        return 0.0, 0.0
    values = torch.stack([value.double() for value, _, _ in losses]).tolist()  # one synchronisation for all
    loss_sum = weight_sum = 0.0
    for value, (_, weight, is_mean) in zip(values, losses, strict=True):
        number = float(weight)
        if 0 < number < 1:
            raise ValueError(
                f"the loss returned a pair whose second part is {number:.4g}: that is the count (of samples or "
                "tokens) that the "
                "sum is over. Return the mean alone, or (sum, count); report other values by worker.report()"
            )
        loss_sum += value * (number if is_mean else 1.0)
        weight_sum += number
    return loss_sum, weight_sum


def weighed(loss: LossLike, num_micro: int, num_step: int) -> tuple[Tensor, Tensor | float | None, float]:
    """Return (value to differentiate, weight or None for "per real sample", factor for the value)."""
    value, count = split_loss(loss)
    if count is None:
        return single(value), None, num_micro / num_step
    return single(value), as_weight(count), 1.0 / num_step
