"""The operations that wait for their result. Gradients flow through those that return a new tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from paceline.compat.horovod import operations as begin
from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.compression import Compression, Compressor
from paceline.compat.horovod.handles import synchronize
from paceline.compat.horovod.operations import chosen_reduction
from paceline.compat.horovod.process_sets import ProcessSet, global_process_set, members_of
from paceline.compat.horovod.requests import Reduction

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]

Chosen = type[Compressor]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Chosen = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the reduction of a tensor over all members."""
    reduction = chosen_reduction(op, average)
    small, context = compression.compress(tensor)
    (result,) = _AllReduce.apply(name, reduction, prescale_factor, postscale_factor, process_set, False, small)
    return compression.decompress(result, context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all members, in place; returns it."""
    reduction = chosen_reduction(op, average)
    return synchronize(
        begin.allreduce_async_(tensor, None, name, reduction, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Chosen = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors, as one operation."""
    reduction = chosen_reduction(op, average)
    small, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    results = _AllReduce.apply(name, reduction, prescale_factor, postscale_factor, process_set, True, *small)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Sequence[Tensor]:
    """Reduce several tensors as one operation, in place; returns them."""
    reduction = chosen_reduction(op, average)
    return synchronize(
        begin.grouped_allreduce_async_(tensors, None, name, reduction, prescale_factor, postscale_factor, process_set)
    )


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return the rows of all members, one behind the other."""
    (result,) = _AllGather.apply(name, process_set, False, tensor)
    return result


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return the rows of all members of several tensors, as one operation."""
    return list(_AllGather.apply(name, process_set, True, *tensors))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of rank `root_rank`."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite the tensor with that of rank `root_rank`; returns it."""
    return synchronize(begin.broadcast_async_(tensor, root_rank, name, process_set))


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that all members send to this one; with `splits`, also how many came from which."""
    rows, received = _AllToAll.apply(tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Chosen = Compression.none,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this member's rows of the reduction over all."""
    small, context = compression.compress(tensor)
    (result,) = _ReduceScatter.apply(name, op, process_set, prescale_factor, postscale_factor, False, small)
    return compression.decompress(result, context)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Chosen = Compression.none,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this member's rows of the reductions of several tensors, as one operation."""
    small, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    results = _ReduceScatter.apply(name, op, process_set, prescale_factor, postscale_factor, True, *small)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


class _AllReduce(Function):
    """The gradient of a reduction over all members is the same reduction of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        reduction: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        is_grouped: bool,
        *tensors: Tensor,
    ) -> Any:
        ctx.settings = reduction, prescale, postscale, process_set
        if is_grouped:
            return synchronize(
                begin.grouped_allreduce_async(tensors, None, name, reduction, prescale, postscale, process_set)
            )
        handle = begin.allreduce_async(tensors[0], None, name, reduction, prescale, postscale, process_set)
        return (synchronize(handle),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reduction, prescale, postscale, process_set = ctx.settings
        results = synchronize(
            begin.grouped_allreduce_async(
                [one.contiguous() for one in gradients], None, None, reduction, prescale, postscale, process_set
            )
        )
        return (None,) * 6 + tuple(results)


class _AllGather(Function):
    """The gradient of a member's rows: the mean over all members of what they have for these rows."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_grouped: bool, *tensors: Tensor) -> Any:
        ctx.lengths, ctx.process_set = [one.shape[0] if one.dim() else 0 for one in tensors], process_set
        if is_grouped:
            return synchronize(begin.grouped_allgather_async(tensors, name, process_set))
        return (synchronize(begin.allgather_async(tensors[0], name, process_set)),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        process_set, lengths = ctx.process_set, torch.tensor([ctx.lengths])
        means = synchronize(
            begin.grouped_allreduce_async(
                [one.contiguous() for one in gradients], op=Reduction.AVERAGE, process_set=process_set
            )
        )
        before = synchronize(begin.allgather_async(lengths, process_set=process_set))[: process_set.rank() or 0].sum(0)
        own = [
            mean.narrow(0, int(start), length) for mean, start, length in zip(means, before, ctx.lengths, strict=True)
        ]
        return (None, None, None, *own)


class _Broadcast(Function):
    """The gradient of the root's tensor: the mean of all members' gradients; the others have none."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(begin.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        handle = begin.allreduce_async(gradients[0].contiguous(), op=Reduction.AVERAGE, process_set=ctx.process_set)
        mean = synchronize(handle)
        return (mean if sessions.current_session().rank == ctx.root_rank else mean.zero_()), None, None, None


class _AllToAll(Function):
    """The gradient goes back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        splits: Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        rows, received = synchronize(begin.alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.shape = received, process_set, tensor.shape
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        handle = begin.alltoall_async(gradients[0].contiguous(), ctx.received, process_set=ctx.process_set)
        back, _ = synchronize(handle)
        missing = ctx.shape[0] - len(back)  # rows that were sent to nobody
        if missing:
            back = torch.cat([back, back.new_zeros((missing, *ctx.shape[1:]))])
        return back, None, None, None


class _ReduceScatter(Function):
    """The gradient: all members' gradients of their rows, by as much as the reduction scales."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        is_grouped: bool,
        *tensors: Tensor,
    ) -> Any:
        ctx.process_set = process_set
        ctx.factor = prescale * postscale * (len(members_of(process_set)) if op == Reduction.SUM else 1)
        if is_grouped:
            return synchronize(begin.grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale))
        return (synchronize(begin.reducescatter_async(tensors[0], name, op, process_set, prescale, postscale)),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = [(one * ctx.factor).contiguous() for one in gradients]
        return (None,) * 6 + tuple(synchronize(begin.grouped_allgather_async(scaled, process_set=ctx.process_set)))
