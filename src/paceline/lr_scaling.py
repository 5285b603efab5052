"""Rules of thumb for the learning rate of another batch size; nothing calls them but the user."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["scaled_lr"]


def scaled_lr(lr: float, *, batch: int, reference_batch: int, rule: Literal["linear", "sqrt"]) -> float:
    """Return the learning rate for batches of `batch` samples, where `lr` was found with `reference_batch`.

    "linear" is for SGD (Goyal et al. 2017, section 2.1): so many times the batch, so many times the rate. "sqrt" is for
    Adam and its like (Malladi et al. 2022, definition 5.2), whose other settings it leaves as they are. Both hold for
    batches well below the gradient noise scale, and after a warm-up. Raises ValueError.
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
