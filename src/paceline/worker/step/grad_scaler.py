"""torch's GradScaler in the plain loop: a step whose gradients overflow is skipped on all workers, by each scaler.

Gradients of a pass that is not taken are removed on all workers. A scaler that finds none at all raises an error, and
one that is to lower its scale must see that they were not finite. So it is shown infinite ones.
"""

from __future__ import annotations

import gc

import torch

__all__ = ["has_grad_scaler"]


def has_grad_scaler() -> bool:
    """Whether the user's code has an enabled GradScaler. Slow: for steps that are skipped."""
    return any(isinstance(one, torch.amp.GradScaler) and one.is_enabled() for one in gc.get_objects())
