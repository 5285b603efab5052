"""Models without the memory of their weights: made on the meta device, and run on weights of one number.

Within `fake_weights`, a parameter goes to the meta device as soon as a module registers it. So a model of any size is
made in the memory of its largest parameter; buffers, data and everything else are real. Within `filled_weights`, each
meta parameter is one small number that is seen at every place (strides of 0). Shapes, types, devices and costs of a
forward are as with real weights. Within `fake_values` there are no numbers at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch documents it, and has no public name for it
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.parallel.meta.meta_device import absent, swapped

__all__ = ["fake_of", "fake_values", "fake_weights", "filled_weights"]

REGISTER = nn.Module.register_parameter  # torch's own
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

    nn.Module.register_parameter = without_data
    try:
        yield
    finally:
        nn.Module.register_parameter = REGISTER


@contextlib.contextmanager
def filled_weights(model: nn.Module) -> Iterator[None]:
    """Within it, the model's meta parameters can be computed with, on the CPU; copies of them are real."""
    former, nn.Module.register_parameter = nn.Module.register_parameter, REGISTER
    try:
        with swapped(model.modules(), lambda tensor: _of_one_number(tensor) if tensor.is_meta else tensor):
            yield
    finally:
        nn.Module.register_parameter = former


@contextlib.contextmanager
def fake_values(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Within it, the model computes with fake tensors on the CPU: shapes and graphs without values, in no time.

    Code that looks at values raises. Real tensors may be given to it.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, swapped(model.modules(), lambda one: fake_of(mode, one)):
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
