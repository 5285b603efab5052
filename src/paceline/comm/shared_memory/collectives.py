"""Building blocks of the collectives in shared memory: all-gather, reduce-scatter, all-to-all, broadcast, gather and
scatter as a sequence of pieces, and the staging buffers that the pieces go through.

Each member copies its numbers into its own slot and announces that it has arrived. When all have arrived, each member
reads what it needs from all slots, and announces that it is done. A tensor larger than a staging buffer goes in pieces.
All members split it alike, so copying one piece into a buffer overlaps with reading another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.group import copy_into
from paceline.comm.shared_memory.arena import Arena
from paceline.comm.shared_memory.summation import SUMMED, ordered_sum

__all__ = [
    "COPY_BYTES",
    "NUM_COPY",
    "NUM_PIECES",
    "NUM_SMALL",
    "PIECE_BYTES",
    "SMALL_BYTES",
    "CollectivePiece",
    "PendingPieces",
    "Reduction",
    "SharedMemoryOp",
    "StagingBuffers",
    "all_to_all_pieces",
    "broadcast_pieces",
    "fill",
    "fill_pieces",
    "flat",
    "gather_pieces",
    "reduce_pieces",
    "reduce_scatter_pieces",
    "scatter_pieces",
]

Reduction = Callable[[Sequence[Tensor]], Tensor]  # one tensor of each member -> their reduction


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePiece:
    """One piece of a collective: what this member writes into its slot, and how it reads all slots."""

    sent: Sequence[Tensor]  # flat; written one behind the other
    numel: int  # of the piece in a slot: the same for all members
    read: Callable[[Sequence[Tensor]], None]


def gather_pieces(tensor: Tensor, out: Sequence[Tensor], *, most: int) -> Iterator[CollectivePiece]:
    """Fill `out[k]` with the tensor of member k; all are flat and of equal length. Each piece has at most `most`
    numbers. Members that receive nothing pass an empty `out`.
    """
    for start in range(0, tensor.numel(), most):
        length = min(most, tensor.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            for slot, one in zip(slots, out, strict=bool(out)):
                copy_into(one[start : start + length], slot)

        yield CollectivePiece(sent=[tensor[start : start + length]], numel=length, read=read)


def broadcast_pieces(tensor: Tensor, *, source: int, index: int, most: int) -> Iterator[CollectivePiece]:
    """Overwrite the flat tensor with that of member `source`."""
    for start in range(0, tensor.numel(), most):
        piece = tensor[start : start + most]

        def read(slots: Sequence[Tensor], piece: Tensor = piece) -> None:
            if index != source:
                copy_into(piece, slots[source])

        yield CollectivePiece(sent=[piece] if index == source else [], numel=piece.numel(), read=read)


def scatter_pieces(
    parts: Sequence[Tensor], out: Tensor, *, source: int, index: int, size: int, most: int
) -> Iterator[CollectivePiece]:
    """Fill `out` with the part that member `source` sends to this one; all are flat and of equal length. Only the
    source has `parts`."""
    each = max(1, most // size)
    for start in range(0, out.numel(), each):
        length = min(each, out.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            copy_into(out[start : start + length], slots[source][index * length : (index + 1) * length])

        yield CollectivePiece(sent=[part[start : start + length] for part in parts], numel=size * length, read=read)


def reduce_pieces(tensor: Tensor, out: Tensor | None, *, reduction: Reduction, most: int) -> Iterator[CollectivePiece]:
    """Fill `out` with the `reduction` of all members' tensors; all are flat and of equal length. Members that receive
    nothing pass None."""
    for start in range(0, tensor.numel(), most):
        length = min(most, tensor.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            if out is not None:
                copy_into(out[start : start + length], reduction(slots))

        yield CollectivePiece(sent=[tensor[start : start + length]], numel=length, read=read)


def reduce_scatter_pieces(parts: Sequence[Tensor], out: Tensor, *, index: int, most: int) -> Iterator[CollectivePiece]:
    """Fill `out` with the sum of all members' `parts[index]`, in the order of the members; all are flat and of equal
    length."""
    each = max(1, most // len(parts))
    for start in range(0, out.numel(), each):
        length = min(each, out.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            mine = [slot[index * length : (index + 1) * length] for slot in slots]
            copy_into(out[start : start + length], ordered_sum(mine))

        yield CollectivePiece(
            sent=[part[start : start + length] for part in parts], numel=len(parts) * length, read=read
        )


def all_to_all_pieces(
    parts: Sequence[Tensor], out: Sequence[Tensor], lengths: Sequence[Sequence[int]], *, index: int, most: int
) -> Iterator[CollectivePiece]:
    """Fill `out[k]` with the part that member k sends to this one; all are flat. `lengths[k][j]`: numbers from k to
    j."""
    longest = max(map(sum, lengths))
    starts = [sum(row[:index]) for row in lengths]  # where each member's part for this one begins
    for start in range(0, longest, most):
        length = min(most, longest - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            for slot, one, begins in zip(slots, out, starts, strict=True):
                first, last = max(start, begins), min(start + length, begins + one.numel())
                if first < last:
                    copy_into(one[first - begins : last - begins], slot[first - start : last - start])

        yield CollectivePiece(sent=list(_within(parts, start, start + length)), numel=length, read=read)


def _within(parts: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Yield the numbers from `start` to `stop` of the concatenated parts."""
    ends = itertools.accumulate(part.numel() for part in parts)
    for part, end in zip(parts, ends, strict=True):
        begins = end - part.numel()
        first, last = max(start, begins), min(stop, end)
        if first < last:
            yield part[first - begins : last - begins]


@torch.inference_mode()
def fill(slot: Tensor, sent: Sequence[Tensor]) -> None:
    """Write tensors into a slot, one behind the other."""
    start = 0
    for one in sent:
        slot[start : start + one.numel()].copy_(one)
        start += one.numel()


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor in one dimension: a view, or a copy if it is not contiguous; bytes if fingerprints have no number
    for its type."""
    row = tensor.detach().contiguous().view(-1)
    return row if row.dtype in SUMMED else row.view(torch.uint8)


@contextlib.contextmanager
def fill_pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield flat tensors (`flat`) to be filled; at the end, copies are written back into their tensors."""
    rows = list(map(flat, tensors))
    yield rows
    for tensor, row in zip(tensors, rows, strict=True):
        if row.data_ptr() != tensor.data_ptr():
            copy_into(tensor, row.view(tensor.dtype).view(tensor.shape))


SMALL_BYTES = 16 * 1024  # up to this size, each member sums the whole tensor by itself
NUM_SMALL = 8  # small sums in flight
PIECE_BYTES, NUM_PIECES = 4 * 1024 * 1024, 4  # of sums; larger pieces mean fewer synchronizations of all cores
COPY_BYTES, NUM_COPY = 512 * 1024, 4  # of collectives without a sum: each reader's memory use includes these buffers


class SharedMemoryOp:
    """A collective in flight that this member has announced; `wait` returns when its tensor holds the result."""

    def __init__(
        self,
        finish: Callable[[SharedMemoryOp], None],
        what: str,
        parts: Sequence[Tensor],
        tensor: Tensor,
        *,
        is_copied: bool = False,
        divisor: int = 1,
        read: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        """`read` computes this member's result from all parts; None: each member sums its share for all members, and
        divides it by `divisor`."""
        self.what = what
        self.parts = parts  # flat, one of each member
        self.tensor = tensor  # keeps its slot alive
        self.is_copied, self.divisor, self.read = is_copied, divisor, read
        self.sequence = 0
        self.is_finished = False
        self._finish = finish

    def wait(self) -> None:
        self._finish(self)


class PendingPieces:
    """A sum in flight that goes in several pieces."""

    def __init__(self, sums: Sequence[SharedMemoryOp], flat: Tensor, tensor: Tensor) -> None:
        self._sums, self._flat, self._tensor = sums, flat, tensor

    def wait(self) -> None:
        for op in self._sums:
            op.wait()
        if self._flat.data_ptr() != self._tensor.data_ptr():  # the tensor is not contiguous, and was copied
            copy_into(self._tensor, self._flat.view(self._tensor.size()))


class StagingBuffers:
    """Buffers in every member's slot for tensors outside the arena, used by one op at a time, round robin."""

    def __init__(self, num_bytes: int, *, num_buffers: int) -> None:
        self.num_bytes, self._num_buffers = num_bytes, num_buffers  # bytes of each buffer; how many buffers
        self._own: Tensor | None = None
        self._users: list[SharedMemoryOp | None] = [None] * num_buffers
        self._next = 0
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}  # per buffer and member

    def next_user(self) -> SharedMemoryOp | None:
        """Return the op that used the next buffer last."""
        return self._users[self._next]

    def parts(self, arena: Arena, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return each member's first `numel` numbers of the next buffer."""
        if self._own is None:
            self._own = arena.reserve(self._num_buffers * self.num_bytes, torch.uint8, is_lasting=True)
        if dtype not in self._views:
            segment = arena.segment(self._own)
            if segment is None:
                raise RuntimeError("the shared memory of this group was closed")
            typed = [slot.view(dtype).split(self.num_bytes // dtype.itemsize) for slot in segment.slots]
            self._views[dtype] = [list(buffers) for buffers in zip(*typed, strict=True)]
        return [part[:numel] for part in self._views[dtype][self._next]]

    def use(self, op: SharedMemoryOp) -> SharedMemoryOp:
        """Give the next buffer to `op`, and go on to the one after it."""
        self._users[self._next] = op
        self._next = (self._next + 1) % self._num_buffers
        return op
