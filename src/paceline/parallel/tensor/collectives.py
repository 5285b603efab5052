"""Collectives between the workers of a tensor parallel group, as operations with a backward.

A tensor is either *plain*: the same on all workers, and so is its gradient. Or it is *split*: each worker holds its
part of it and of its gradient. Five operations lead from one state to the other:

    operation         forward                     backward                   where
    copy_to_group     nothing                     all-reduce                 plain, before split work (Megatron-LM's f)
    total             all-reduce                  nothing                    partial sums to plain (its g)
    scatter           take one's part             all-gather                 plain to split
    gather            all-gather                  take one's part            split to plain
    gather_for_group  all-gather                  reduce-scatter             split, before other split work
    scatter_total     reduce-scatter              all-gather                 partial sums to split

The last two serve sequence parallelism. Sources: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from paceline.errors import SyncError
from paceline.parallel.second_order import refuse_transforms
from paceline.parallel.tensor.split_shapes import Sections, num_held, ranges

__all__ = [
    "SingleTensorCollectives",
    "TensorCollectives",
    "TorchTensorCollectives",
    "TrafficCounter",
    "copy_to_group",
    "gather",
    "gather_for_group",
    "gathered",
    "part_of",
    "scatter",
    "scatter_total",
    "total",
    "whole_of",
]


@dataclasses.dataclass(kw_only=True, slots=True)
class TrafficCounter:
    """Counts the collectives of a group by kind: how many, and the bytes of the whole tensor that each moved."""

    calls: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    num_bytes: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    def note(self, kind: str, num_bytes: int) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.num_bytes[kind] = self.num_bytes.get(kind, 0) + num_bytes

    def clear(self) -> None:
        self.calls.clear()
        self.num_bytes.clear()


class TensorCollectives(Protocol):
    """The collectives of one tensor parallel group. All workers must make the same calls in the same order; each call
    blocks."""

    index: int
    size: int
    traffic: TrafficCounter

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of all workers' tensors, in new memory."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return all workers' tensors, by index."""
        ...

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        """Return the sum over all workers of `parts[self.index]`."""
        ...


class SingleTensorCollectives:
    """The group of one worker, where nothing moves."""

    index = 0
    size = 1

    def __init__(self) -> None:
        self.traffic = TrafficCounter()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        return parts[0]


class TorchTensorCollectives:
    """Collectives over a torch process group of two or more workers; no default group is needed."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.index, self.size = process_group.rank(), process_group.size()
        self.traffic = TrafficCounter()
        self._group = process_group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        out = tensor.clone(memory_format=torch.contiguous_format)
        self._wait(self._group.allreduce([out]), "all-reduce")
        self.traffic.note("all_reduce", _num_bytes(out))
        return out

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(self._group.allgather([parts], [tensor]), "all-gather")
        self.traffic.note("all_gather", _num_bytes(tensor) * self.size)
        return parts

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        parts = [part.contiguous() for part in parts]
        out = torch.empty_like(parts[0])
        self._wait(self._group.reduce_scatter([out], [parts]), "reduce-scatter")
        self.traffic.note("reduce_scatter", _num_bytes(out) * self.size)
        return out

    def _wait(self, work: Any, what: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:  # torch has no narrower type for a lost peer
            message = f"lost contact with a peer during the {what} of a tensor parallel layer: {error}"
            raise SyncError(message) from error


def part_of(tensor: Tensor, *, dim: int, sections: Sections, size: int, index: int) -> Tensor:
    """Return what worker `index` of `size` holds of a whole tensor: a view where the dim has one section."""
    parts = [tensor.narrow(dim, a, b - a) for a, b in ranges(sections, size=size, index=index)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def whole_of(parts: list[Tensor], *, dim: int, sections: Sections) -> Tensor:
    """Put all workers' parts, by index, together again."""
    if len(parts) == 1:
        return parts[0]
    if len(sections) == 1:
        return torch.cat(parts, dim)
    held = [ranges(sections, size=len(parts), index=index) for index in range(len(parts))]
    pieces = [part.split([stop - first for first, stop in one], dim) for part, one in zip(parts, held, strict=True)]
    return torch.cat([piece for same in zip(*pieces, strict=True) for piece in same], dim)


def gathered(part: Tensor, group: TensorCollectives, *, dim: int, sections: Sections) -> Tensor:
    """Return the whole of all workers' parts, without a gradient; all workers of the group must call it.

    A collective moves tensors of one shape, so parts that are shorter than the first one are padded with zeros.
    """
    lengths = [num_held(sections, size=group.size, index=index) for index in range(group.size)]
    parts = group.all_gather(_padded(part, dim, lengths[0]))
    if lengths[-1] < lengths[0]:
        parts = [one.narrow(dim, 0, length) for one, length in zip(parts, lengths, strict=True)]
    return whole_of(parts, dim=dim, sections=sections)


def copy_to_group(tensor: Tensor, group: TensorCollectives) -> Tensor:
    """Return a plain tensor for use in split work: its gradient is summed over the group."""
    if group.size == 1 or not _is_followed(tensor):
        return tensor
    return _cross(tensor, lambda whole: whole.view_as(whole), group.all_reduce)


def total(tensor: Tensor, group: TensorCollectives) -> Tensor:
    """Return the sum of partial results, plain."""
    return tensor if group.size == 1 else _cross(tensor, group.all_reduce, lambda grad: grad)


def scatter(tensor: Tensor, group: TensorCollectives, *, dim: int, sections: Sections) -> Tensor:
    """Return this worker's part of a plain tensor."""
    if group.size == 1:
        return tensor
    take, collect, _ = _moves(group, dim, sections)
    if not _is_followed(tensor):
        return take(tensor)
    # here autograd must not return a view of its input
    return _cross(tensor, lambda whole: take(whole).clone(), collect)


def gather(tensor: Tensor, group: TensorCollectives, *, dim: int, sections: Sections) -> Tensor:
    """Return the whole of a split tensor, for plain work."""
    take, collect, _ = _moves(group, dim, sections)
    return tensor if group.size == 1 else _cross(tensor, collect, take)


def gather_for_group(tensor: Tensor, group: TensorCollectives, *, dim: int, sections: Sections) -> Tensor:
    """Return the whole of a split tensor, for other split work: its gradient is summed over the group."""
    _, collect, sum_part = _moves(group, dim, sections)
    return tensor if group.size == 1 else _cross(tensor, collect, sum_part)


def scatter_total(tensor: Tensor, group: TensorCollectives, *, dim: int, sections: Sections) -> Tensor:
    """Return this worker's part of the sum of partial results."""
    _, collect, sum_part = _moves(group, dim, sections)
    return tensor if group.size == 1 else _cross(tensor, sum_part, collect)


Move = Callable[[Tensor], Tensor]


def _moves(group: TensorCollectives, dim: int, sections: Sections) -> tuple[Move, Move, Move]:
    """Return three functions: take a part, gather the whole, and return this worker's part of the sum over workers."""

    def take(whole: Tensor, index: int = group.index) -> Tensor:
        return part_of(whole, dim=dim, sections=sections, size=group.size, index=index)

    def collect(part: Tensor) -> Tensor:
        return gathered(part, group, dim=dim, sections=sections)

    def sum_part(whole: Tensor) -> Tensor:
        most, here = (num_held(sections, size=group.size, index=index) for index in (0, group.index))
        summed = group.reduce_scatter([_padded(take(whole, index), dim, most) for index in range(group.size)])
        return summed if here == most else summed.narrow(dim, 0, here)

    return take, collect, sum_part


def _padded(part: Tensor, dim: int, length: int) -> Tensor:
    """Return the part, padded with zeros to `length`."""
    if part.shape[dim] == length:
        return part
    shape = list(part.shape)
    shape[dim] = length - part.shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim)


def _is_followed(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _cross(tensor: Tensor, ahead: Move, back: Move) -> Tensor:
    refuse_transforms("Layout(tensor=...)")
    result: Any = _TensorCollective.apply(tensor, ahead, back)
    return result


class _TensorCollective(Function):
    """One move forward, and another one for the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ahead: Move, back: Move) -> Tensor:
        ctx.ahead, ctx.back = ahead, back
        return ahead(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return ctx.back(grad_outputs[0]), None, None
        # With create_graph=True: the five operations are each other's backwards, so the two moves change places.
        return _cross(grad_outputs[0], lambda grad: ctx.back(grad).clone(), ctx.ahead), None, None
