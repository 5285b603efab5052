"""Sees what a forward changes in plain attributes of modules, and puts it back: `self.mean = 0.9 * self.mean + ...`.

Parameters and buffers have owners; this is about everything else that an attribute holds: numbers, tensors, arrays,
random generators, and containers and objects of them. Tensors are compared by identity and version, so what they hold
is not read.
"""

from __future__ import annotations

import collections
import dataclasses
import pickle
import random
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Attribute", "Attributes", "changed_attributes", "keep"]

OWN = frozenset(vars(nn.Module()))  # what torch gives to every module
DEPTH, ITEMS, BYTES = 4, 512, 1 << 20  # of containers within each other, of one of them, of an array
MACHINERY = (
    "torch.distributed",
    "torch._dynamo",
    "torch.utils.hooks",
    "paceline",
)  # packages whose objects layouts keep
CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, weakref.ref, nn.Module, nn.Parameter)
MISSING = object()  # there is no such attribute


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """A plain attribute of a module."""

    module: nn.Module
    name: str

    def get(self) -> Any:
        return vars(self.module).get(self.name, MISSING)

    def set(self, value: Any) -> None:
        if value is MISSING:
            vars(self.module).pop(self.name, None)
        else:
            vars(self.module)[self.name] = value


class Attributes:
    """What the plain attributes of modules held at one time."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._scan = _Scan()
        self.seen: dict[nn.Module, dict[str, Hashable]] = {module: self._of(module) for module in modules}

    def _of(self, module: nn.Module) -> dict[str, Hashable]:
        return {name: self._scan.of(value, DEPTH) for name, value in vars(module).items() if name not in OWN}

    @property
    def tensors(self) -> set[int]:
        """The ids of the tensors that were there; they stay alive, and so theirs, as long as this object does."""
        return {id(one) for one in self._scan.alive if isinstance(one, Tensor)}


def changed_attributes(before: Attributes, after: Attributes) -> list[Attribute]:
    """The attributes that hold something else now, or have come or gone."""
    found: list[Attribute] = []
    for module, now in after.seen.items():
        then = before.seen.get(module)
        if then is not None and then != now:
            names = dict.fromkeys([*then, *now])
            found += [Attribute(module, name) for name in names if then.get(name, MISSING) != now.get(name, MISSING)]
    return found


class _Scan:
    """Describes values by what can be compared later; what is shared is described once."""

    def __init__(self) -> None:
        self.alive: list[Any] = []  # so that no id is used again
        self._known: dict[int, Hashable] = {}

    def of(self, value: Any, depth: int) -> Hashable:
        if value is None or isinstance(value, (bool, int, str, bytes)):
            return value
        if isinstance(value, (float, complex)):
            return repr(value)  # a number that is none equals itself here
        if isinstance(value, CODE) or is_machinery(value):
            return ""
        if id(value) not in self._known:
            self.alive.append(value)
            self._known[id(value)] = id(value)  # of one that contains itself
            self._known[id(value)] = self._described(value, depth)
        return self._known[id(value)]

    def _described(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, Tensor):
            return id(value), -1 if value.is_inference() else value._version
        if isinstance(value, np.ndarray):
            is_small = value.nbytes <= BYTES and value.dtype != object
            return id(value), zlib.crc32(np.ascontiguousarray(value).tobytes()) if is_small else value.shape
        if is_generator(value):
            return id(value), zlib.crc32(_state_of(value))
        if depth == 0:
            return id(value)
        if isinstance(value, (list, tuple, collections.deque)):
            items: list[Any] = list(value)[:ITEMS]
            return type(value).__name__, len(value), tuple(self.of(one, depth - 1) for one in items)
        if isinstance(value, (set, frozenset)):
            plain = [one for one in list(value)[:ITEMS] if isinstance(one, (int, float, str, bytes, type(None)))]
            return type(value).__name__, len(value), frozenset(plain)
        fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if not isinstance(fields, dict):
            return id(value)
        pairs = list(fields.items())[:ITEMS]
        return id(value), len(fields), tuple((self.of(key, 1), self.of(one, depth - 1)) for key, one in pairs)


def is_machinery(value: Any) -> bool:
    """Whether it belongs to what trains a model, and not to the model."""
    return type(value).__module__.startswith(MACHINERY)


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers that is not a global one."""
    return isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState))


def _state_of(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return pickle.dumps(generator)


Restore = Callable[[], Any]  # puts back what an object held, and returns the object


def keep(value: Any, written: set[int], depth: int = DEPTH) -> Restore:
    """Keep what a value holds. `written`: ids of the tensors that are written in place; of others no copy is needed."""
    if value is MISSING or isinstance(value, CODE) or is_machinery(value):
        return lambda: value
    if isinstance(value, Tensor):
        return _keep_tensor(value) if id(value) in written and not value.is_meta else lambda: value
    if isinstance(value, np.ndarray):
        return _keep_array(value)
    if is_generator(value):
        return _keep_generator(value)
    if depth == 0:
        return lambda: value
    if isinstance(value, tuple):
        return _keep_tuple(value, [keep(one, written, depth - 1) for one in value])
    if isinstance(value, (list, collections.deque)):
        items = [keep(one, written, depth - 1) for one in value]
        return _keep_items(value, items) if len(items) <= ITEMS else lambda: value
    if isinstance(value, set):
        return _keep_set(value)
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if isinstance(fields, dict) and len(fields) <= ITEMS:
        return _keep_fields(value, fields, {key: keep(one, written, depth - 1) for key, one in fields.items()})
    return lambda: value


def _keep_tensor(value: Tensor) -> Restore:
    copy, version = value.detach().clone(), -1 if value.is_inference() else value._version

    def restore() -> Tensor:
        if value.is_inference() or value._version != version:
            with torch.no_grad():
                value.copy_(copy)
        return value

    return restore


def _keep_array(value: np.ndarray[Any, Any]) -> Restore:
    copy = value.copy()

    def restore() -> Any:
        if value.flags.writeable:
            value[...] = copy
        return value

    return restore


def _keep_generator(value: Any) -> Restore:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, np.random.Generator):
        numbers = value.bit_generator.state

        def restore() -> Any:
            value.bit_generator.state = numbers
            return value

        return restore
    is_python = isinstance(value, random.Random)
    kept = value.getstate() if is_python else value.get_state()

    def restore_global() -> Any:
        _ = value.setstate(kept) if is_python else value.set_state(kept)
        return value

    return restore_global


def _keep_tuple(value: Any, items: list[Restore]) -> Restore:
    def restore() -> Any:
        for item in items:
            item()  # a tuple holds the same objects for good
        return value

    return restore


def _keep_items(value: Any, items: list[Restore]) -> Restore:
    def restore() -> Any:
        found = [item() for item in items]
        value.clear()
        value.extend(found)
        return value

    return restore


def _keep_set(value: set[Any]) -> Restore:
    copy = set(value)

    def restore() -> set[Any]:
        value.clear()
        value.update(copy)
        return value

    return restore


def _keep_fields(value: Any, fields: dict[Any, Any], items: Mapping[Any, Restore]) -> Restore:
    def restore() -> Any:
        found = {key: item() for key, item in items.items()}
        fields.clear()
        fields.update(found)
        return value

    return restore
