"""What code changes in modules' attributes during a trial, put back: caches that it fills, values that it keeps."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["attributes", "kept_tensors"]

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


def kept_tensors(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Return a function that takes from modules the tensors that they keep from now on, as attributes or in lists and
    dicts that are attributes, and puts back what was there. Other attributes stay: a package may note that it has
    prepared a model.
    """
    before = [(vars(module), dict(vars(module))) for module in modules]
    mine = [(key, value) for _, own in before for key, value in own.items() if type(value) in (list, dict)]
    filled = [(value, value.copy()) for key, value in mine if key not in TENSOR_DICTS]

    def put_back() -> None:
        for one, former in filled:
            if _new_tensors(one, former):
                one.clear()
                one.extend(former) if isinstance(one, list) else one.update(former)
        for own, former in before:
            for key in [key for key, value in own.items() if _is_kept(value) and former.get(key) is not value]:
                own.pop(key)
                own.update({key: former[key]} if key in former else {})

    return put_back


def _is_kept(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(part, Tensor) for part in parts)


def _new_tensors(now: Any, before: Any) -> bool:
    known = {id(one) for one in (before.values() if isinstance(before, dict) else before)}
    return any(
        isinstance(one, Tensor) and id(one) not in known for one in (now.values() if isinstance(now, dict) else now)
    )
