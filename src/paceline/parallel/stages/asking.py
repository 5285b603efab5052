"""What tensors on the meta device answer when code asks where they are: the device on which they would be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.stages.structure import map_leaves

__all__ = ["ASKED", "device_to_meta"]

META = torch.device("meta")
DEVICE_TEXT = re.compile(r"(cpu|cuda|xpu|mps|hpu)(:\d+)?")

# Each is a function as a TorchFunctionMode meets it; the answer depends on the real device alone.
ASKED: dict[Callable[..., Any], Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # pyright: ignore[reportAttributeAccessIssue]  # getters of the C class, which stubs call attributes
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # pyright: ignore[reportAttributeAccessIssue]  # getters of the C class, which stubs call attributes
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # pyright: ignore[reportAttributeAccessIssue]  # getters of the C class, which stubs call attributes
    Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index or 0,
}


def device_to_meta(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Replace devices among the arguments of an operation on ghosts: its result is a ghost as well."""
    takes_text = getattr(func, "__name__", "") == "to"

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.device) or (takes_text and isinstance(leaf, str) and DEVICE_TEXT.fullmatch(leaf)):
            return META
        return leaf

    args = map_leaves(args, change)
    kwargs = map_leaves(kwargs, change)
    if isinstance(kwargs.get("device"), (str, int)):
        kwargs = {**kwargs, "device": META}
    return args, kwargs
