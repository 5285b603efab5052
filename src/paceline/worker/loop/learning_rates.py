"""The learning rates of a run's optimizers, as they are when a step is committed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LearningRates"]

MOST_GROUPS = 32  # that are looked at
MOST_NAMED = 8
NAME = "lr"


class LearningRates:
    """Names the rates of the groups of parameters, counted over all optimizers.

    The first group's is `lr`. That of a later one is `lr/1`, `lr/2`, ..., from the first step on at which it is another
    number. There are eight at most.
    """

    def __init__(self) -> None:
        self._named: list[int] = []  # groups that have had a rate of their own

    def now(self, optimizers: Iterable[Optimizer]) -> dict[str, Tensor | float]:
        """Return the rates by name; one that is a tensor stays on its device, so that nothing waits for it."""
        rates = list(itertools.islice(_rates(optimizers), MOST_GROUPS))
        if not rates:
            return {}
        first = rates[0]
        for place, rate in enumerate(rates[1:], 1):
            if place not in self._named and len(self._named) < MOST_NAMED - 1 and _differs(rate, first):
                self._named.append(place)
        named = {f"{NAME}/{place}": rates[place] for place in sorted(self._named) if place < len(rates)}
        return {name: _kept(rate) for name, rate in {NAME: first, **named}.items()}


def _rates(optimizers: Iterable[Optimizer]) -> Iterator[Tensor | float]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate: Any = group.get("lr")
            if isinstance(rate, Tensor):
                if rate.numel() == 1:
                    yield rate
            elif isinstance(rate, int | float):
                yield rate


def _differs(rate: Tensor | float, first: Tensor | float) -> bool:
    """Whether two rates are different numbers. Different tensors on a device count as such: comparing would wait."""
    if isinstance(rate, Tensor) or isinstance(first, Tensor):
        return rate is not first and (_is_far(rate) or _is_far(first) or float(rate) != float(first))
    return rate != first


def _is_far(rate: Tensor | float) -> bool:
    return isinstance(rate, Tensor) and rate.device.type != "cpu"


def _kept(rate: Tensor | float) -> Tensor | float:
    """The rate as it is now: a scheduler changes a tensor in place."""
    return rate.detach().reshape(()).clone() if isinstance(rate, Tensor) else float(rate)
