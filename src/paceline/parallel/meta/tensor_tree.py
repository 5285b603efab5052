"""Tensors inside of what forwards take and return: tuples, lists, dicts, named tuples, dataclasses, nested.

Tensors are visited in one fixed order, which is what gives the values of a forward their numbers. Where layers are cut,
or sequences shared, a value may be a part that says the shape of the whole (a `SplitTensor`): stages keep and send the
part.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch's own registry of containers; it has no public door for trees

from paceline.parallel.tensor.shape_rules import full_shape
from paceline.parallel.tensor.split_shapes import Sections
from paceline.parallel.tensor.split_tensor import SplitTensor, TensorGroupOps, on_parts, wrap

__all__ = ["TensorSpec", "held", "map_leaves", "map_tensors", "shape_key", "tensors_in"]


@dataclasses.dataclass(frozen=True, slots=True)
class SplitLayout:
    """How a tensor is cut: see `SplitTensor`; `under`: and how its part is, along tokens."""

    dim: int
    sections: Sections
    site: str = dataclasses.field(compare=False)
    team: TensorGroupOps = dataclasses.field(compare=False, repr=False)
    under: SplitLayout | None = None

    @classmethod
    def of(cls, tensor: SplitTensor) -> SplitLayout:
        way = tensor.under
        under = None if way is None else cls(way.dim, way.sections, way.site, way.team)
        return cls(tensor.split_dim, tensor.sections, tensor.site, tensor.team, under)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, without its values. `held` and `stride` are of what is here, `cut` says what of the whole it
    is; None: it is the whole."""

    shape: tuple[int, ...]
    held: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    cut: SplitLayout | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        with on_parts():
            part, stride = tuple(tensor.shape), tuple(tensor.stride())
            if not isinstance(tensor, SplitTensor):
                return cls(part, part, stride, tensor.dtype, tensor.requires_grad)
            cut = SplitLayout.of(tensor)
            return cls(tuple(_whole_shape(tensor)), part, stride, tensor.dtype, tensor.requires_grad, cut)

    def ghost(self) -> Tensor:
        """A new tensor of this kind on the meta device."""
        ghost = torch.empty_strided(self.held, self.stride, dtype=self.dtype, device="meta")
        return self.seen(ghost.requires_grad_() if self.requires_grad else ghost)

    def seen(self, part: Tensor) -> Tensor:
        """Return a fresh tensor of what is held as the model's code is to see it; it is changed in place."""
        cut = self.cut
        while cut is not None:
            wrap(part, team=cut.team, dim=cut.dim, sections=cut.sections, site=cut.site)
            cut = cut.under
        return part

    @property
    def num_bytes(self) -> int:
        """Of what is here."""
        return math.prod(self.held) * self.dtype.itemsize

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor is of this kind, wherever it is in memory, and whoever wants its gradient."""
        if self.cut is None and not isinstance(tensor, SplitTensor):  # of every value in every micro-batch
            return tensor.shape == self.held and tensor.dtype == self.dtype
        other = TensorSpec.of(tensor)
        return (other.held, other.dtype, other.cut) == (self.held, self.dtype, self.cut)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def _whole_shape(cut: SplitTensor) -> list[int]:
    shape = list(full_shape(cut))
    if cut.under is not None:
        shape[cut.under.dim] = sum(cut.under.sections)
    return shape


def held(tensor: Tensor) -> Tensor:
    """Return what is here of a tensor, as a plain one; it shares memory and gradient."""
    if not isinstance(tensor, SplitTensor):
        return tensor
    with on_parts():
        return tensor.view_as(tensor)


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
    _note_kinds(value, parts)
    return tuple(parts)


def _note_kinds(value: Any, parts: list[Any]) -> None:
    """In the order of `map_leaves`, without its copies: this runs for every micro-batch."""
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
