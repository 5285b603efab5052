"""Tensors in what forwards take and return: tuples, lists, dicts, named tuples, dataclasses, nested.

Tensors are visited in one fixed order, which gives the values of a forward their numbers. In tensor or context parallel
models a value may be a part that shows the shape of the whole (a `SplitTensor`): stages keep and send the part.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch's own registry of containers; no public module has trees

from paceline.parallel.tensor.shape_rules import full_shape
from paceline.parallel.tensor.split_shapes import Sections
from paceline.parallel.tensor.split_tensor import SplitTensor, TensorGroupOps, on_parts, wrap

__all__ = ["TensorSpec", "held", "map_leaves", "map_tensors", "shape_key", "tensors_in"]


@dataclasses.dataclass(frozen=True, slots=True)
class SplitLayout:
    """How a tensor is split (see `SplitTensor`); `under` says how its part is split along tokens."""

    dim: int
    sections: Sections
    site: str = dataclasses.field(compare=False)
    ops: TensorGroupOps = dataclasses.field(compare=False, repr=False)
    under: SplitLayout | None = None

    @classmethod
    def of(cls, tensor: SplitTensor) -> SplitLayout:
        way = tensor.under
        under = None if way is None else cls(way.dim, way.sections, way.site, way.ops)
        return cls(tensor.split_dim, tensor.sections, tensor.site, tensor.ops, under)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, without its values: `shape` of the whole, `held` and `stride` of the local part.

    `split` says which part of the whole it is; None: it is the whole.
    """

    shape: tuple[int, ...]
    held: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    split: SplitLayout | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        with on_parts():
            part, stride = tuple(tensor.shape), tuple(tensor.stride())
            if not isinstance(tensor, SplitTensor):
                return cls(part, part, stride, tensor.dtype, tensor.requires_grad)
            split = SplitLayout.of(tensor)
            return cls(tuple(_whole_shape(tensor)), part, stride, tensor.dtype, tensor.requires_grad, split)

    def placeholder(self) -> Tensor:
        """Return a new tensor of this kind on the meta device."""
        placeholder = torch.empty_strided(self.held, self.stride, dtype=self.dtype, device="meta")
        return self.seen(placeholder.requires_grad_() if self.requires_grad else placeholder)

    def seen(self, part: Tensor) -> Tensor:
        """Return a fresh local tensor as the model's code should see it; it is changed in place."""
        split = self.split
        while split is not None:
            wrap(part, ops=split.ops, dim=split.dim, sections=split.sections, site=split.site)
            split = split.under
        return part

    @property
    def num_bytes(self) -> int:
        """Bytes of the local part."""
        return math.prod(self.held) * self.dtype.itemsize

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor is of this kind, whatever its strides and whether it requires a gradient."""
        # the common case, for every value in every micro-batch
        if self.split is None and not isinstance(tensor, SplitTensor):
            return tensor.shape == self.held and tensor.dtype == self.dtype
        other = TensorSpec.of(tensor)
        return (other.held, other.dtype, other.split) == (self.held, self.dtype, self.split)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def _whole_shape(split: SplitTensor) -> list[int]:
    shape = list(full_shape(split))
    if split.under is not None:
        shape[split.under.dim] = sum(split.under.sections)
    return shape


def held(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, as a plain one; it shares memory and gradient."""
    if not isinstance(tensor, SplitTensor):
        return tensor
    with on_parts():
        return tensor.view_as(tensor)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure with each of its leaves changed; objects without containers are leaves.

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
    if pytree.is_namedtuple_instance(value):
        items = [map_leaves(item, change) for item in value]
        # some constructors check what they are given, as that of PackedSequence does
        return tuple.__new__(kind, items) if _differ(items, value) else value
    if kind in pytree.SUPPORTED_NODES:
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
    copied = copy.copy(value)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(copied, name, item)  # also where the class is frozen
    return copied


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
    """Collect in the order of `map_leaves`, without its copies: this runs for every operation between units."""
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
    """Return what of an input decides the course of a forward: shapes and types of tensors, and other values as
    text.
    """
    parts: list[Any] = []
    _note_kinds(value, parts)
    return tuple(parts)


def _note_kinds(value: Any, parts: list[Any]) -> None:
    """Collect in the order of `map_leaves`, without its copies: this runs for every micro-batch."""
    if isinstance(value, Tensor):
        parts.append((tuple(value.shape), value.dtype))
        return
    kind = type(value)
    if kind is tuple or kind is list:
        for item in value:
            _note_kinds(item, parts)
    elif kind is dict:
        for item in value.values():
            _note_kinds(item, parts)
    else:

        def note(leaf: Any) -> Any:
            parts.append((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf))
            return leaf

        map_leaves(value, note)
