"""What members of one host read from each other's memory, piece by piece: gathers, sums of one's own part, exchanges,
broadcasts.

As in a small sum each member puts its numbers into its own slot and says that it has arrived; when all have, each reads
what it wants from all slots, and says that it is done. A tensor that is larger than a place there goes in pieces, cut
alike by all, so that a copy into one place runs beside the reading of another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.sums import SUMMED, total, write

__all__ = [
    "Combine",
    "Move",
    "combines",
    "exchanges",
    "fill",
    "filling",
    "flat",
    "gathers",
    "hands_out",
    "scatters",
    "spreads",
]

Combine = Callable[[Sequence[Tensor]], Tensor]  # what all members have at a place -> one tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A piece: what is put into the slot, one tensor behind the other, and how all slots are read."""

    sent: Sequence[Tensor]  # flat
    numel: int  # that a slot has of it: the same for all members
    read: Callable[[Sequence[Tensor]], None]


def gathers(tensor: Tensor, out: Sequence[Tensor], *, most: int) -> Iterator[Move]:
    """Fill `out[k]` with the tensor of member k; all are flat, of one length. `most` numbers are moved at a time.

    Who gets nothing has no `out`.
    """
    for start in range(0, tensor.numel(), most):
        length = min(most, tensor.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            for slot, one in zip(slots, out, strict=bool(out)):
                write(one[start : start + length], slot)

        yield Move(sent=[tensor[start : start + length]], numel=length, read=read)


def spreads(tensor: Tensor, *, source: int, index: int, most: int) -> Iterator[Move]:
    """Overwrite the tensor, flat, by that of member `source`."""
    for start in range(0, tensor.numel(), most):
        piece = tensor[start : start + most]

        def read(slots: Sequence[Tensor], piece: Tensor = piece) -> None:
            if index != source:
                write(piece, slots[source])

        yield Move(sent=[piece] if index == source else [], numel=piece.numel(), read=read)


def hands_out(parts: Sequence[Tensor], out: Tensor, *, source: int, index: int, size: int, most: int) -> Iterator[Move]:
    """Fill `out` with what member `source` has for this one; all are flat, of one length. Others have no `parts`."""
    each = max(1, most // size)
    for start in range(0, out.numel(), each):
        length = min(each, out.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            write(out[start : start + length], slots[source][index * length : (index + 1) * length])

        yield Move(sent=[part[start : start + length] for part in parts], numel=size * length, read=read)


def combines(tensor: Tensor, out: Tensor | None, *, combine: Combine, most: int) -> Iterator[Move]:
    """Fill `out` with what `combine` makes of everybody's tensor; all are flat, of one length. Who gets nothing has no
    `out`."""
    for start in range(0, tensor.numel(), most):
        length = min(most, tensor.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            if out is not None:
                write(out[start : start + length], combine(slots))

        yield Move(sent=[tensor[start : start + length]], numel=length, read=read)


def scatters(parts: Sequence[Tensor], out: Tensor, *, index: int, most: int) -> Iterator[Move]:
    """Fill `out` with the sum of everybody's `parts[index]`, in the order of the members; all are flat, of one
    length."""
    each = max(1, most // len(parts))
    for start in range(0, out.numel(), each):
        length = min(each, out.numel() - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            mine = [slot[index * length : (index + 1) * length] for slot in slots]
            write(out[start : start + length], total(mine))

        yield Move(sent=[part[start : start + length] for part in parts], numel=len(parts) * length, read=read)


def exchanges(
    parts: Sequence[Tensor], out: Sequence[Tensor], lengths: Sequence[Sequence[int]], *, index: int, most: int
) -> Iterator[Move]:
    """Fill `out[k]` with what member k has for this one; all are flat. `lengths[k][j]`: of what k has for j."""
    longest = max(map(sum, lengths))
    starts = [sum(row[:index]) for row in lengths]  # where each member's part for this one begins
    for start in range(0, longest, most):
        length = min(most, longest - start)

        def read(slots: Sequence[Tensor], start: int = start, length: int = length) -> None:
            for slot, one, begins in zip(slots, out, starts, strict=True):
                first, last = max(start, begins), min(start + length, begins + one.numel())
                if first < last:
                    write(one[first - begins : last - begins], slot[first - start : last - start])

        yield Move(sent=list(_within(parts, start, start + length)), numel=length, read=read)


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
def filling(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield rows (`flat`) to be filled; what is a copy goes back into its tensor."""
    rows = list(map(flat, tensors))
    yield rows
    for tensor, row in zip(tensors, rows, strict=True):
        if row.data_ptr() != tensor.data_ptr():
            write(tensor, row.view(tensor.dtype).view(tensor.shape))
