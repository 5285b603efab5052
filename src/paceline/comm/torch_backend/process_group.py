"""Shared memory as a back end of torch.distributed, for torch's own DDP, fully_shard and DTensor on the CPU.

The back end is a subclass of torch's ProcessGroup, whose collectives are those of `SharedGroup`. Below it lies a
process group over Unix sockets (`comm/peer_sockets`), which does the rendezvous and all that shared memory does not
offer: send and recv, logical reductions, sums of booleans and complex numbers. If the workers of a host cannot share
memory, torch gets that group itself. If they are on several hosts, it gets gloo, or, in a run of Paceline, sockets that
admit no stranger. A warning reports the reason. In such a run the groups note their calls in the flight recorder.

All workers of a group must choose the same of the two. So the choice depends on types and operations alone, never on
strides: a tensor that is not contiguous is copied. Collectives run in the order of the calls
(`comm/op_queue.py`).
"""

from __future__ import annotations

import functools
import json
import socket
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.elastic.generation_group import GenerationGroup
from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.op_queue import OpQueue, QueuedWork
from paceline.comm.own_backends import add_backend
from paceline.comm.peer_sockets.meeting import file_namespace
from paceline.comm.peer_sockets.process_group import PeerProcessGroup, create_peer_group, listening_address
from paceline.comm.recorded_calls import record_calls
from paceline.comm.shared_memory.collectives import (
    COPY_BYTES,
    Reduction,
    fill_pieces,
    flat,
    gather_pieces,
    reduce_pieces,
    scatter_pieces,
)
from paceline.comm.shared_memory.setup import with_shared_memory
from paceline.comm.shared_memory.shared_group import SharedGroup
from paceline.comm.shared_memory.summation import (
    AVERAGED,
    GATHERED_TO_ONE,
    MAXIMUM,
    MINIMUM,
    PRODUCT,
    REDUCED_TO_ONE,
    SCATTERED_FROM_ONE,
    SUMMED,
    ordered_sum,
)
from paceline.errors import SyncError

__all__ = ["NAME", "SharedMemoryProcessGroup", "record_groups", "register_backend"]

NAME = "paceline"
CPU = torch.device("cpu")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # identifies a host

TorchGroup: Any = dist.ProcessGroup  # torch passes arguments by position; its stubs use other argument names
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
OTHERS: Sequence[tuple[Any, Reduction, int]] = (  # reductions that each worker computes for itself
    (dist.ReduceOp.MIN, lambda parts: functools.reduce(torch.minimum, parts), MINIMUM),
    (dist.ReduceOp.MAX, lambda parts: functools.reduce(torch.maximum, parts), MAXIMUM),
    (dist.ReduceOp.PRODUCT, lambda parts: functools.reduce(torch.mul, parts), PRODUCT),
)


def register_backend(name: str = NAME) -> None:
    """Make `name` a back end of torch.distributed for CPU tensors, in the memory that a host's workers share.

    Programs without Paceline (DDP, `fully_shard`, DTensor under torchrun) then reduce, gather and scatter through that
    memory. Groups whose workers are on several hosts use gloo, with a warning. Repeated calls have no effect. The call
    itself raises nothing; failed collectives raise `torch.distributed.DistBackendError`.

    Example::

        import torch.distributed as dist

        paceline.register_backend()
        assert "paceline" in dist.Backend.backend_list  # so now: dist.init_process_group("paceline")
    """
    add_backend(name, functools.partial(_create_for_torch, name))


_recorder: list[FlightRecorder] = []  # of the run whose worker this process is: none or one


def record_groups(recorder: FlightRecorder | None) -> None:
    """Have groups that torch makes from now on note their calls; None: no more."""
    _recorder[:] = [] if recorder is None else [recorder]


def _create_for_torch(name: str, wanted: Any, _: Any) -> Any:
    group = _create_process_group(name, wanted)
    for recorder in _recorder:
        ranks = list(wanted.global_ranks_in_group) or range(wanted.group_size)
        record_calls(group, recorder, name=f"torch group {wanted.group_id}", ranks=ranks)
    return group


def _create_process_group(name: str, wanted: Any) -> Any:
    """Return the process group for torch: a SharedMemoryProcessGroup, or another if the workers share no memory."""
    index, size, store = wanted.group_rank, wanted.group_size, wanted.store
    limit_s = wanted.timeout.total_seconds()
    store.set(
        f"host_{index}", json.dumps([BOOT.read_text() if BOOT.exists() else "", socket.gethostname(), file_namespace()])
    )
    hosts = [json.loads(store.get(f"host_{member}")) for member in range(size)]
    transport: Any
    reason: str | None
    if listening_address() is not None and len({(boot, files) for boot, _, files in hosts}) > 1:
        return create_peer_group(
            store, index=index, size=size, address=listening_address(), timeout_s=limit_s, check=_nothing
        )
    if len({boot for boot, _, _ in hosts}) > 1:
        reason = f"its workers are on several hosts ({', '.join(sorted({host for _, host, _ in hosts}))})"
        transport, way = dist.ProcessGroupGloo(store, index, size, wanted.timeout), "gloo"
    elif len({files for _, _, files in hosts}) > 1:
        reason = "its workers are in containers that do not see each other's files"
        transport, way = dist.ProcessGroupGloo(store, index, size, wanted.timeout), "gloo"
    else:
        transport, way = _over_sockets(store, index, size, limit_s), "sockets"
        if size == 1:
            return transport
        straight = GenerationGroup(transport, device=CPU, check=_nothing, timeout_s=limit_s)
        neighbours = dist.get_world_size() if dist.is_initialized() else size
        ranks = wanted.global_ranks_in_group or range(size)
        group, reason = with_shared_memory(straight, timeout_s=limit_s, num_local_workers=neighbours, ranks=ranks)
        if isinstance(group, SharedGroup):
            return SharedMemoryProcessGroup(transport, group, name=name)
    if index == 0:
        warnings.warn(f"back end {name!r}: a group of {size} workers goes over {way}: {reason}", stacklevel=2)
    return transport


def _over_sockets(store: Any, index: int, size: int, limit_s: float) -> PeerProcessGroup:
    return create_peer_group(store, index=index, size=size, address=None, timeout_s=limit_s, check=_nothing)


class SharedMemoryProcessGroup(TorchGroup):
    """A process group of one host's workers in shared memory. Methods have torch's names, arguments and effects."""

    _device_types = (CPU,)  # torch's own is of back ends that a group of its own kind has

    def __init__(self, sockets: PeerProcessGroup, memory: SharedGroup, *, name: str) -> None:
        super().__init__(memory.index, memory.size)
        self._name, self._sockets, self._memory = name, sockets, memory
        self._queue = OpQueue(name=f"{name}-collectives")
        weakref.finalize(self, self._queue.close).atexit = False  # pyrefly: ignore[missing-attribute]
        # What memory does not offer.
        self.send, self.recv, self.recv_anysource = sockets.send, sockets.recv, sockets.recv_anysource
        self.setGroupName, self.getGroupName = sockets.setGroupName, sockets.getGroupName
        self.setGroupDesc, self.getGroupDesc = sockets.setGroupDesc, sockets.getGroupDesc

    def _get_backend(self, device: torch.device) -> Any:
        return self  # what torch's own groups keep for a device

    def getBackendName(self) -> str:
        return self._name

    def shutdown(self) -> None:
        """Leave the group; members that wait for this worker get an error."""
        self._queue.close()
        self._memory.close()
        self._sockets.shutdown()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        other = _non_sum_op(opts)
        if not _is_supported(opts, tensors[0], other):
            return self._over_sockets(lambda: self._sockets.allreduce(tensors, opts), tensors, opts)

        def do() -> None:
            if other is not None:
                reduction, kind = other
                with fill_pieces(tensors) as rows:
                    for row in rows:
                        pieces = reduce_pieces(row, row, reduction=reduction, most=_max_piece_numel(row))
                        self._memory.run_pieces(pieces, row.dtype, "all_reduce", kind=kind)
                return
            is_mean = opts.reduceOp == AVG
            at_once = [is_mean and tensor.dtype in AVERAGED for tensor in tensors]
            for flight in [
                self._memory.all_reduce(tensor, what="all_reduce", mean=mean)
                for tensor, mean in zip(tensors, at_once, strict=True)
            ]:
                flight.wait()
            self._divide([tensor for tensor, is_done in zip(tensors, at_once, strict=True) if not is_done], opts)

        return self._begin(do, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        plain = dist.AllreduceOptions()
        if opts is not None:
            plain.reduceOp, plain.asyncOp = opts.reduceOp, opts.asyncOp
        return self.allreduce(tensors, plain)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        if _non_sum_op(opts) is not None or not _is_supported(opts, tensors[0], None):
            return self._over_sockets(lambda: self._sockets.reduce(tensors, opts), tensors, opts)

        def do() -> None:
            own = tensors if opts.rootRank == self._memory.index else []
            with fill_pieces(own) as targets:
                row = flat(tensors[0])
                pieces = reduce_pieces(
                    row, targets[0] if targets else None, reduction=ordered_sum, most=_max_piece_numel(row)
                )
                self._memory.run_pieces(pieces, row.dtype, "reduce", kind=REDUCED_TO_ONE)
            self._divide(own, opts)

        return self._begin(do, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        def do() -> None:
            self._memory.broadcast(tensors[0], source=opts.rootRank)

        return self._begin(do, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        _require_alike(inputs[0], outputs[0], "all_gather")
        return self._begin(lambda: self._gather(inputs[0], outputs[0]), outputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def do() -> None:
            for place, one in enumerate(inputs):
                self._gather(one, [row[place] for row in outputs])

        return self._begin(do, outputs, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, one in zip(outputs, inputs, strict=True):
            _require_even(output, one, self._memory.size, "all_gather_single")

        def do() -> None:
            with fill_pieces(outputs) as rows:
                for row, one in zip(rows, inputs, strict=True):
                    self._gather(one, row.chunk(self._memory.size))

        return self._begin(do, outputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        own = outputs[0] if opts.rootRank == self._memory.index else []
        if own:
            _require_alike(inputs[0], own, "gather")

        def do() -> None:
            with fill_pieces(own) as targets:
                row = flat(inputs[0])
                pieces = gather_pieces(row, targets, most=_max_piece_numel(row))
                self._memory.run_pieces(pieces, row.dtype, "gather", kind=GATHERED_TO_ONE)

        return self._begin(do, outputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        index, size = self._memory.index, self._memory.size
        own = inputs[0] if opts.rootRank == index else []
        if own:
            _require_alike(outputs[0], own, "scatter")

        def do() -> None:
            with fill_pieces(outputs) as (target,):
                pieces = scatter_pieces(
                    list(map(flat, own)),
                    target,
                    source=opts.rootRank,
                    index=index,
                    size=size,
                    most=_max_piece_numel(target),
                )
                self._memory.run_pieces(pieces, target.dtype, "scatter", kind=SCATTERED_FROM_ONE)

        return self._begin(do, outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        if _non_sum_op(opts) is not None or not _is_supported(opts, outputs[0], None):
            return self._over_sockets(lambda: self._sockets.reduce_scatter(outputs, inputs, opts), outputs, opts)
        _require_alike(outputs[0], inputs[0], "reduce_scatter")
        return self._begin(lambda: self._scatter(inputs[0], outputs[0], opts), outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts, size = opts or dist.ReduceScatterOptions(), self._memory.size
        pairs = list(zip(outputs, inputs, strict=True))
        for output, one in pairs:
            _require_even(one, output, size, "reduce_scatter_single")
        over_sockets = _non_sum_op(opts) is not None or not _is_supported(opts, outputs[0], None)

        def do() -> None:
            for output, one in pairs:
                if over_sockets:
                    self._sockets.reduce_scatter_tensor_coalesced([output], [one], opts).wait()
                else:
                    self._scatter(flat(one).chunk(size), output, opts)

        return self._begin(do, outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._begin(lambda: self._exchange(inputs, outputs), outputs, opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_lengths: list[int], input_lengths: list[int], opts: Any = None
    ) -> dist.Work:
        size = self._memory.size
        for tensor, lengths in ((output, output_lengths), (input, input_lengths)):
            if not lengths and len(tensor) % size:
                raise ValueError(f"all_to_all_single: {len(tensor)} rows do not divide among {size} workers")

        def do() -> None:
            with fill_pieces([output]) as (target,):
                parts = [_cut(flat(input), input, input_lengths, size), _cut(target, output, output_lengths, size)]
                if output_lengths or input_lengths:
                    self._exchange(*parts)
                elif target.numel():
                    rows, targets = flat(input).view(size, -1), target.view(size, -1)
                    self._memory.begin_all_to_all(rows, targets, what="all_to_all").wait()

        return self._begin(do, [output], opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._begin(self._memory.barrier, [], opts)

    # torch 2.13's names of some, which 2.11 does not have
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _begin(self, do: Callable[[], None], result: Any, opts: Any) -> dist.Work:
        def run() -> None:
            try:
                do()
            except SyncError as error:
                raise dist.DistBackendError(str(error)) from error  # the type that users of torch.distributed catch

        is_awaited = opts is not None and not opts.asyncOp
        return QueuedWork(self._queue.begin(run, result=result, is_awaited=is_awaited))

    def _over_sockets(self, begin: Callable[[], dist.Work], result: Any, opts: Any) -> dist.Work:
        """Queue an operation over sockets: all workers must begin these in the same order."""

        def do() -> None:
            begin().wait()

        return self._begin(do, result, opts)

    def _gather(self, tensor: Tensor, out: Sequence[Tensor]) -> None:
        with fill_pieces(out) as targets:
            self._memory.all_gather(flat(tensor), targets, what="all_gather")

    def _scatter(self, parts: Sequence[Tensor], out: Tensor, opts: Any) -> None:
        with fill_pieces([out]) as (target,):
            self._memory.reduce_scatter(list(map(flat, parts)), target, what="reduce_scatter")
        self._divide([out], opts)

    def _exchange(self, parts: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        with fill_pieces(out) as targets:
            self._memory.all_to_all(list(map(flat, parts)), targets, what="all_to_all")

    @torch.inference_mode()  # only in this mode can tensors be written to that were made in it
    def _divide(self, tensors: Sequence[Tensor], opts: Any) -> None:
        if opts.reduceOp == AVG:
            for tensor in tensors:
                tensor.detach().div_(self._memory.size)


def _non_sum_op(opts: Any) -> tuple[Reduction, int] | None:
    """Return the reduction and kind of an operation that is not a sum; None for sums and unsupported operations."""
    return next(((reduction, kind) for op, reduction, kind in OTHERS if opts.reduceOp == op), None)


def _is_supported(opts: Any, tensor: Tensor, other: tuple[Reduction, int] | None) -> bool:
    """Whether shared memory supports the operation for this type."""
    if tensor.dtype not in SUMMED:
        return False
    is_mean = opts.reduceOp == AVG and tensor.is_floating_point()
    return other is not None or opts.reduceOp == SUM or is_mean


def _max_piece_numel(row: Tensor) -> int:
    return COPY_BYTES // row.itemsize


def _cut(row: Tensor, tensor: Tensor, lengths: Sequence[int], size: int) -> list[Tensor]:
    """Split a flat tensor into one part per worker, by rows of the original tensor."""
    each = row.numel() // max(1, len(tensor))
    return list(row.split([each * length for length in lengths or [len(tensor) // size] * size]))


def _require_alike(one: Tensor, others: Sequence[Tensor], what: str) -> None:
    for other in others:
        if other.dtype != one.dtype or other.numel() != one.numel():
            raise ValueError(
                f"{what}: a tensor of {other.numel():,} numbers of {other.dtype} stands beside one of {one.numel():,} "
                f"of {one.dtype}; all must have the same length and type"
            )


def _require_even(whole: Tensor, part: Tensor, size: int, what: str) -> None:
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise ValueError(
            f"{what}: {whole.numel():,} numbers of {whole.dtype} are not {size} times {part.numel():,} of {part.dtype}"
        )


def _nothing() -> None:
    """The default check: only the transfer itself ends a wait."""
