"""A copy of a block on random numbers that takes little memory: parameters overlap in a few pools of numbers.

A block is tried with random weights, so it needs none of the model's own. Each parameter is a window of its own into a
pool, so no two begin with the same numbers. There is one pool for each length of rows, because numbers are scaled by
it. So the copy of a whole model takes the memory of its largest tensors, and the copies of emulated workers share it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import Parameter

__all__ = ["RandomWeights"]

STEP, MOST_SLACK = 7919, 1 << 20  # windows begin that many numbers apart, and at most that far from the first one


class RandomWeights:
    """Copies of a block in `dtype`, in evaluation mode, without the zeros and ones that would hide an error.

    `whole` is the first copy. frozen: ids of parameters that get no gradient. overlap: whether parameters share memory;
    a block that writes to its parameters needs them apart, and `is_written` says afterwards whether it does.
    """

    def __init__(self, block: nn.Module, dtype: torch.dtype, *, frozen: Collection[int], overlap: bool) -> None:
        self._overlaps = overlap
        self._pools: dict[object, Tensor] = {}
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(1)
        plain = [one for one in block.parameters() if type(one) is Parameter and one.is_floating_point()]
        largest: dict[object, int] = {}
        for one in plain:
            largest[_key(one)] = max(largest.get(_key(one), 0), one.numel())
        copies: dict[int, object] = {}
        for number, one in enumerate(plain):
            value = self._window(one, number, largest[_key(one)]) if overlap else self._numbers(one, one.numel())
            copies[id(one)] = Parameter(value.view(one.shape), requires_grad=id(one) not in frozen)
        self.whole = copy.deepcopy(block, copies).to(dtype).eval()
        ours = {id(one) for one in copies.values()}
        with torch.no_grad():
            for one in self.whole.parameters():
                one.grad = None
                if id(one) not in ours:  # of a class of its own, or of other numbers
                    one.copy_(self._numbers(one, one.numel()).view(one.shape))
        self._sums = self._checksums()

    @property
    def is_written(self) -> bool:
        """Whether a copy's run has written to a parameter that shares its memory with others."""
        return self._checksums() != self._sums

    def copy(self) -> nn.Module:
        """Return a further copy, with buffers of its own, and parameters of its own where they do not overlap."""
        if not self._overlaps:
            return copy.deepcopy(self.whole)
        plain = [one for one in self.whole.parameters() if type(one) is Parameter]
        same: dict[int, object] = {id(one): Parameter(one.detach(), requires_grad=one.requires_grad) for one in plain}
        return copy.deepcopy(self.whole, same)

    def _window(self, parameter: Tensor, number: int, largest: int) -> Tensor:
        """Return a parameter's numbers: a part of its pool."""
        slack, key = min(largest, MOST_SLACK), _key(parameter)
        if key not in self._pools:
            self._pools[key] = self._numbers(parameter, largest + slack)
        start = number * STEP % (slack + 1)
        return self._pools[key][start : start + parameter.numel()]

    def _numbers(self, like: Tensor, count: int) -> Tensor:
        """Return `count` numbers for a parameter like this one: of a size that keeps a layer's outputs near 1, or near
        1 themselves where it is a vector."""
        noise = torch.randn(count, generator=self._generator, dtype=self._dtype).to(like.device)
        return noise.div_(like.shape[-1] ** 0.5) if like.ndim > 1 else noise.mul_(0.5).add_(1)

    def _checksums(self) -> list[float]:
        return [float(pool.sum()) for pool in self._pools.values()]


def _key(parameter: Tensor) -> object:
    return parameter.device, parameter.shape[-1] if parameter.ndim > 1 else 0
