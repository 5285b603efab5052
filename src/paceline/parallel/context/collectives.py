"""Collectives between the workers that split a sequence (context parallel), as operations with a backward.

Every worker computes the same loss, and backward is that of the *sum* of all workers' losses: the backward of each
operation is the exact transpose of its forward. So for any parameter, used on slices or on whole tensors, the **mean**
over the group of the workers' gradients is the gradient of the loss. Nothing needs to be known about parameters.

    operation    forward                                  backward
    gathered     slices to the whole, on all workers      sum over workers, one's slice of it
    total        sum over workers, on all workers         the same
    moved        tokens to other workers                  back
    by_heads     all heads of a slice of the tokens to    back; heads that several workers have are summed
                 all tokens of a slice of the heads
    by_tokens    its inverse                              back

Taking one's slice of a whole tensor moves nothing in either direction, and is an ordinary view. The classes below run
the collectives over a process group or between threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from paceline.errors import SyncError
from paceline.parallel.context.token_slices import Range, Ranges, num_tokens, overlaps, slice_of, slices
from paceline.parallel.second_order import refuse_second_order, refuse_transforms
from paceline.parallel.tensor.collectives import TensorCollectives, TorchTensorCollectives
from paceline.parallel.tensor.emulated_group import EmulatedGroup, emulate
from paceline.parallel.tensor.split_tensor import on_parts

__all__ = [
    "ContextCollectives",
    "EmulatedContextCollectives",
    "TorchContextCollectives",
    "by_heads",
    "by_tokens",
    "emulated",
    "gathered",
    "moved",
    "slice_from",
    "total",
]

Move = Callable[[Tensor], Tensor]


def slice_from(whole: Tensor, *, dim: int, ranges: Ranges) -> Tensor:
    """Return some ranges of a dim, one after the other: a view where there is only one."""
    pieces = [whole.narrow(dim, first, stop - first) for first, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def total(tensor: Tensor, group: ContextCollectives) -> Tensor:
    """Return the sum of all workers' tensors."""
    return _cross(tensor, group.all_reduce, group.all_reduce)


def gathered(tensor: Tensor, group: ContextCollectives, *, dim: int, sections: tuple[int, ...]) -> Tensor:
    """Return the whole tensor of which each worker has a slice."""
    each = [slices(sections, size=group.size, index=index) for index in range(group.size)]
    longest = max(map(num_tokens, each))

    def collect(part: Tensor) -> Tensor:
        parts = group.all_gather(_padded(part, dim, longest))
        if len(sections) == 1:
            return torch.cat([one.narrow(dim, 0, num_tokens(have)) for one, have in zip(parts, each, strict=True)], dim)
        whole = part.new_empty(_with(part, dim, sum(sections)))
        for one, have in zip(parts, each, strict=True):
            start = 0
            for first, stop in have:
                whole.narrow(dim, first, stop - first).copy_(one.narrow(dim, start, stop - first))
                start += stop - first
        return whole

    def sum_slice(grad: Tensor) -> Tensor:
        parts = [_padded(slice_from(grad, dim=dim, ranges=have), dim, longest) for have in each]
        return group.reduce_scatter(parts).narrow(dim, 0, num_tokens(each[group.index]))

    return _cross(tensor, collect, sum_slice)


def moved(
    tensor: Tensor, group: ContextCollectives, *, dim: int, held: Sequence[Ranges], wanted: Sequence[Ranges]
) -> Tensor:
    """Return the tokens that this worker wants. `held` and `wanted` list those of all workers; none is wanted twice."""
    return _cross(
        tensor,
        lambda have: _deliver(have, group, dim, held, wanted),
        lambda grad: _deliver(grad, group, dim, wanted, held),
    )


def by_heads(
    tensor: Tensor, group: ContextCollectives, *, dim: int, length: int, heads: Sequence[Range], along: int = -3
) -> Tensor:
    """Return all `length` tokens (in `dim`) of this worker's `heads` (in the dim `along`)."""
    ahead, back = _head_exchange(group, tensor.ndim, dim, length, heads, along, tensor.shape[along])
    return _cross(tensor, ahead, back)


def by_tokens(
    tensor: Tensor, group: ContextCollectives, *, dim: int, length: int, heads: Sequence[Range], along: int = -3
) -> Tensor:
    """Return all heads of this worker's tokens; each head must be on one worker."""
    back, ahead = _head_exchange(group, tensor.ndim, dim, length, heads, along, max(stop for _, stop in heads))
    return _cross(tensor, ahead, back)


def _head_exchange(
    group: ContextCollectives, ndim: int, dim: int, length: int, heads: Sequence[Range], along: int, num_heads: int
) -> tuple[Move, Move]:
    """Return two functions: slices of tokens to slices of heads, and back."""
    dim, along = dim % ndim, along % ndim
    tokens = [slice_of(length, size=group.size, index=index) for index in range(group.size)]
    mine, own = tokens[group.index], heads[group.index]

    def to_heads(part: Tensor) -> Tensor:
        parts = [part.narrow(along, first, stop - first) for first, stop in heads]
        shapes = [_with(part, dim, stop - first, along, own[1] - own[0]) for first, stop in tokens]
        return torch.cat(group.all_to_all(parts, shapes), dim)

    def to_tokens(part: Tensor) -> Tensor:
        parts = [part.narrow(dim, first, stop - first) for first, stop in tokens]
        shapes = [_with(part, dim, mine[1] - mine[0], along, stop - first) for first, stop in heads]
        received = group.all_to_all(parts, shapes)
        if all(one[1] == other[0] for one, other in itertools.pairwise(heads)):
            return torch.cat(received, along)
        whole = part.new_zeros(_with(part, dim, mine[1] - mine[0], along, num_heads))
        for one, (first, stop) in zip(received, heads, strict=True):
            whole.narrow(along, first, stop - first).add_(one)
        return whole

    return to_heads, to_tokens


def _deliver(
    have: Tensor, group: ContextCollectives, dim: int, held: Sequence[Ranges], wanted: Sequence[Ranges]
) -> Tensor:
    """Return the tokens that this worker wants; those that no worker holds are zeros."""
    mine, own = held[group.index], wanted[group.index]
    parts, shapes, places = [], [], []
    for theirs in wanted:
        found = overlaps(mine, theirs)
        pieces = [have.narrow(dim, place, length) for place, _, length in found]
        parts.append(torch.cat(pieces, dim) if pieces else have.narrow(dim, 0, 0))
    for theirs in held:
        found = overlaps(theirs, own)
        shapes.append(_with(have, dim, sum(length for _, _, length in found)))
        places.append(found)
    out = have.new_zeros(_with(have, dim, num_tokens(own)))
    for received, found in zip(group.all_to_all(parts, shapes), places, strict=True):
        start = 0
        for _, place, length in found:
            out.narrow(dim, place, length).copy_(received.narrow(dim, start, length))
            start += length
    return out


def _padded(part: Tensor, dim: int, length: int) -> Tensor:
    missing = length - part.shape[dim]
    return torch.cat([part, part.new_zeros(_with(part, dim, missing))], dim) if missing else part


def _with(tensor: Tensor, *changes: int) -> tuple[int, ...]:
    """Return the shape of a tensor with other lengths at some dims: dim, length, dim, length, ..."""
    shape = list(tensor.shape)
    for dim, length in zip(changes[::2], changes[1::2], strict=True):
        shape[dim] = length
    return tuple(shape)


def _cross(tensor: Tensor, ahead: Move, back: Move) -> Tensor:
    refuse_transforms("Layout(context=...)")
    result: Any = _TokenExchange.apply(tensor, ahead, back)
    return result


class _TokenExchange(Function):
    """One move forward, and its transpose for the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ahead: Move, back: Move) -> Tensor:
        ctx.back = back
        out = ahead(tensor)
        return out.view_as(out) if out is tensor else out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        refuse_second_order("Layout(context=...)")
        with on_parts():
            return ctx.back(grad_outputs[0]), None, None


T = TypeVar("T")
Shape = tuple[int, ...]


class ContextCollectives(TensorCollectives, Protocol):
    """The collectives of one context parallel group. All workers must make the same calls in the same order; each call
    blocks."""

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Send `parts[k]` to worker k, and return what each worker sent here: from worker k a tensor of `shapes[k]`."""
        ...


class TorchContextCollectives(TorchTensorCollectives):
    """Collectives over a torch process group of two or more workers; no default group is needed."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self._process_group: Any = process_group

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        sent = torch.cat([part.reshape(-1) for part in parts])
        lengths = [torch.Size(shape).numel() for shape in shapes]
        received = sent.new_empty(sum(lengths))
        work = self._process_group.alltoall_base(received, sent, lengths, [part.numel() for part in parts])
        try:
            work.wait()
        except RuntimeError as error:  # torch has no narrower type for a lost peer
            message = f"lost contact with a peer during the all-to-all of a context parallel sequence: {error}"
            raise SyncError(message) from error
        self.traffic.note("all_to_all", sent.numel() * sent.element_size())
        return [one.view(shape) for one, shape in zip(received.split(lengths), shapes, strict=True)]


class EmulatedContextCollectives:
    """One thread's end of a group of threads."""

    def __init__(self, group: EmulatedGroup) -> None:
        self.index, self.size, self.traffic = group.index, group.size, group.traffic
        self.all_reduce, self.all_gather, self.reduce_scatter = (
            group.all_reduce,
            group.all_gather,
            group.reduce_scatter,
        )

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        every_worker = [self.all_gather(part) for part in parts]  # by receiver, then by sender
        received = every_worker[self.index]
        for sender, (one, shape) in enumerate(itertools.zip_longest(received, shapes)):
            if tuple(one.shape) != tuple(shape):
                raise SyncError(f"worker {sender} sent {tuple(one.shape)}, but {tuple(shape)} was expected")
        return received


def emulated(size: int, work: Callable[[EmulatedContextCollectives], T]) -> list[T]:
    """Return what `work(group)` returned for each of `size` workers, emulated by threads of this process."""
    return emulate(size, lambda group: work(EmulatedContextCollectives(group)))
