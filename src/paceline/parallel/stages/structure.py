"""Tensors inside of what forwards take and return: tuples, lists, dicts, named tuples, dataclasses, nested.

Tensors are visited in one fixed order, which is what gives the values of a forward their numbers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch's own registry of containers; it has no public door for trees

__all__ = ["Spec", "map_leaves", "map_tensors", "shape_key", "tensors_in"]


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor is, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def ghost(self) -> Tensor:
        """A new tensor of this kind on the meta device."""
        ghost = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return ghost.requires_grad_() if self.requires_grad else ghost

    def fits(self, tensor: Tensor) -> bool:
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure with each of its leaves changed; what holds no containers is a leaf itself.

    Containers in which nothing has changed are returned as they are, not copied.
    """
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        items = [map_leaves(item, change) for item in value]
        return kind(items) if _differ(items, value) else value
    if kind is dict:
        items = [map_leaves(item, change) for item in value.values()]
        return dict(zip(value, items, strict=True)) if _differ(items, value.values()) else value
    if kind in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(value):
        children, spec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
        items = [map_leaves(child, change) for child in children]
        return pytree.tree_unflatten(items, spec) if _differ(items, children) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_fields(value, change)
    return change(value)


def _map_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    former = [getattr(value, name) for name in names]
    items = [map_leaves(item, change) for item in former]
    if not _differ(items, former):
        return value
    twin = copy.copy(value)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(twin, name, item)  # also where the class is frozen
    return twin


def _differ(items: Iterable[Any], former: Iterable[Any]) -> bool:
    return any(item is not other for item, other in zip(items, former, strict=True))


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a structure with each of its tensors changed."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a structure, in order, repetitions included."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    """The same order as `map_leaves`, without its copies: this runs for every operation between units."""
    if isinstance(value, Tensor):
        found.append(value)
        return
    kind = type(value)
    if kind is tuple or kind is list:
        for item in value:
            _collect(item, found)
    elif kind is dict:
        for item in value.values():
            _collect(item, found)
    elif kind in _PLAIN:
        return
    else:
        map_leaves(value, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else leaf)


_PLAIN = frozenset(
    (int, float, bool, str, type(None), slice, type(...), torch.dtype, torch.device, torch.Size, torch.layout)
)


def shape_key(value: Any) -> tuple[Any, ...]:
    """What of an input decides which way a forward goes: shapes and types of tensors, and all else by its text."""
    parts: list[Any] = []

    def note(leaf: Any) -> Any:
        parts.append((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf))
        return leaf

    map_leaves(value, note)
    return tuple(parts)
