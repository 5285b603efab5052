"""`deepspeed.checkpointing`: activation checkpointing, by torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

__all__ = ["checkpoint", "configure", "is_configured", "reset"]


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function, and run it again in backward instead of keeping what it computes."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(*args: Any, **options: Any) -> None:
    """Partitioned and offloaded activations are not here: compute(recompute=...) of the plan says what is kept."""


def is_configured() -> bool:
    """There is nothing to configure."""
    return True


def reset() -> None:
    """Nothing is kept between steps."""
