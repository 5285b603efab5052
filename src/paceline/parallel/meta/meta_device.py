"""Run parts of a model without its weights: on the meta device, or on a real device with invented numbers.

A trial leaves nothing behind: parameters, buffers and attributes of modules are restored. When code asks a meta tensor
for its device, it gets the device on which the tensor would be.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.meta.tensor_tree import TensorSpec, held, map_leaves, map_tensors, tensors_in

__all__ = [
    "DEVICE_QUERIES",
    "META",
    "USER_ERRORS",
    "absent",
    "device_to_meta",
    "invented",
    "on_invented_values",
    "on_meta",
    "own_tensors",
    "swapped",
    "unseen",
    "version",
]

# What a model's code raises when it meets tensors without contents, or of an unexpected kind.
USER_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


@contextlib.contextmanager
def swapped(modules: Iterable[nn.Module], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within it, parameters and buffers of `modules` are replaced by `change(tensor)`; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    former = own_tensors(modules)
    try:
        for module, name, tensor in former:
            if id(tensor) not in made:
                made[id(tensor)] = change(tensor)
            setattr(module, name, made[id(tensor)])
        yield
    finally:
        for module, name, tensor in former:
            setattr(module, name, tensor)


def own_tensors(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    """Return (module, attribute, parameter or buffer) for all that the modules themselves hold."""
    found: list[tuple[nn.Module, str, Tensor]] = []
    for module in modules:
        own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        own += [*module.named_buffers(recurse=False, remove_duplicate=False)]
        found += [(module, name, tensor) for name, tensor in own]
    return found


def absent(tensor: Tensor) -> Tensor:
    """Return a parameter or buffer of the same kind on the meta device."""
    # Not by .to("meta"): for a parameter whose rows are sharded this must be the whole, and a plain tensor.
    placeholder = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return (
        nn.Parameter(placeholder, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else placeholder
    )


def unseen() -> contextlib.AbstractContextManager[None]:
    """Return a `with` block in which torch's calls are not seen by function modes."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateUsage]  # documented, in "Extending PyTorch"


def version(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place; 0 for inference tensors, which have no count and cannot
    change.
    """
    return 0 if tensor.is_inference() else tensor._version


def on_meta(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[int, Tensor]]:
    """Call `function` with all tensors on the meta device.

    Returns the result, and for each argument that was changed in place (by its place among the tensors) a placeholder
    of its new value. An argument that is returned comes back as the caller's object.
    """
    given = tensors_in((args, kwargs))
    placeholders = {id(tensor): tensor if tensor.device.type == "meta" else tensor.to("meta") for tensor in given}
    before = {key: version(placeholder) for key, placeholder in placeholders.items()}
    args, kwargs = map_tensors((args, kwargs), lambda tensor: placeholders[id(tensor)])
    args, kwargs = device_to_meta(function, args, kwargs)
    out = function(*args, **kwargs)
    changed = {
        place: placeholders[id(tensor)]
        for place, tensor in enumerate(given)
        if version(placeholders[id(tensor)]) != before[id(tensor)]
    }
    originals = {id(placeholders[id(tensor)]): tensor for tensor in given}
    return map_tensors(out, lambda tensor: originals.get(id(tensor), tensor)), changed


def on_invented_values(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    fill: float | None = None,
) -> tuple[Any, dict[int, Tensor]]:
    """Call `function` as `on_meta` does, but on invented numbers, or on `fill`, where `args` and `kwargs` hold
    placeholders.

    In the placeholders' graph every result depends on every argument with a gradient.
    """
    given = tensors_in((args, kwargs))
    real = {id(tensor): _substitute(tensor, device, fill) for tensor in given}
    before = {key: version(tensor) for key, tensor in real.items()}
    args, kwargs = map_tensors((args, kwargs), lambda tensor: real[id(tensor)])
    out = function(*args, **kwargs)
    source = _sum_of([tensor for tensor in given if tensor.requires_grad])
    changed = {
        place: _linked_placeholder(real[id(tensor)], source)
        for place, tensor in enumerate(given)
        if version(real[id(tensor)]) != before[id(tensor)]
    }
    known = {id(real[id(tensor)]): tensor for tensor in given}

    def placeholder_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = _linked_placeholder(tensor, source)
        return known[id(tensor)]

    return map_tensors(out, placeholder_of), changed


def invented(spec: TensorSpec, device: torch.device) -> Tensor:
    """Return a plausible tensor: small random numbers, a zero for each integer, true for each bool."""
    if any(step == 0 and length > 1 for step, length in zip(spec.stride, spec.held, strict=True)):
        tensor = torch.empty(spec.held, dtype=spec.dtype, device=device)  # not one number that is seen at many places
    else:
        tensor = torch.empty_strided(spec.held, spec.stride, dtype=spec.dtype, device=device)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        tensor.normal_(0, 0.02, generator=_inventor(device))  # the generators that the model uses stay as they are
    else:
        tensor.fill_(spec.dtype == torch.bool)
    return tensor.requires_grad_(spec.requires_grad)


@functools.cache
def _inventor(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def _substitute(tensor: Tensor, device: torch.device, fill: float | None) -> Tensor:
    """Return a tensor that code may do anything with, also in place."""
    if tensor.device.type != "meta":
        return tensor.detach().clone()
    spec = TensorSpec.of(tensor)
    made = invented(spec, device)
    if fill is not None:
        with torch.no_grad():
            made.fill_(fill if tensor.dtype.is_floating_point else max(0, int(fill)))
    return spec.seen(made.view_as(made) if made.requires_grad else made)  # a leaf must not be changed in place


def _linked_placeholder(tensor: Tensor, source: Tensor | None) -> Tensor:
    spec = TensorSpec.of(tensor)
    if source is None or not spec.requires_grad:
        return spec.placeholder()
    placeholder = torch.empty_strided(spec.held, spec.stride, dtype=spec.dtype, device="meta")
    return spec.seen(placeholder.add_(source.to(spec.dtype)))


def _sum_of(tensors: list[Tensor]) -> Tensor | None:
    parts = [held(tensor).to("meta").sum().to(torch.float32) for tensor in tensors if tensor.dtype.is_floating_point]
    return torch.stack(parts).sum() if parts else None


META = torch.device("meta")
DEVICE_TEXT = re.compile(r"(cpu|cuda|xpu|mps|hpu)(:\d+)?")

# Each key is a function as a TorchFunctionMode receives it; the answer depends on the real device only.
DEVICE_QUERIES: dict[Callable[..., Any], Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # pyright: ignore[reportAttributeAccessIssue]  # getters of the C class, which stubs call attributes
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # pyright: ignore[reportAttributeAccessIssue]  # getters of the C class, which stubs call attributes
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # pyright: ignore[reportAttributeAccessIssue]  # getters of the C class, which stubs call attributes
    Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index or 0,
}


def device_to_meta(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Replace devices among the arguments of an operation on placeholders, so that its result is a placeholder, too."""
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
