"""Models without the memory of their weights: made on the meta device, and run on weights of one number.

Within `fake_weights`, a parameter goes to the meta device as soon as a module registers it, and what `torch.empty`
makes of more than 4 GB at once. So a model of any size is made in the memory of its largest parameter, or less;
buffers, data and everything else are real. Within `filled_weights`, each meta parameter is one small number that is
seen at every place (strides of 0). Shapes, types, devices and costs of a forward are as with real weights. Within
`fake_values` there are no numbers at all, and within `shapes_only` neither: there everything is on the meta device,
which tensor subclasses stand, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch documents it, and has no public name for it
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.parallel.meta.meta_device import META, absent, swapped

__all__ = ["fake_of", "fake_values", "fake_weights", "filled_weights", "real_weights", "shapes_only"]

REGISTER = nn.Module.register_parameter  # torch's own
EMPTY: Any = torch.empty
MOST_MADE = 1 << 30  # elements of a tensor that is made with its memory, to become a parameter
NUMBER = 0.02  # neither 0, by which models may divide, nor large


@contextlib.contextmanager
def fake_weights() -> Iterator[None]:
    """Within it, new modules keep no weights."""
    made = WeakTensorKeyDictionary()  # tied parameters stay tied

    def without_data(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is not nn.Parameter or param.is_meta:  # lazy parameters have a class of their own, too
            return REGISTER(self, name, param)
        if param not in made:
            made[param] = absent(param)
        return REGISTER(self, name, made[param])

    nn.Module.register_parameter, torch.empty = without_data, _empty
    try:
        yield
    finally:
        nn.Module.register_parameter, torch.empty = REGISTER, EMPTY


@contextlib.contextmanager
def real_weights() -> Iterator[None]:
    """Within it, `fake_weights` is not in force."""
    former = nn.Module.register_parameter, torch.empty
    nn.Module.register_parameter, torch.empty = REGISTER, EMPTY
    try:
        yield
    finally:
        nn.Module.register_parameter, torch.empty = former


def _empty(*size: Any, **options: Any) -> Tensor:
    """torch.empty, but without memory for what only the weights of many experts, or of many words, are as large as."""
    lengths = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    is_plain = all(isinstance(one, int) for one in lengths) and "out" not in options and "size" not in options
    if is_plain and lengths and math.prod(lengths) > MOST_MADE:
        return EMPTY(*size, **{**options, "device": "meta", "pin_memory": False})
    return EMPTY(*size, **options)


@contextlib.contextmanager
def filled_weights(model: nn.Module) -> Iterator[None]:
    """Within it, the model's meta parameters can be computed with, on the CPU; copies of them are real."""
    with (
        real_weights(),
        swapped(model.modules(), lambda tensor: _of_one_number(tensor) if tensor.is_meta else tensor),
    ):
        yield


@contextlib.contextmanager
def shapes_only(model: nn.Module) -> Iterator[None]:
    """Within it, the model's tensors and new ones are on the meta device: a forward of any size takes no time.

    Code that looks at values raises, and so does code that names another device for what it makes.
    """
    with real_weights(), swapped(model.modules(), lambda one: one if one.is_meta else absent(one)), META:
        yield


@contextlib.contextmanager
def fake_values(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Within it, the model computes with fake tensors on the CPU: shapes and graphs without values, in no time.

    Code that looks at values raises. Real tensors may be given to it.
    """
    with (
        real_weights(),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        swapped(model.modules(), lambda one: fake_of(mode, one)),
    ):
        yield mode


def fake_of(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a tensor, or parameter, of the same shape and type without values."""
    with mode:
        plain = torch.empty(tensor.shape, dtype=tensor.dtype)
        return nn.Parameter(plain, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain


def _of_one_number(tensor: Tensor) -> Tensor:
    dtype = tensor.dtype
    value = NUMBER if dtype.is_floating_point or dtype.is_complex else 0
    spread = torch.full((), value, dtype=dtype).expand(tensor.shape)
    return nn.Parameter(spread, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else spread
