"""Makes numbers wrong in a worker: a bit of its weights, or what its model makes of a micro-batch.

The user's program is not changed: torch tells which modules are called. The outermost one is the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree

__all__ = ["Calls", "flip_a_bit", "poisoned"]

FAR_OFF = 1e4


class Calls:
    """Hears of every call of an outermost module until `close`; `came(output)` may return another output."""

    def __init__(self, came: Callable[[nn.Module, Any], Any]) -> None:
        self._came, self._depth = came, 0
        self._hooks = (
            modules.register_module_forward_pre_hook(self._enters),
            modules.register_module_forward_hook(self._leaves, always_call=True),  # also where one raises an error
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enters(self, *_: Any) -> None:
        self._depth += 1

    def _leaves(self, module: nn.Module, _: Any, output: Any) -> Any:
        self._depth -= 1
        return self._came(module, output) if self._depth == 0 else None


def poisoned(output: Any, kind: str) -> Any:
    """Return an output whose loss is not a number ("nan"), or leaps ("spike"), and so are its gradients."""

    def spoil(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if kind == "nan":
            return value * float("nan")
        return value * (FAR_OFF if value.dim() == 0 else -FAR_OFF)  # a single number is a loss; else: wrong, and sure

    return pytree.tree_map(spoil, output)


@torch.no_grad()
def flip_a_bit(model: nn.Module, *, seed: str) -> str:
    """Flip one bit of one weight that is trained, drawn by `seed`; returns the parameter's name.

    It is one of the fraction's upper bits: the number stays finite.
    """
    draw = random.Random(seed)
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad and value.numel()]
    if not trained:
        raise ValueError(f"{type(model).__name__} has no parameter that is trained, so there is no bit to flip")
    name, parameter = draw.choice(trained)
    flat = parameter.detach().view(-1) if parameter.is_contiguous() else parameter.detach()
    place = tuple(draw.randrange(size) for size in flat.shape)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[parameter.element_size()]
    bit = {torch.float64: 50, torch.float32: 20, torch.float16: 8, torch.bfloat16: 5}[parameter.dtype]
    one = flat[place].clone().view(width)
    flat[place] = (one ^ (1 << bit)).view(parameter.dtype)
    return name
