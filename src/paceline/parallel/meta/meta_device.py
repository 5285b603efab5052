"""Run parts of a model without its weights: on the meta device, or for real on invented numbers.

Nothing of a trial stays: parameters, buffers and attributes of modules are put back.

What tensors on the meta device answer when code asks where they are: the device on which they would be.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.meta.tensor_tree import TensorSpec, held, map_leaves, map_tensors, tensors_in

__all__ = [
    "DEVICE_QUERIES",
    "USER_ERRORS",
    "absent",
    "attributes",
    "device_to_meta",
    "invented",
    "on_invented_values",
    "on_meta",
    "own_tensors",
    "swapped",
    "unseen",
    "version",
]

# What code of a model raises when it meets tensors without contents, or of a kind that it does not expect.
USER_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)

TENSOR_DICTS = ("_parameters", "_buffers", "_modules")
CONTAINERS = (list, dict, set, OrderedDict)


@contextlib.contextmanager
def swapped(modules: Iterable[nn.Module], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While it lasts, parameters and buffers of `modules` are what `change` makes of them; shared ones stay so."""
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
    # Not by .to("meta"): of a parameter whose rows are split this is to be the whole, and a plain tensor.
    ghost = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(ghost, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else ghost


def attributes(modules: Iterable[nn.Module], *, objects: Iterable[Any] = ()) -> Callable[[], None]:
    """Return a function that puts back what code sets from now on in modules and other objects, such as caches.

    Lists, dicts and sets among the modules' attributes are put back one level deep; whatever hangs on `objects`, all.
    """
    kept: list[tuple[Any, Any]] = []
    for module in modules:
        own = {key: value for key, value in vars(module).items() if key not in TENSOR_DICTS}
        kept += [(value, value.copy()) for value in own.values() if type(value) in CONTAINERS]
        kept.append((vars(module), own))
    seen: set[int] = set()
    for thing in objects:
        _remember(thing, kept, seen)

    def put_back() -> None:
        for thing, former in kept:
            if isinstance(thing, list):
                thing[:] = former
            elif isinstance(thing, set):
                thing.clear()
                thing.update(former)
            else:
                for key in [key for key in thing if key not in former and key not in TENSOR_DICTS]:
                    del thing[key]
                thing.update(former)

    return put_back


def _remember(thing: Any, kept: list[tuple[Any, Any]], seen: set[int]) -> None:
    """Note what an object consists of, and what its parts do; tensors, modules, functions and classes are whole."""
    if id(thing) in seen or isinstance(thing, (Tensor, nn.Module, type, types.FunctionType, types.ModuleType)):
        return
    seen.add(id(thing))
    if type(thing) in CONTAINERS:
        kept.append((thing, thing.copy()))
    own = getattr(thing, "__dict__", None)
    if own is not None:
        kept.append((own, dict(own)))
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    for part in [*parts, *(own.values() if own else ())]:
        _remember(part, kept, seen)


def unseen() -> contextlib.AbstractContextManager[None]:
    """A `with` block in which torch's calls are not seen by function modes."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateUsage]  # documented, in "Extending PyTorch"


def version(tensor: Tensor) -> int:
    """How often the tensor was changed in place; inference tensors do not count, and cannot be changed either."""
    return 0 if tensor.is_inference() else tensor._version


def on_meta(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[int, Tensor]]:
    """Call `function` with all tensors on the meta device.

    Returns the result, and for each argument that was changed in place (by its place among the tensors) a ghost of what
    it is now. An argument that is handed back comes back as it was given.
    """
    given = tensors_in((args, kwargs))
    ghosts = {id(tensor): tensor if tensor.device.type == "meta" else tensor.to("meta") for tensor in given}
    before = {key: version(ghost) for key, ghost in ghosts.items()}
    args, kwargs = map_tensors((args, kwargs), lambda tensor: ghosts[id(tensor)])
    args, kwargs = device_to_meta(function, args, kwargs)
    out = function(*args, **kwargs)
    changed = {
        place: ghosts[id(tensor)]
        for place, tensor in enumerate(given)
        if version(ghosts[id(tensor)]) != before[id(tensor)]
    }
    originals = {id(ghosts[id(tensor)]): tensor for tensor in given}
    return map_tensors(out, lambda tensor: originals.get(id(tensor), tensor)), changed


def on_invented_values(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    fill: float | None = None,
) -> tuple[Any, dict[int, Tensor]]:
    """The same as `on_meta`, but on invented numbers, or on `fill`, where `args` and `kwargs` hold ghosts.

    In the graph of the ghosts every result hangs on every argument with a gradient.
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

    def ghost_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = _linked_placeholder(tensor, source)
        return known[id(tensor)]

    return map_tensors(out, ghost_of), changed


def invented(spec: TensorSpec, device: torch.device) -> Tensor:
    """Return small random numbers (a zero for each integer, true for each bool): what such a tensor might hold."""
    if any(step == 0 and length > 1 for step, length in zip(spec.stride, spec.held, strict=True)):
        tensor = torch.empty(spec.held, dtype=spec.dtype, device=device)  # not one number that is seen at many places
    else:
        tensor = torch.empty_strided(spec.held, spec.stride, dtype=spec.dtype, device=device)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        tensor.normal_(0, 0.02, generator=_inventor(device))  # what the model draws from stays as it is
    else:
        tensor.fill_(spec.dtype == torch.bool)
    return tensor.requires_grad_(spec.requires_grad)


@functools.cache
def _inventor(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def _substitute(tensor: Tensor, device: torch.device, fill: float | None) -> Tensor:
    """A tensor that code may do anything with, also in place."""
    if tensor.device.type != "meta":
        return tensor.detach().clone()
    spec = TensorSpec.of(tensor)
    made = invented(spec, device)
    if fill is not None:
        with torch.no_grad():
            made.fill_(fill if tensor.dtype.is_floating_point else max(0, int(fill)))
    return spec.seen(made.view_as(made) if made.requires_grad else made)  # code may not change a leaf in place


def _linked_placeholder(tensor: Tensor, source: Tensor | None) -> Tensor:
    spec = TensorSpec.of(tensor)
    if source is None or not spec.requires_grad:
        return spec.ghost()
    ghost = torch.empty_strided(spec.held, spec.stride, dtype=spec.dtype, device="meta")
    return spec.seen(ghost.add_(source.to(spec.dtype)))


def _sum_of(tensors: list[Tensor]) -> Tensor | None:
    parts = [held(tensor).to("meta").sum().to(torch.float32) for tensor in tensors if tensor.dtype.is_floating_point]
    return torch.stack(parts).sum() if parts else None


META = torch.device("meta")
DEVICE_TEXT = re.compile(r"(cpu|cuda|xpu|mps|hpu)(:\d+)?")

# Each is a function as a TorchFunctionMode meets it; the answer depends on the real device alone.
DEVICE_QUERIES: dict[Callable[..., Any], Callable[[torch.device], Any]] = {
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
