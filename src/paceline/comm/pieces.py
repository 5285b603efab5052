"""Sums and moves in shared memory that are under way, and the places there for tensors that lie elsewhere.

Such a tensor is copied into one of a few buffers, as long as it is small, or in pieces through several of them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.arena import Arena
from paceline.comm.sums import write

__all__ = [
    "MOVED_BYTES",
    "NUM_MOVED",
    "NUM_PIECES",
    "NUM_SMALL",
    "PIECE_BYTES",
    "SMALL_BYTES",
    "Buffers",
    "Pieces",
    "Sum",
]

SMALL_BYTES = 16 * 1024  # up to here, everyone sums for itself
NUM_SMALL = 8  # that are under way
PIECE_BYTES, NUM_PIECES = 4 * 1024 * 1024, 4  # of tensors that lie elsewhere; for each all cores have to take turns
MOVED_BYTES, NUM_MOVED = 512 * 1024, 4  # of what is read and not summed: it counts as each reader's memory, too


class Sum:
    """A sum, or a move, that this member has announced; `wait` returns when its tensor holds the result."""

    def __init__(
        self,
        finish: Callable[[Sum], None],
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


class Pieces:
    """The sums of a tensor's pieces, under way."""

    def __init__(self, sums: Sequence[Sum], flat: Tensor, tensor: Tensor) -> None:
        self._sums, self._flat, self._tensor = sums, flat, tensor

    def wait(self) -> None:
        for sum_ in self._sums:
            sum_.wait()
        if self._flat.data_ptr() != self._tensor.data_ptr():  # the tensor has holes, and was copied to be flat
            write(self._tensor, self._flat.view(self._tensor.size()))


class Buffers:
    """Places in every member's slot for tensors that lie elsewhere; each is used by one sum at a time, in turn."""

    def __init__(self, num_bytes: int, *, num_places: int) -> None:
        self.num_bytes, self._num_places = num_bytes, num_places  # of each place, and of them
        self._own: Tensor | None = None
        self._users: list[Sum | None] = [None] * num_places
        self._next = 0
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}  # per place and member

    def next_user(self) -> Sum | None:
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

    def use(self, sum_: Sum) -> Sum:
        self._users[self._next] = sum_
        self._next = (self._next + 1) % self._num_places
        return sum_
