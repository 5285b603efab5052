"""Random numbers for weights that stand in for others: parameters overlap in a few pools, so that they take little
memory.

Each parameter is a window of its own into a pool, so no two begin with the same numbers. There is one pool for each
length of rows, because numbers are scaled by it. A pool repeats itself after a number of places that has a large prime
factor, so parts and rows of weights do not begin that far from each other; in memory there is one period.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.parallel.repeated_memory import repeated

__all__ = ["NumberPools"]

STEP, MOST_SLACK = 7919, 1 << 20  # windows begin that many numbers apart, and at most that far from the first one
PERIOD = 4096 * 257  # numbers that are drawn, whole pages of each type; the next ones are the same


class NumberPools:
    """Numbers in one type, the same in every process."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._pools = dtype, dict[object, Tensor]()
        self._generator = torch.Generator().manual_seed(1)
        self._largest: dict[object, int] = {}

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Say which parameters will get windows: a pool is made when the first of its length of rows gets one."""
        for one in tensors:
            self._largest[_key(one)] = max(self._largest.get(_key(one), 0), one.numel())

    def window(self, like: Tensor, number: int) -> Tensor:
        """Return the numbers of parameter `number`, which is like this one: flat, and a part of a pool."""
        key = _key(like)
        slack = min(self._largest[key], MOST_SLACK)
        if key not in self._pools:
            count = self._largest[key] + slack
            self._pools[key] = repeated(self._period(like, count), count).to(like.device)
        start = number * STEP % (slack + 1)
        return self._pools[key][start : start + like.numel()]

    def numbers(self, like: Tensor, count: int) -> Tensor:
        """Return `count` numbers in memory of their own for a parameter like this one: of a size that keeps a layer's
        outputs near 1, or near 1 themselves where it is a vector."""
        drawn = self._period(like, count)
        return drawn.repeat(-(-count // max(1, len(drawn))))[:count].to(like.device)

    def _period(self, like: Tensor, count: int) -> Tensor:
        drawn = torch.randn(min(count, PERIOD), generator=self._generator, dtype=self._dtype)
        return drawn.div_(like.shape[-1] ** 0.5) if like.ndim > 1 else drawn.mul_(0.5).add_(1)

    def checksums(self) -> list[float]:
        """Numbers that change when somebody writes to a pool."""
        return [float(pool.sum()) for pool in self._pools.values()]


def _key(parameter: Tensor) -> object:
    return parameter.device, parameter.shape[-1] if parameter.ndim > 1 else 0
