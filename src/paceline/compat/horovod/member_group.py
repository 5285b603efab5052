"""The collectives of one process set, on CPU tensors: what the verdicts are carried out with.

Members on one host move tensors in shared memory, others over sockets that admit no stranger. All members make the same
calls in the same order; one thread makes them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.elastic.generation_group import GenerationGroup
from paceline.comm.group import Disrupted
from paceline.comm.peer_sockets.process_group import PeerProcessGroup, create_peer_group, listening_address
from paceline.comm.shared_memory.setup import with_shared_memory
from paceline.comm.shared_memory.shared_group import SharedGroup
from paceline.comm.shared_memory.summation import AVERAGED, ordered_sum
from paceline.comm.torch_backend.process_group import SharedMemoryProcessGroup
from paceline.compat.horovod.requests import Reduction
from paceline.errors import SyncError
from paceline.sync.allreduce.adasum import coefficients

__all__ = ["MemberGroup"]

NAME = "paceline-horovod"
CPU = torch.device("cpu")
FUSED_BYTES = 1 << 20  # tensors up to here are copied into one buffer; larger ones are reduced where they are
REDUCTIONS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.AVERAGE: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}
WIDER = {torch.int16: torch.int32}  # for the time of a reduction


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """What these groups read of torch's options, by torch's names. The caller waits at once, so the operation runs in
    its thread."""

    rootRank: int = 0
    reduceOp: Any = dist.ReduceOp.SUM
    asyncOp: bool = False


class MemberGroup:
    """The group of these ranks, of which this worker is one."""

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, *, peers: PeerProcessGroup | None = None) -> None:
        """`group`: what moves tensors, None for one rank. `peers`: the sockets below it."""
        self.ranks, self.size, self.index = tuple(ranks), len(ranks), tuple(ranks).index(rank)
        self._group, self._peers, self._is_closed = group, peers, False

    @classmethod
    def meet(
        cls,
        store: dist.Store,
        ranks: Sequence[int],
        rank: int,
        *,
        num_local_workers: int,
        is_one_host: bool,
        timeout_s: float,
        why_ended: Callable[[], str | None],
    ) -> MemberGroup:
        """Find the other members through the store, whose keys no other group uses; blocks until all are there.

        `why_ended()` is called in waits: a text says that they are to end. Raises Disrupted where a member is lost.
        """
        if len(ranks) == 1:
            return cls(None, ranks, rank)
        index = tuple(ranks).index(rank)

        def check() -> None:
            if (reason := why_ended()) is not None:
                raise Disrupted(reason)

        peers = create_peer_group(
            store,
            index=index,
            size=len(ranks),
            address=listening_address(),
            timeout_s=timeout_s,
            check=check,
        )
        if not is_one_host:
            return cls(peers, ranks, rank, peers=peers)
        straight = GenerationGroup(peers, device=CPU, check=check, timeout_s=timeout_s)
        try:
            group, reason = with_shared_memory(
                straight, timeout_s=timeout_s, check_peers=why_ended, num_local_workers=num_local_workers, ranks=ranks
            )
        except SyncError:
            peers.shutdown()
            raise
        if isinstance(group, SharedGroup):
            return cls(SharedMemoryProcessGroup(peers, group, name=NAME), ranks, rank, peers=peers)
        if index == 0:
            warnings.warn(f"Horovod's operations go over sockets, which is slower: {reason}", stacklevel=2)
        return cls(peers, ranks, rank, peers=peers)

    def abort(self) -> None:
        """End what waits for other members, from any thread; `why_ended` gives the reason. The group must be closed."""
        if self._peers is not None:
            self._peers.shutdown()

    def close(self) -> None:
        """Leave the group; members that wait for this one get an error."""
        if self._group is not None and not self._is_closed:
            self._is_closed = True
            self._group.shutdown()

    def barrier(self) -> None:
        if self._group is not None:
            self._group.barrier(_Options()).wait()

    def all_reduce(self, tensors: Sequence[Tensor], *, reduction: int, prescale: float, postscale: float) -> None:
        """Reduce flat tensors over all members, in place. Small ones travel in one buffer."""
        for buffer, parts in _buffers(tensors):
            row = _scaled(buffer, prescale)
            is_mean, is_divided = reduction == Reduction.AVERAGE, False
            if reduction == Reduction.ADASUM:
                self._adasum(row, [part.numel() for part in parts])
            elif self._group is not None:
                wide = WIDER.get(row.dtype)
                moved = row if wide is None else row.to(wide)
                is_divided = is_mean and postscale == 1.0 and row.dtype in AVERAGED  # another pass over all numbers
                self._group.allreduce(
                    [moved], _Options(reduceOp=dist.ReduceOp.AVG if is_divided else REDUCTIONS[reduction])
                ).wait()
                row = moved if wide is None else row.copy_(moved)
            if not is_divided:
                row = _averaged(row, self.size, postscale) if is_mean else _scaled(row, postscale)
            if len(parts) > 1 or row is not parts[0]:
                _copy_all(parts, row.split([part.numel() for part in parts]))

    def reduce_scatter(self, tensor: Tensor, *, reduction: int, prescale: float, postscale: float) -> Tensor:
        """Return the rows of the reduction that belong to this member; the first members have one more where they do
        not divide."""
        lengths = _even_lengths(len(tensor), self.size)
        parts = list(_scaled(tensor.clone() if prescale != 1.0 else tensor, prescale).split(lengths))
        own = [torch.empty_like(parts[self.index]) for _ in self.ranks]
        self._exchange(parts, own)
        wide = [one.to(WIDER.get(one.dtype, one.dtype)) for one in own]
        result = _reduced(wide, reduction).to(tensor.dtype)
        return _averaged(result, self.size, postscale) if reduction == Reduction.AVERAGE else _scaled(result, postscale)

    def all_gather(self, tensor: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return all members' rows; `lengths` says how many each one has."""
        whole = tensor.new_empty((sum(lengths), *tensor.shape[1:]))
        parts = [_bytes(part) for part in whole.split(list(lengths))]
        own = _bytes(tensor)
        if self._group is None or not whole.numel():
            whole.copy_(tensor)
        elif len(set(lengths)) == 1:
            self._group.allgather([parts], [own], _Options()).wait()
        else:
            parts[self.index].copy_(own)
            for index, part in enumerate(parts):
                self._broadcast(part, index)
        return whole

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite a flat tensor with that of the member of rank `root`."""
        if self._group is not None:
            self._broadcast(_bytes(tensor), self.ranks.index(root))

    def all_to_all(self, tensor: Tensor, splits: Sequence[Sequence[int]]) -> Tensor:
        """Return the rows that all members send to this one; `splits[k]` says how many member k sends to each."""
        received = [row[self.index] for row in splits]
        whole = tensor.new_empty((sum(received), *tensor.shape[1:]))
        own = list(splits[self.index])
        self._exchange(tensor[: sum(own)].split(own), whole.split(received))
        return whole

    def _broadcast(self, row: Tensor, index: int) -> None:
        if row.numel():
            self._group.broadcast([row], _Options(rootRank=index)).wait()

    def _exchange(self, parts: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        if self._group is None:
            out[0].copy_(parts[0])
        else:
            self._group.alltoall([_bytes(one) for one in out], [_bytes(part) for part in parts], _Options()).wait()

    def _adasum(self, row: Tensor, lengths: Sequence[int]) -> None:
        """Combine by Adasum, each tensor by itself: a weighted sum of all members' tensors, whose weights follow from
        their inner products (`sync/allreduce/adasum.py`)."""
        if self._group is None:
            return
        rows = [torch.empty_like(row) for _ in self.ranks]
        self._group.allgather([rows], [row], _Options()).wait()
        start = 0
        for length in lengths:
            part = torch.stack([one[start : start + length] for one in rows]).double()
            weights = coefficients((part @ part.T)[None])[0]
            row[start : start + length].copy_(weights @ part)
            start += length


def _buffers(tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Return what is reduced, each with the flat tensors that it consists of: large ones alone, small ones of a type
    in one new buffer."""
    small: dict[torch.dtype, list[Tensor]] = {}
    buffers: list[tuple[Tensor, list[Tensor]]] = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.nbytes > FUSED_BYTES:
            buffers.append((tensor, [tensor]))
        else:
            small.setdefault(tensor.dtype, []).append(tensor)
    for parts in small.values():
        buffers.append((torch.cat(parts) if len(parts) > 1 else parts[0], parts))
    return buffers


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _scaled(row: Tensor, factor: float) -> Tensor:
    """Multiply in place; whole numbers in float64, without what is behind the point."""
    if factor == 1.0:
        return row
    if row.is_floating_point():
        return row.mul_(factor)
    return row.copy_(row.double() * factor)


def _averaged(row: Tensor, size: int, postscale: float) -> Tensor:
    if postscale != 1.0:
        return _scaled(row, postscale / size)
    return row.div_(size) if row.is_floating_point() else row.div_(size, rounding_mode="trunc")


def _reduced(rows: Sequence[Tensor], reduction: int) -> Tensor:
    if reduction in (Reduction.SUM, Reduction.AVERAGE):
        return ordered_sum(rows)
    stacked = torch.stack(list(rows))
    if reduction == Reduction.PRODUCT:
        return stacked.prod(0)
    return stacked.amin(0) if reduction == Reduction.MIN else stacked.amax(0)


def _even_lengths(rows: int, size: int) -> list[int]:
    each, more = divmod(rows, size)
    return [each + (index < more) for index in range(size)]


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, 1-D: any type travels like this."""
    flat = tensor.view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
