"""Half precision as Accelerate has it: a prepared model's forward autocasts, and returns float32.

What the body of a loop computes beside the model, such as its loss, is in the body's own types.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compat.accelerate.exchange import mapped
from paceline.compat.accelerate.utils import AutocastKwargs
from paceline.parallel.precision import HALVES

__all__ = ["autocasting", "have_forward_autocast"]


@contextlib.contextmanager
def autocasting(precision: str, device: torch.device, options: AutocastKwargs) -> Iterator[None]:
    """A block whose matrix work is in the half precision of this name. With `enabled=False` it is in its operands' own
    types, also inside of another such block; for other precisions nothing changes."""
    if precision not in HALVES:
        yield
        return
    with torch.autocast(
        device.type, dtype=HALVES[precision], enabled=options.enabled, cache_enabled=options.cache_enabled
    ):
        yield


def have_forward_autocast(model: nn.Module, precision: str, device: torch.device, options: AutocastKwargs) -> None:
    """Have a model's `forward` autocast, and return float32 where it would return half-precision numbers.

    `forward` stays a method of the model, so that a copy of the model has its own.
    """
    found: Any = model.forward
    is_own = isinstance(found, types.MethodType) and found.__self__ is model

    @functools.wraps(found.__func__ if is_own else found)
    def forward(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocasting(precision, device, options):
            output = found.__func__(own, *args, **kwargs) if is_own else found(*args, **kwargs)
        return mapped(output, _single)

    model.forward = types.MethodType(forward, model)


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
