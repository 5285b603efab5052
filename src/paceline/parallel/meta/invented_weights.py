"""Numbers in the place of weights whose bytes have not come yet, while a model is only looked at.

Checks run a model on a small input, to see what it does. Were that done with weights of object storage, each host would
fetch all of them first. So these get random numbers for that time, of a size that keeps a layer's outputs near 1. All
rows of a parameter are windows into one short pool, so it takes no memory of its own.

What decides is where the weights are from, not what has come: all workers find the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.parallel.absent_tensors import is_of_absent_file
from paceline.parallel.meta.meta_device import swapped

__all__ = ["invented_weights"]

STEP = 7919  # windows of parameters begin that many numbers apart


@contextlib.contextmanager
def invented_weights(model: nn.Module) -> Iterator[None]:
    """Within it, parameters in files that come in pieces have random numbers."""
    stored = {id(one): one for one in model.parameters() if is_of_absent_file(one)}
    if not stored:
        yield
        return
    longest = max(sum(one.shape) for one in stored.values()) + 1
    pool = torch.randn(longest + STEP * min(len(stored), 100), generator=torch.Generator().manual_seed(1))
    starts = {number: place % 100 * STEP for place, number in enumerate(stored)}

    def invented(tensor: Tensor) -> Tensor:
        if id(tensor) not in stored:
            return tensor
        if tensor.is_floating_point():
            scaled = pool / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else 1 + pool / 2
            numbers = scaled.to(tensor.dtype)
        else:
            numbers = torch.zeros_like(pool, dtype=tensor.dtype)
        spread = numbers.as_strided(tensor.shape, (1,) * tensor.ndim, starts[id(tensor)])
        made = nn.Parameter(spread, requires_grad=tensor.requires_grad)
        vars(made).update(vars(tensor))  # the type that it will have
        return made

    with swapped(model.modules(), invented):
        yield
