"""Keeps what values hold, and puts it back: a trial of a forward, or its recording for stages, leaves no trace.

Containers, arrays and generators are put back in place, so whatever else holds them sees no other object. What cannot
be written, and what belongs to threads, files and layouts, is left alone.
"""

from __future__ import annotations

import array
import collections
import contextlib
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.worker.step.plain_state import BYTES, DEPTH, ITEMS, OBJECTS, is_generator, numbers_of
from paceline.worker.step.state_holders import CODE, MISSING, fields_of, is_machinery

__all__ = ["Keeper", "Restore"]

Restore = Callable[[], Any]  # puts back what an object held, and returns the object


class Keeper:
    """Keeps what values hold; what is shared is kept once."""

    def __init__(self, written: Collection[int] = (), *, copies: bool = True) -> None:
        """`written`: ids of tensors that are written in place; large ones are copied only then. `copies`: whether
        tensors and arrays may be written at all."""
        self._written, self._copies = written, copies
        self._known: dict[int, Restore] = {}

    def keep(self, value: Any, depth: int = DEPTH) -> Restore:
        """Return what puts the value back as it is now."""
        if id(value) not in self._known:
            self._known[id(value)] = lambda: value  # of one that contains itself
            if len(self._known) < OBJECTS:
                with contextlib.suppress(Exception):  # objects may do anything where they are read
                    self._known[id(value)] = self._kept(value, depth)
        return self._known[id(value)]

    def _kept(self, value: Any, depth: int) -> Restore:
        if value is MISSING or isinstance(value, CODE) or is_machinery(value):
            return lambda: value
        if isinstance(value, Tensor):
            is_copied = self._copies and (id(value) in self._written or value.nbytes <= BYTES)
            return _keep_tensor(value) if is_copied and _is_writable(value) else lambda: value
        if isinstance(value, np.ndarray):
            return _keep_array(value) if self._copies else lambda: value
        if is_generator(value):
            return _keep_generator(value)
        if isinstance(value, (bytearray, array.array)):
            return _keep_bytes(value)
        if depth == 0:
            return lambda: value
        if isinstance(value, tuple):
            return _keep_tuple(value, [self.keep(one, depth - 1) for one in value[:ITEMS]])
        if isinstance(value, (list, collections.deque)):
            is_short = len(value) <= ITEMS
            return _keep_items(value, [self.keep(one, depth - 1) for one in value]) if is_short else lambda: value
        if isinstance(value, set):
            return _keep_set(value)
        fields = fields_of(value)
        if fields is not None and len(fields) <= ITEMS:
            return _keep_fields(value, fields, {key: self.keep(one, depth - 1) for key, one in fields.items()})
        return lambda: value


def _keep_tensor(value: Tensor) -> Restore:
    copy, version, numbers = value.detach().clone(), value._version, numbers_of(value)

    def restore() -> Tensor:
        if value._version != version or numbers_of(value) != numbers:
            with torch.no_grad():
                value.copy_(copy)
        return value

    return restore


def _is_writable(value: Tensor) -> bool:
    is_spread = any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True))
    return not (value.is_meta or value.is_inference() or is_spread)


def _keep_bytes(value: Any) -> Restore:
    copy = value[:]

    def restore() -> Any:
        value[:] = copy
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

    def restore_other() -> Any:
        _ = value.setstate(kept) if is_python else value.set_state(kept)
        return value

    return restore_other


def _keep_tuple(value: Any, items: list[Restore]) -> Restore:
    def restore() -> Any:
        for item in items:
            item()  # a tuple holds the same objects for good
        return value

    return restore


def _keep_items(value: Any, items: list[Restore]) -> Restore:
    def restore() -> Any:
        found = [item() for item in items]
        if len(found) != len(value) or any(one is not other for one, other in zip(found, value, strict=True)):
            value.clear()
            value.extend(found)
        return value

    return restore


def _keep_set(value: set[Any]) -> Restore:
    copy = set(value)

    def restore() -> set[Any]:
        if value != copy:
            value.clear()
            value.update(copy)
        return value

    return restore


def _keep_fields(value: Any, fields: dict[Any, Any], items: Mapping[Any, Restore]) -> Restore:
    def restore() -> Any:
        for key in [key for key in fields if key not in items]:
            del fields[key]
        for key, item in items.items():
            found = item()
            if fields.get(key, MISSING) is not found:
                fields[key] = found
        return value

    return restore
