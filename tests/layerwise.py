"""An optimizer that looks at whole parameters, as LARS and LAMB do: for tests of who may use it, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter

__all__ = ["Lars"]


class Lars(torch.optim.Optimizer):
    """Steps of a tenth of `lr` times each parameter's own length, along its gradient."""

    def __init__(self, params: Iterable[Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    length, steepness = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(parameter.grad)
                    trust = torch.where(length * steepness > 0, 0.1 * length / steepness, torch.ones_like(length))
                    parameter.sub_(parameter.grad * (group["lr"] * trust))
