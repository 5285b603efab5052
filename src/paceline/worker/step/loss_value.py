"""What a user's loss may be: the mean over a micro-batch, or (sum, count)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LossLike", "as_weight", "single", "split_loss"]

LossLike = Tensor | tuple[Tensor, Any] | list[Any]


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
    """Return a count as a number, or as a tensor of no dims, for which nothing waits."""
    return count.detach().double().reshape(()) if isinstance(count, Tensor) else float(count)


def single(value: Any) -> Tensor:
    """Return a loss's value as a tensor of no dims, of at least single precision; raises where it is none."""
    if not isinstance(value, Tensor):
        raise TypeError(f"the loss is a {type(value).__name__}; it must be a tensor, or (sum, count)")
    if value.numel() != 1:
        raise ValueError(
            f"the loss has shape {list(value.shape)}; return its mean over the micro-batch, or (sum, count)"
        )
    value = value.reshape(())
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
