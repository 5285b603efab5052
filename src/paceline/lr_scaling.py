"""Rules of thumb for the learning rate of another batch size; nothing calls them but the user."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["scaled_lr"]


def scaled_lr(lr: float, *, batch: int, reference_batch: int, rule: Literal["linear", "sqrt"]) -> float:
    """Return the learning rate for batches of `batch` samples, where `lr` was found with `reference_batch` samples.

    "linear" is for SGD: `lr * batch / reference_batch` (Goyal et al. 2017, section 2.1). "sqrt" is for Adam and its
    like: `lr * sqrt(batch / reference_batch)` (Malladi et al. 2022, definition 5.2); it leaves Adam's other settings as
    they are. Both hold for batches well below the gradient noise scale, and after a warm-up. Nothing moves between
    workers. Raises ValueError for a batch below 1 sample, a negative or infinite rate, and an unknown rule.

    Example::

        assert paceline.scaled_lr(0.1, batch=1024, reference_batch=256, rule="linear") == 0.4
        assert paceline.scaled_lr(3e-4, batch=1024, reference_batch=256, rule="sqrt") == 6e-4
    """
    for name, size in (("batch", batch), ("reference_batch", reference_batch)):
        if size < 1:
            raise ValueError(f"scaled_lr({name}={size}): a batch has at least 1 sample")
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"scaled_lr({lr}): a learning rate is a number from 0 on")
    match rule:
        case "linear":
            return lr * batch / reference_batch
        case "sqrt":
            return lr * math.sqrt(batch / reference_batch)
        case _:
            raise ValueError(f"scaled_lr(rule={rule!r}): rules are 'linear' (SGD) and 'sqrt' (Adam and its like)")
