"""Makes numbers wrong in a worker: flips a bit of its weights, or corrupts its model's output for a micro-batch.

The user's program is not changed: torch's module hooks say which modules are called, and the outermost one is the
model. Under pipeline parallelism only the last stage's model output has contents. On other stages the output of the
last module that made one is corrupted, and it travels on.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import (
    _get_current_function_mode,  # pyright: ignore[reportPrivateUsage]  # nothing public tells whether there is one
)
from torch.utils import _pytree as pytree

from paceline.comm.sharded_tensors import local_part
from paceline.parallel.meta.meta_device import unseen

__all__ = ["ModelCalls", "flip_a_bit", "poisoned"]

FAR_OFF = 1e4


class ModelCalls:
    """Hears of every call of an outermost module that made numbers, until `close`; `came(module, output)` may return
    another output."""

    def __init__(self, came: Callable[[nn.Module, Any], Any]) -> None:
        self._came, self._depth = came, 0
        self._made: Any = None  # numbers that modules inside of it have made last
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
        is_watched = _get_current_function_mode() is not None
        with unseen() if is_watched else contextlib.nullcontext():
            made = output if _numbers_in(output) else self._made
            self._made = made if self._depth else None
            return None if self._depth or made is None else self._came(module, made)


def poisoned(output: Any, kind: str) -> Any:
    """Return an output whose loss is not a number ("nan"), or leaps ("spike"), and so are its gradients.

    Where a pipeline watches the model's code, it is the same output, with other contents: it knows tensors by identity.
    """
    factor = float("nan") if kind == "nan" else -FAR_OFF
    if _get_current_function_mode() is not None:
        for value in _numbers_in(output):
            value.data.mul_(-factor if value.dim() == 0 else factor)
        return None

    def spoil(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value * (-factor if value.dim() == 0 else factor)  # a single number is a loss; else: wrong, and sure

    return pytree.tree_map(spoil, output)


def _numbers_in(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(output)
    return [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point() and not one.is_meta]


@torch.no_grad()
def flip_a_bit(model: nn.Module, *, seed: str) -> str:
    """Flip one bit of one weight that is trained, drawn by `seed`; returns the parameter's name.

    Of what is split, it is in this worker's part. It is one of the fraction's upper bits: the number stays finite.
    """
    draw = random.Random(seed)
    here = ((name, value) for name, value in model.named_parameters() if value.requires_grad and not value.is_meta)
    trained = [(name, local) for name, value in here if (local := local_part(value)).numel()]
    if not trained:
        raise ValueError(f"{type(model).__name__} has no parameter that is trained, so there is no bit to flip")
    name, parameter = draw.choice(trained)
    flat = parameter.view(-1) if parameter.is_contiguous() else parameter
    place = tuple(draw.randrange(size) for size in flat.shape)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16}[parameter.element_size()]
    bit = {torch.float64: 50, torch.float32: 20, torch.float16: 8, torch.bfloat16: 5}[parameter.dtype]
    one = flat[place].clone().view(width)
    flat[place] = (one ^ (1 << bit)).view(parameter.dtype)
    return name
