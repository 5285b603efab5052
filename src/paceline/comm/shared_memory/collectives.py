"""What members of one host read from each other's memory, piece by piece: gathers, sums of one's own part, exchanges,
broadcasts.

As in a small sum each member puts its numbers into its own slot and says that it has arrived; when all have, each reads
what it wants from all slots, and says that it is done. A tensor that is larger than a place there goes in pieces, cut
alike by all, so that a copy into one place runs beside the reading of another.

Sums and moves in shared memory that are under way, and the places there for tensors that lie elsewhere.

Such a tensor is copied into one of a few buffers, as long as it is small, or in pieces through several of them in turn.
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
    "MOVED_BYTES",
    "NUM_MOVED",
    "NUM_PIECES",
    "NUM_SMALL",
    "PIECE_BYTES",
    "SMALL_BYTES",
    "CollectivePiece",
    "Combine",
    "PendingPieces",
    "SharedMemorySum",
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

Combine = Callable[[Sequence[Tensor]], Tensor]  # what all members have at a place -> one tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePiece:
    """A piece: what is put into the slot, one tensor behind the other, and how all slots are read."""

    sent: Sequence[Tensor]  # flat
    numel: int  # that a slot has of it: the same for all members
    read: Callable[[Sequence[Tensor]], None]


def gather_pieces(tensor: Tensor, out: Sequence[Tensor], *, most: int) -> Iterator[CollectivePiece]:
    """Fill `out[k]` with the tensor of member k; all are flat, of one length. `most` numbers are moved at a time.

    Who gets nothing has no `out`.
    """
    for start in range(0, tensor.numel(), most):
        length = min(most, tensor.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            for slot, one in zip(slots, out, strict=bool(out)):
                copy_into(one[start : start + length], slot)

        yield CollectivePiece(sent=[tensor[start : start + length]], numel=length, read=read)


def broadcast_pieces(tensor: Tensor, *, source: int, index: int, most: int) -> Iterator[CollectivePiece]:
    """Overwrite the tensor, flat, by that of member `source`."""
    for start in range(0, tensor.numel(), most):
        piece = tensor[start : start + most]

        def read(slots: Sequence[Tensor], piece: Tensor = piece) -> None:
            if index != source:
                copy_into(piece, slots[source])

        yield CollectivePiece(sent=[piece] if index == source else [], numel=piece.numel(), read=read)


def scatter_pieces(
    parts: Sequence[Tensor], out: Tensor, *, source: int, index: int, size: int, most: int
) -> Iterator[CollectivePiece]:
    """Fill `out` with what member `source` has for this one; all are flat, of one length. Others have no `parts`."""
    each = max(1, most // size)
    for start in range(0, out.numel(), each):
        length = min(each, out.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            copy_into(out[start : start + length], slots[source][index * length : (index + 1) * length])

        yield CollectivePiece(sent=[part[start : start + length] for part in parts], numel=size * length, read=read)


def reduce_pieces(tensor: Tensor, out: Tensor | None, *, combine: Combine, most: int) -> Iterator[CollectivePiece]:
    """Fill `out` with what `combine` makes of everybody's tensor; all are flat, of one length. Who gets nothing has no
    `out`."""
    for start in range(0, tensor.numel(), most):
        length = min(most, tensor.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            if out is not None:
                copy_into(out[start : start + length], combine(slots))

        yield CollectivePiece(sent=[tensor[start : start + length]], numel=length, read=read)


def reduce_scatter_pieces(parts: Sequence[Tensor], out: Tensor, *, index: int, most: int) -> Iterator[CollectivePiece]:
    """Fill `out` with the sum of everybody's `parts[index]`, in the order of the members; all are flat, of one
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
    """Fill `out[k]` with what member k has for this one; all are flat. `lengths[k][j]`: of what k has for j."""
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
    """Yield what lies between two places in the row of all parts."""
    ends = itertools.accumulate(part.numel() for part in parts)
    for part, end in zip(parts, ends, strict=True):
        begins = end - part.numel()
        first, last = max(start, begins), min(stop, end)
        if first < last:
            yield part[first - begins : last - begins]


@torch.inference_mode()
def fill(slot: Tensor, sent: Sequence[Tensor]) -> None:
    """Put tensors into a slot, one behind the other."""
    start = 0
    for one in sent:
        slot[start : start + one.numel()].copy_(one)
        start += one.numel()


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers in one row: a view, or a copy where it has holes; bytes, where marks do not know its
    type."""
    row = tensor.detach().contiguous().view(-1)
    return row if row.dtype in SUMMED else row.view(torch.uint8)


@contextlib.contextmanager
def fill_pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield rows (`flat`) to be filled; what is a copy goes back into its tensor."""
    rows = list(map(flat, tensors))
    yield rows
    for tensor, row in zip(tensors, rows, strict=True):
        if row.data_ptr() != tensor.data_ptr():
            copy_into(tensor, row.view(tensor.dtype).view(tensor.shape))


SMALL_BYTES = 16 * 1024  # up to here, everyone sums for itself
NUM_SMALL = 8  # that are under way
PIECE_BYTES, NUM_PIECES = 4 * 1024 * 1024, 4  # of tensors that lie elsewhere; for each all cores have to take turns
MOVED_BYTES, NUM_MOVED = 512 * 1024, 4  # of what is read and not summed: it counts as each reader's memory, too


class SharedMemorySum:
    """A sum, or a move, that this member has announced; `wait` returns when its tensor holds the result."""

    def __init__(
        self,
        finish: Callable[[SharedMemorySum], None],
        what: str,
        parts: Sequence[Tensor],
        tensor: Tensor,
        *,
        is_copied: bool = False,
        read: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        """`read`: makes this member's result of all parts by itself; None: each member sums its share for all."""
        self.what = what
        self.parts = parts  # flat, of each member
        self.tensor = tensor  # keeps its slot alive
        self.is_copied, self.read = is_copied, read
        self.sequence = 0
        self.is_finished = False
        self._finish = finish

    def wait(self) -> None:
        self._finish(self)


class PendingPieces:
    """The sums of a tensor's pieces, under way."""

    def __init__(self, sums: Sequence[SharedMemorySum], flat: Tensor, tensor: Tensor) -> None:
        self._sums, self._flat, self._tensor = sums, flat, tensor

    def wait(self) -> None:
        for sum_ in self._sums:
            sum_.wait()
        if self._flat.data_ptr() != self._tensor.data_ptr():  # the tensor has holes, and was copied to be flat
            copy_into(self._tensor, self._flat.view(self._tensor.size()))


class StagingBuffers:
    """Places in every member's slot for tensors that lie elsewhere; each is used by one sum at a time, in turn."""

    def __init__(self, num_bytes: int, *, num_places: int) -> None:
        self.num_bytes, self._num_places = num_bytes, num_places  # of each place, and of them
        self._own: Tensor | None = None
        self._users: list[SharedMemorySum | None] = [None] * num_places
        self._next = 0
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}  # per place and member

    def next_user(self) -> SharedMemorySum | None:
        """The sum that used the next place the last time."""
        return self._users[self._next]

    def parts(self, arena: Arena, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Each member's first `numel` numbers of the next place."""
        if self._own is None:
            self._own = arena.reserve(self._num_places * self.num_bytes, torch.uint8, is_lasting=True)
        if dtype not in self._views:
            segment = arena.segment(self._own)
            if segment is None:
                raise RuntimeError("the memory of this group has gone")
            typed = [slot.view(dtype).split(self.num_bytes // dtype.itemsize) for slot in segment.slots]
            self._views[dtype] = [list(places) for places in zip(*typed, strict=True)]
        return [part[:numel] for part in self._views[dtype][self._next]]

    def use(self, sum_: SharedMemorySum) -> SharedMemorySum:
        self._users[self._next] = sum_
        self._next = (self._next + 1) % self._num_places
        return sum_
