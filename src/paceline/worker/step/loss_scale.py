"""The loss scale of fp16: by what losses are multiplied before backward, so that small gradients do not vanish.

fp16 has no numbers below 6e-8, and none above 65504. So losses are multiplied by as large a scale as gradients bear
(Micikevicius et al. 2018, "Mixed precision training", section 3.2). A dynamic scale is found by trying: a step whose
gradients overflow is not taken, and halves it; many steps without overflow double it. That is what torch's GradScaler
does, and DeepSpeed with its hysteresis.

The scale follows from what all workers that take a step together know of it: whether the sum of their gradients is
finite, and the loss of the whole batch. So it is equal on all of them, and nothing more is sent. Replicas that take
steps by themselves have a scale each. A step whose loss is not finite says nothing about the scale, which backward
alone sees, so it stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.plan import Compute

__all__ = ["LEAST", "LossScale", "scale_text"]

FACTOR = 2.0  # nothing is rounded by powers of two
LEAST, MOST = 1.0, 2.0**64


class LossScale:
    """The scale of one worker's losses, and what it follows from; 1 where the plan scales none."""

    def __init__(self, compute: Compute) -> None:
        self.is_used = compute.precision == "fp16"
        self.is_dynamic = self.is_used and compute.loss_scale == "dynamic"
        self.num_overflows = 0  # gradient passes, of all attempts
        self._window, self._hysteresis = compute.loss_scale_window, compute.loss_scale_hysteresis
        start = compute.loss_scale_start if compute.loss_scale == "dynamic" else compute.loss_scale
        self.value = float(start) if self.is_used else 1.0
        self._num_good = 0  # since the scale was changed, or was too large
        self._num_tolerated = 0  # overflows since it was doubled that have left it as it was

    def settled(self, loss: float | None, *, finite: bool, is_first: bool = True) -> None:
        """Note a gradient pass, on which all workers have agreed: its `loss` (None: it has none), and whether its
        gradients are `finite`. `is_first`: the first one over its batch; further ones do not count as steps."""
        if finite:
            self._num_good += is_first
            if self.is_dynamic and self._num_good >= self._window:
                self._num_good = self._num_tolerated = 0
                self.value = min(MOST, self.value * FACTOR)
        elif loss is None or math.isfinite(loss):
            self.num_overflows += self.is_used
            self._num_good = 0
            if self._num_tolerated < self._hysteresis - 1:
                self._num_tolerated += 1
            elif self.is_dynamic:
                self.value = max(LEAST, self.value / FACTOR)

    def is_too_large(self, loss: float | None, *, finite: bool) -> bool:
        """Whether gradients that are not `finite` may be the scale's doing, as is expected now and then."""
        return self.is_dynamic and self.value > LEAST and not finite and (loss is None or math.isfinite(loss))

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint or a newcomer."""
        counts = {"good": self._num_good, "tolerated": self._num_tolerated, "overflows": self.num_overflows}
        return {"scale": self.value, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned. A scale that stays is the plan's."""
        self.num_overflows = state["overflows"]
        if self.is_dynamic:
            self.value = state["scale"]
            self._num_good, self._num_tolerated = state["good"], state["tolerated"]


def scale_text(scale: float) -> str:
    """A scale in digits, all of them where it is whole: "16777216"."""
    return f"{scale:.0f}" if scale.is_integer() else f"{scale:g}"
