"""The operations of Horovod on tensors, asynchronous: each returns a handle (`handles.py`).

An operation is matched by its name on the members of its process set, whatever the order of the calls, and operations
without a name by their order. `differentiable.py` has the ones that wait for the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.errors import HorovodInternalError, not_initialized
from paceline.compat.horovod.handles import handle_of, op_of, synchronize
from paceline.compat.horovod.pending_op import PendingOp, written_event
from paceline.compat.horovod.process_sets import ProcessSet, global_process_set, members_of
from paceline.compat.horovod.requests import Kind, OpRequest, Reduction, request_of

__all__ = [
    "RepeatedReduction",
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "barrier",
    "broadcast_async",
    "broadcast_async_",
    "chosen_reduction",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "join",
    "reducescatter_async",
    "sparse_allreduce_async",
]

REDUCED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.int16,
)


def chosen_reduction(op: int | None, average: bool | None) -> int:
    """Return the reduction that is meant; `average` is Horovod's older way to say it. Raises ValueError for both."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return op
    if average is None:
        return Reduction.AVERAGE
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0", DeprecationWarning, stacklevel=3
    )
    return Reduction.AVERAGE if average else Reduction.SUM


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce a tensor over all members, into a new one."""
    reduction = chosen_reduction(op, average)
    return _all_reduce([tensor], None, name, reduction, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce a tensor over all members, in place."""
    reduction = chosen_reduction(op, average)
    return _all_reduce([tensor], [tensor], name, reduction, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce several tensors as one operation, into new ones."""
    reduction = chosen_reduction(op, average)
    return _all_reduce(tensors, None, name, reduction, prescale_factor, postscale_factor, process_set, is_grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce several tensors as one operation, in place."""
    reduction = chosen_reduction(op, average)
    return _all_reduce(
        tensors, tensors, name, reduction, prescale_factor, postscale_factor, process_set, is_grouped=True
    )


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Reduce a sparse tensor over all members: their indices and values are gathered. Returns a function that waits
    for the result, a sparse tensor whose equal indices are not added up yet.
    """
    values = allgather_async(tensor._values(), name=f"{name}.values", process_set=process_set)
    indices = allgather_async(tensor._indices().t().contiguous(), name=f"{name}.indices", process_set=process_set)
    size = len(members_of(process_set))

    def wait() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Reduction.AVERAGE:
            all_values = all_values / size
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape)

    return wait


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Gather the rows of all members, one behind the other; members may have different numbers of rows."""
    return _submit(Kind.ALLGATHER, [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Gather several tensors as one operation."""
    return _submit(Kind.ALLGATHER, tensors, name, process_set, is_grouped=True)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Send the tensor of rank `root_rank` (of all workers) to all members, into a new tensor."""
    return _broadcast(tensor, torch.empty_like(tensor.detach()), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Overwrite the tensor of all members with that of rank `root_rank`."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Send rows to each member: the first `splits[0]` to the first, and so on; an equal number without `splits`.

    The result is a pair: the rows that came, and from which member how many. Raises ValueError for splits that do not
    fit the tensor.
    """
    members = members_of(process_set)
    rows = _splits_of(tensor, splits, len(members))
    return _submit(Kind.ALLTOALL, [tensor], name, process_set, splits=rows)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce a tensor over all members, and give each its share of the rows."""
    return _reduce_scatter([tensor], name, op, process_set, prescale_factor, postscale_factor, is_grouped=False)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce and scatter several tensors as one operation."""
    return _reduce_scatter(tensors, name, op, process_set, prescale_factor, postscale_factor, is_grouped=True)


def join(device: int = -1) -> int:
    """Say that this worker has no more data, and wait until all have. Returns the rank that joined last.

    Until then it takes part in the others' all-reduces, with zeros; averages still divide by all. `device` is for
    Horovod's zeros on a GPU: here they are in host memory.
    """
    session = _session()
    op = PendingOp(request=OpRequest(name=Kind.JOIN, kind=Kind.JOIN))
    session.submit(op, is_urgent=True)
    return int(op.wait())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all members have come here."""
    session = _session()
    members_of(process_set)
    set_id = process_set.process_set_id or 0
    name = session.name_for(Kind.BARRIER, None, set_id)
    op = PendingOp(request=OpRequest(name=name, kind=Kind.BARRIER, set_id=set_id))
    session.submit(op)
    op.wait()


def _session() -> sessions.Session:
    if not sessions.is_open():
        raise HorovodInternalError(not_initialized())
    return sessions.current_session()


def _all_reduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor] | None,
    name: str | None,
    reduction: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    is_grouped: bool = False,
) -> int:
    for tensor in tensors:
        if tensor.dtype not in REDUCED or tensor.is_sparse:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if reduction == Reduction.ADASUM:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        size = _session().size
        if size & (size - 1):
            raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    targets = [torch.empty_like(tensor.detach()) for tensor in tensors] if outputs is None else list(outputs)
    return _submit(
        Kind.ALLREDUCE,
        tensors,
        name,
        process_set,
        outputs=targets,
        is_grouped=is_grouped,
        reduction=reduction,
        prescale=float(prescale),
        postscale=float(postscale),
    )


def _reduce_scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    *,
    is_grouped: bool,
) -> int:
    if op == Reduction.ADASUM:
        raise HorovodInternalError("Reducescatter does not support Adasum: use hvd.Average or hvd.Sum.")
    for tensor in tensors:
        if tensor.dtype not in REDUCED:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if not tensor.dim():
            raise ValueError("Reducescatter needs a tensor of at least one dimension, whose rows it can share out.")
    return _submit(
        Kind.REDUCESCATTER,
        tensors,
        name,
        process_set,
        is_grouped=is_grouped,
        reduction=op,
        prescale=float(prescale),
        postscale=float(postscale),
    )


def _broadcast(tensor: Tensor, output: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    return _submit(Kind.BROADCAST, [tensor], name, process_set, outputs=[output], root=int(root_rank))


def _splits_of(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return how many rows go to each member."""
    if not tensor.dim():
        raise ValueError("Alltoall needs a tensor of at least one dimension, whose rows it can send.")
    if splits is None or len(splits) == 0:
        if len(tensor) % size:
            raise ValueError(f"Alltoall: {len(tensor)} rows do not divide among {size} workers; give splits.")
        return (len(tensor) // size,) * size
    if isinstance(splits, Tensor) and (splits.is_floating_point() or splits.is_complex() or splits.dim() != 1):
        raise ValueError(f"Alltoall: splits must be whole numbers in one dimension, not {splits.dtype}.")
    rows = tuple(int(one) for one in splits)
    if len(rows) != size or min(rows) < 0 or sum(rows) > len(tensor):
        raise ValueError(
            f"Alltoall: splits {list(rows)} do not fit: they must be {size} numbers, 0 or more, of which the sum is at "
            f"most the tensor's {len(tensor)} rows."
        )
    return rows


class RepeatedReduction:
    """An all-reduce in place that comes in every step, of one name: what is said of a tensor is looked at once, as long
    as tensors are of the same kind."""

    def __init__(
        self, name: str, *, reduction: int, prescale: float, postscale: float, process_set: ProcessSet
    ) -> None:
        self._terms = (name, reduction, prescale, postscale, process_set)
        self._process_set = process_set
        self._session: sessions.Session | None = None  # in which the tensor was looked at
        self._request: OpRequest | None = None
        self._dtype, self._shape, self._device = torch.float32, torch.Size(), torch.device("meta")

    def begin(self, tensor: Tensor) -> int:
        """Submit the tensor, and return the handle. Raises what `allreduce_async_` raises."""
        session, request = _session(), self._request
        if (
            request is None
            or session is not self._session
            or self._process_set.process_set_id != request.set_id
            or tensor.dtype is not self._dtype
            or tensor.shape != self._shape
            or tensor.device != self._device
            or tensor.is_sparse
        ):
            handle = _all_reduce([tensor], [tensor], *self._terms)
            self._session, self._request = session, op_of(handle).request
            self._dtype, self._shape, self._device = tensor.dtype, tensor.shape, tensor.device
            return handle
        tensors = (tensor,)
        op = PendingOp(request=request, inputs=tensors, outputs=tensors, written_by=written_event(tensors))
        session.submit(op)
        return handle_of(op, session.flush)


def _submit(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    outputs: Sequence[Tensor] = (),
    is_grouped: bool = False,
    **settings: Any,
) -> int:
    session = _session()
    members_of(process_set)
    set_id = process_set.process_set_id or 0
    request = request_of(
        name=session.name_for(kind, name, set_id),
        kind=kind,
        set_id=set_id,
        dtypes=tuple(str(tensor.dtype)[6:] for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        device="cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu",
        **settings,
    )
    op = PendingOp(
        request=request,
        inputs=list(tensors),
        outputs=outputs,
        is_grouped=is_grouped,
        written_by=written_event(tensors),
    )
    session.submit(op)
    return handle_of(op, session.flush)
