"""Adasum for optimizers: each worker takes its step alone, and the changes of the weights are combined.

A parameter's step is taken as soon as its gradient is there, and the change travels while backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.compat.horovod.gradients import GradientExchange
from paceline.compat.horovod.handles import synchronize
from paceline.compat.horovod.operations import allreduce_async_
from paceline.compat.horovod.requests import Reduction

__all__ = ["AdasumDelta"]


class AdasumDelta:
    """`step()`: takes a step of the optimizer itself, over the parameters in `groups`."""

    def __init__(self, exchange: GradientExchange, groups: list[dict[str, Any]], step: Callable[[], None]) -> None:
        self._exchange, self._groups, self._step = exchange, groups, step

    def submit(self, parameter: Tensor) -> Callable[[], None]:
        """Take the step of one parameter, and begin to combine its change."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter.data)
        before = parameter.detach().clone()
        everything = [group["params"] for group in self._groups]
        try:
            for group in self._groups:
                group["params"] = [one for one in group["params"] if one is parameter]
            self._step()
        finally:
            for group, all_of_it in zip(self._groups, everything, strict=True):
                group["params"] = all_of_it
        change = parameter.detach() - before
        small, context = self._exchange.compression.compress(change)
        handle = allreduce_async_(small, name=self._exchange.names[parameter], op=Reduction.ADASUM)

        def finish() -> None:
            combined = self._exchange.compression.decompress(synchronize(handle), context)
            with torch.no_grad():
                parameter.copy_(before + combined)

        return finish

    def finish(self) -> None:
        """Wait for all changes, and apply them."""
        self._exchange.finish()
