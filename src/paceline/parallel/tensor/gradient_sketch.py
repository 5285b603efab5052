"""What is kept of a gradient to compare it with another: its products with fixed random vectors, a line of numbers for
each dim.

The gradients of a trial would take several times the memory of its weights. Each is reduced when backward has made it,
and freed. A part of a gradient, split along one dim, has a part of that dim's numbers; where two gradients differ, so
do their products, but by chance.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = ["GradientSketch", "sketch"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientSketch:
    """`sums[d]` has the length of dim d, each number about as large as one of the gradient's own."""

    shape: tuple[int, ...]
    sums: tuple[Tensor, ...]


def sketch(gradient: Tensor) -> GradientSketch:
    """Return the sketch of one gradient, in its own precision."""
    whole = gradient.to_dense() if gradient.is_sparse else gradient
    if whole.ndim < 2:
        return GradientSketch(shape=tuple(whole.shape), sums=(whole.detach().clone(),))
    return GradientSketch(shape=tuple(whole.shape), sums=tuple(_along(whole, dim) for dim in range(whole.ndim)))


def _along(whole: Tensor, dim: int) -> Tensor:
    rows = whole.movedim(dim, 0).flatten(1)  # of two dims it is a view
    width = rows.shape[1]
    generator = torch.Generator().manual_seed(width)
    signs = torch.randint(0, 2, (width,), generator=generator) * 2 - 1
    factors = signs * (torch.rand(width, generator=generator) + 0.5) / max(1, width) ** 0.5
    return torch.mv(rows, factors.to(device=rows.device, dtype=rows.dtype))
