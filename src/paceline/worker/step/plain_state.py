"""Sees what a forward and its loss change outside of parameters and buffers.

What holders hold (`state_holders`) is described before and after: numbers, tensors, arrays, random generators, and
containers and objects of them. Tensors are compared by identity and version, small ones on the CPU by their numbers.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import pickle
import random
import zlib
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.worker.step.state_holders import CODE, MISSING, Holder, Place, fields_of, is_machinery

__all__ = ["BYTES", "DEPTH", "ITEMS", "OBJECTS", "Grown", "Scan", "changed_places", "is_generator", "numbers_of"]

DEPTH, ITEMS, BYTES = 4, 512, 1 << 20  # of containers within each other, of one of them, of an array
OBJECTS = 20_000  # that are looked into; of others only their identity counts
SMALL = 1 << 16  # bytes of tensors on the CPU whose numbers are compared, too: `.data` changes them without a version


class Scan:
    """What holders held at one time."""

    def __init__(self, holders: Iterable[Holder]) -> None:
        self.alive: list[Any] = []  # so that no id is used again
        self._known: dict[int, Hashable] = {}
        self.holders = list(holders)
        self.values = [dict(one.items()) for one in self.holders]
        self.seen = [{name: self._of(value, DEPTH) for name, value in some.items()} for some in self.values]

    @property
    def tensors(self) -> set[int]:
        """The ids of the tensors that were there; they stay alive, and so theirs, as long as this object does."""
        return {id(one) for one in self.alive if isinstance(one, Tensor)}

    def _of(self, value: Any, depth: int) -> Hashable:
        """Describe a value by what can be compared later; what is shared is described once."""
        if value is None or type(value) in (bool, int, str, bytes):
            return value
        if type(value) in (float, complex):
            return repr(value)  # a number that is none equals itself here
        if isinstance(value, CODE) or is_machinery(value):
            return ""
        if id(value) not in self._known:
            self.alive.append(value)
            self._known[id(value)] = id(value)  # of one that contains itself
            if len(self._known) < OBJECTS:
                with contextlib.suppress(Exception):  # objects may do anything where they are read
                    self._known[id(value)] = self._described(value, depth)
        return self._known[id(value)]

    def _described(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, Tensor):
            return id(value), -1 if value.is_inference() else value._version, numbers_of(value)
        if isinstance(value, np.ndarray):
            is_small = value.nbytes <= BYTES and not value.dtype.hasobject
            return id(value), zlib.crc32(np.ascontiguousarray(value).tobytes()) if is_small else value.shape
        if is_generator(value):
            return id(value), zlib.crc32(_state_of(value))
        if isinstance(value, (bytearray, array.array)):
            return id(value), zlib.crc32(value)
        if depth == 0:
            return id(value)
        if isinstance(value, (list, tuple, collections.deque)):
            items: list[Any] = list(value)[:ITEMS]
            return type(value).__name__, len(value), tuple(self._of(one, depth - 1) for one in items)
        if isinstance(value, (set, frozenset)):
            plain = [one for one in list(value)[:ITEMS] if type(one) in (bool, int, float, str, bytes, type(None))]
            return type(value).__name__, len(value), frozenset(plain)
        fields = fields_of(value)
        if fields is None:
            return id(value)
        pairs = list(fields.items())[:ITEMS]
        return id(value), len(fields), tuple((self._of(key, 1), self._of(one, depth - 1)) for key, one in pairs)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Grown:
    """A list, a deque or a dict that was appended to since it had `size` items, and not changed otherwise."""

    value: Any
    size: int

    def shortened(self) -> Any:
        """Take away what was appended, in place, and return it."""
        while len(self.value) > self.size:
            _ = self.value.popitem() if isinstance(self.value, dict) else self.value.pop()
        return self.value


def changed_places(before: Scan, after: Scan) -> dict[Place, Any]:
    """Where something else is held now, or something has come or gone, and what was held before: a `Grown` where items
    were appended in place."""
    found: dict[Place, Any] = {}
    for holder, then, now, values in zip(before.holders, before.seen, after.seen, before.values, strict=True):
        if then != now:
            for name in dict.fromkeys([*then, *now]):
                if then.get(name, MISSING) != now.get(name, MISSING):
                    place = Place(f"{holder.label}{name}", holder.fields, name, holder.identity(name))
                    value = values.get(name, MISSING)
                    found[place] = _grown(value, then.get(name), now.get(name)) if value is place.get() else value
    return found


def _grown(value: Any, then: Any, now: Any) -> Any:
    """`then` and `now`: what a scan has made of it: a kind or an identity, a number of items, and the items."""
    if not isinstance(value, (list, collections.deque, dict)) or not isinstance(then, tuple):
        return value
    kind, size, items = then
    is_same = isinstance(now, tuple) and now[0] == kind and size < min(now[1], ITEMS) and now[2][:size] == items
    return Grown(value, size) if is_same else value


def numbers_of(value: Tensor) -> int:
    """A checksum of a small tensor on the CPU; 0 for others."""
    is_read = value.device.type == "cpu" and type(value) is Tensor and value.layout is torch.strided
    if not is_read or value.nbytes > SMALL:
        return 0
    return zlib.crc32(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers that is not a global one."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def _state_of(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return pickle.dumps(generator)
