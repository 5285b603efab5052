"""What is kept of a gradient to compare it with another: its products with fixed random vectors, a line of numbers for
each dim.

The gradients of a trial would take several times the memory of its weights. Each is reduced when backward has made it,
and freed. A part of a gradient, split along one dim, has a part of that dim's numbers; where two gradients differ, so
do their products, but by chance.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["GradientSketch", "sketch", "sketched_gradients"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientSketch:
    """`sums[d]` has the length of dim d, each number about as large as one of the gradient's own."""

    shape: tuple[int, ...]
    sums: tuple[Tensor, ...]

    def __add__(self, other: GradientSketch) -> GradientSketch:
        """The sketch of the sum of two gradients of one shape."""
        sums = tuple(one + more for one, more in zip(self.sums, other.sums, strict=True))
        return dataclasses.replace(self, sums=sums)

    def over(self, count: int) -> GradientSketch:
        """The sketch of a gradient over `count`."""
        return dataclasses.replace(self, sums=tuple(one / count for one in self.sums))

    def pairs(
        self, whole: GradientSketch, dim: int | None, ranges: Sequence[tuple[int, int]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Numbers of this sketch with those of `whole` that they must equal. `dim`: along which this gradient is a
        part, `ranges` of it; None: it is a whole one."""
        both = list(zip(self.sums, whole.sums, strict=True))
        if dim is None:
            return both
        own, others = both[dim]
        return [(own, torch.cat([others[start:end] for start, end in ranges]))]


def sketch(gradient: Tensor) -> GradientSketch:
    """Return the sketch of one gradient, in its own precision."""
    whole = gradient.to_dense() if gradient.is_sparse else gradient
    if whole.ndim < 2:
        return GradientSketch(shape=tuple(whole.shape), sums=(whole.detach().clone(),))
    return GradientSketch(shape=tuple(whole.shape), sums=tuple(_along(whole, dim) for dim in range(whole.ndim)))


def sketched_gradients(model: nn.Module) -> dict[str, GradientSketch]:
    """Have the next backward leave the sketches of parameters' gradients here, by name, in place of the gradients."""
    found: dict[str, GradientSketch] = {}
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    # In one piece: small ones that stay, between gradients that go, would keep the C library from using their memory
    # for the next.
    lengths = {name: list(one.shape) if one.ndim > 1 else [one.numel()] for name, one in trained.items()}
    each = [length for some in lengths.values() for length in some]
    pieces = iter(torch.empty(sum(each), dtype=torch.float64).split(each))
    rooms = {name: tuple(next(pieces) for _ in some) for name, some in lengths.items()}

    def reduce(name: str, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        made = sketch(parameter.grad)
        parameter.grad = None
        if name in found:  # recomputed layers have a backward of their own
            made = found[name] + made
        for room, one in zip(rooms[name], made.sums, strict=True):
            room.copy_(one)
        found[name] = dataclasses.replace(made, sums=rooms[name])

    for name, one in trained.items():
        one.register_post_accumulate_grad_hook(functools.partial(reduce, name))
    return found


def _along(whole: Tensor, dim: int) -> Tensor:
    rows = whole.movedim(dim, 0).flatten(1)  # of two dims it is a view
    width = rows.shape[1]
    generator = torch.Generator().manual_seed(width)
    signs = torch.randint(0, 2, (width,), generator=generator) * 2 - 1
    factors = signs * (torch.rand(width, generator=generator) + 0.5) / max(1, width) ** 0.5
    return torch.mv(rows, factors.to(device=rows.device, dtype=rows.dtype))
