"""A worker's look at its own gradients, before they are summed: whose were not finite can only be said there.

The sum is not finite on all workers, whoever of them broke it. A gradient is looked at by its largest element, which is
kept as a tensor until somebody asks: on a GPU nobody waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["OwnLook", "is_finite"]


class OwnLook:
    """What one worker's gradients of one walk were, in the order in which backward made them."""

    def __init__(self) -> None:
        self._largest: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Forget the walk before."""
        self._largest.clear()

    def at(self, name: str, gradient: Tensor) -> None:
        """Look at a parameter's gradient, if it was not yet."""
        if name not in self._largest and gradient.numel():
            self._largest[name] = _largest(gradient)

    def broken(self) -> tuple[str, ...]:
        """The parameters whose gradients were not finite, the one that backward reached first at the front."""
        return tuple(name for name, largest in self._largest.items() if not bool(torch.isfinite(largest)))


def is_finite(gradient: Tensor) -> bool:
    """Whether all elements are."""
    return not gradient.numel() or bool(torch.isfinite(_largest(gradient)))


def _largest(gradient: Tensor) -> Tensor:
    """The absolute value of the largest element, NaN where there is any; of a sparse gradient, of those that it has."""
    elements = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.linalg.vector_norm(elements, float("inf")) if elements.numel() else elements.new_zeros(())
