"""Finds tensors that modules keep beside their parameters, with the same memory: a layout that splits would part them.

`self.head = self.out.weight.data[:4]` follows the weight as long as both have one memory. Layouts that split a model
give each parameter other memory. The kept tensor would stay as it was when the model was prepared, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline.errors import Reason
from paceline.parallel.absent_tensors import AbsentParameter, AbsentTensor
from paceline.parallel.torch_functions import tensors_in

__all__ = ["kept_views"]

OWN = ("_parameters", "_modules", "_buffers")  # of every module


def kept_views(model: nn.Module, layout: str) -> Iterator[Reason]:
    """Yield each tensor that a module keeps with the memory of a parameter, and that is none itself."""
    names = {number: name for name, one in model.named_parameters() if (number := _memory(one))}
    for name, key, tensor in _kept(model):
        if (number := _memory(tensor)) in names:
            yield Reason(
                module=name,
                what=f"{name} keeps a tensor ({key}) in the memory of {names[number]}, which {layout} moves, so "
                "that it would keep old numbers.",
                remedy="Take it from the parameter in forward, and not in __init__.",
            )


def _kept(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Buffers, and tensors in plain attributes of modules, with their names."""
    for name, module in model.named_modules():
        hooks = vars(module)["_forward_pre_hooks"].values()
        of_hooks = {hook.name for hook in hooks if isinstance(hook, SpectralNorm)}  # made anew before each forward
        passed_over = {*OWN, *of_hooks}
        attributes: dict[str, Any] = {key: one for key, one in vars(module).items() if key not in passed_over}
        for key, value in {**attributes, **vars(module)["_buffers"]}.items():
            for tensor in tensors_in(value):
                if not isinstance(tensor, nn.Parameter):
                    yield name or "the model", key, tensor


def _memory(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 without any."""
    is_plain = (
        type(tensor) in (Tensor, nn.Parameter, AbsentTensor, AbsentParameter)
        and not is_lazy(tensor)
        and not tensor.is_meta
    )
    return tensor.untyped_storage().data_ptr() if is_plain and tensor.layout is torch.strided else 0
