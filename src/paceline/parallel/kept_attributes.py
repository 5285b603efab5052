"""What code changes in modules' attributes during a trial, put back: caches that it fills, values that it keeps."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["attributes"]

TENSOR_DICTS = ("_parameters", "_buffers", "_modules")
CONTAINERS = (list, dict, set, OrderedDict)


def attributes(modules: Iterable[nn.Module], *, objects: Iterable[Any] = ()) -> Callable[[], None]:
    """Return a function that restores what code changes from now on in modules and other objects, such as caches.

    Lists, dicts and sets among the modules' attributes are restored one level deep; objects in `objects` completely.
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
    """Record the attributes of an object and of its parts; tensors, modules, functions and classes are not opened."""
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
