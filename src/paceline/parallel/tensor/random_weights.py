"""A copy of a block on random numbers that takes little memory: parameters overlap in a few pools of numbers.

A block is tried with random weights, so it needs none of the model's own. The copy of a whole model takes the memory of
its largest tensors, and the copies of emulated workers share it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import nn
from torch.nn import Parameter

from paceline.parallel.number_pools import NumberPools

__all__ = ["RandomWeights"]


class RandomWeights:
    """Copies of a block in `dtype`, in evaluation mode, without the zeros and ones that would hide an error.

    `whole` is the first copy. frozen: ids of parameters that get no gradient. overlap: whether parameters share memory;
    a block that writes to its parameters needs them apart, and `is_written` says afterwards whether it does.
    """

    def __init__(self, block: nn.Module, dtype: torch.dtype, *, frozen: Collection[int], overlap: bool) -> None:
        self._overlaps = overlap
        self._pools = NumberPools(dtype)
        plain = [one for one in block.parameters() if type(one) is Parameter and one.is_floating_point()]
        self._pools.reserve(plain)
        copies: dict[int, object] = {}
        for number, one in enumerate(plain):
            value = self._pools.window(one, number) if overlap else self._pools.numbers(one, one.numel())
            copies[id(one)] = Parameter(value.view(one.shape), requires_grad=id(one) not in frozen)
        self.whole = copy.deepcopy(block, copies).to(dtype).eval()
        ours = {id(one) for one in copies.values()}
        with torch.no_grad():
            for one in self.whole.parameters():
                one.grad = None
                if id(one) not in ours:  # of a class of its own, or of other numbers
                    one.copy_(self._pools.numbers(one, one.numel()).view(one.shape))
        self._sums = self._pools.checksums()

    @property
    def is_written(self) -> bool:
        """Whether a copy's run has written to a parameter that shares its memory with others."""
        return self._pools.checksums() != self._sums

    def copy(self) -> nn.Module:
        """Return a further copy, with buffers of its own, and parameters of its own where they do not overlap."""
        if not self._overlaps:
            return copy.deepcopy(self.whole)
        plain = [one for one in self.whole.parameters() if type(one) is Parameter]
        same: dict[int, object] = {id(one): Parameter(one.detach(), requires_grad=one.requires_grad) for one in plain}
        return copy.deepcopy(self.whole, same)
