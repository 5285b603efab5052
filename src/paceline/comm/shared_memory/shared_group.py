"""A group of workers of one host that sum and exchange tensors in memory which they share; the rest is torch's.

A sum takes two announcements. Each member puts its numbers into its own slot and says that it has *arrived*; member i
then sums the i-th part of all slots, always in the order of the members, so that all get the same bits, writes the sum
into every slot, and says that it is *done*. When all are done, each finds the whole sum in its own slot, and nobody
else touches that slot until its owner arrives again: there are no locks, and a slot can be used again at once. Where
tensors are so small that a second round costs more than it saves, everyone sums all of them for itself; so it is, too,
where tensors are not summed, or each wants another part of the sum (`comm/shared_memory/collectives.py`), and where two
members sum what lies elsewhere: each adds the other one's numbers to its own.

Tensors from `allocate` lie in their slots already; others are copied in and out, in pieces.

There is no thread behind this. A sum moves on when a worker calls in: `all_reduce` does what has become possible and
returns; `wait` stays until the sum is there (`comm/shared_memory/futex_wait.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.comm.group import CompletedTransfer, Transfer, WorkerGroup, copy_into
from paceline.comm.shared_memory import arena as memory
from paceline.comm.shared_memory.arena import ARRIVED, DONE, MARKS, Arena
from paceline.comm.shared_memory.collectives import (
    MOVED_BYTES,
    NUM_MOVED,
    NUM_PIECES,
    NUM_SMALL,
    PIECE_BYTES,
    SMALL_BYTES,
    CollectivePiece,
    PendingPieces,
    SharedMemorySum,
    StagingBuffers,
    all_to_all_pieces,
    broadcast_pieces,
    fill,
    fill_pieces,
    flat,
    gather_pieces,
    reduce_scatter_pieces,
)
from paceline.comm.shared_memory.futex_wait import FutexWaiter
from paceline.comm.shared_memory.mailboxes import Mailboxes
from paceline.comm.shared_memory.summation import (
    BARRIER,
    BROADCAST,
    EXCHANGED,
    GATHERED,
    LAST_PLACE,
    REDUCE_SCATTERED,
    SUMMED,
    is_barrier,
    mark_of,
    mark_text,
    ordered_sum,
    part_bounds,
    sum_in_place,
)
from paceline.errors import SyncError
from paceline.events import Note

__all__ = ["SharedGroup", "shared_memory_unavailable", "with_shared_memory"]


def with_shared_memory(
    group: WorkerGroup,
    *,
    timeout_s: float,
    is_lost: Callable[[], str | None] | None = None,
    num_neighbours: int | None = None,
    ranks: Sequence[int] = (),
) -> tuple[WorkerGroup, str | None]:
    """Return a group that sums in shared memory; or `group` itself, with the reason, where one of its workers cannot.

    All workers of the group must call; blocks. `is_lost`, asked while waiting, may say who is dead,
    or raise what ends the wait. `num_neighbours`: how many workers this host has, where the group is not all of them;
    messages name its workers by `ranks` then. Where a member is lost meanwhile no memory is left open.
    """
    with contextlib.ExitStack() as unless_shared:
        arena, reason = None, memory.why_unsupported()
        offer = torch.zeros(3, dtype=torch.int64)
        if group.index == 0 and reason is None:
            arena, reason = _tried(lambda: Arena.create(size=group.size), unless_shared)
            if arena is not None:
                offer = torch.tensor(arena.address, dtype=torch.int64)
        group.broadcast(offer, what="the place of shared memory")
        pid, number, nonce = offer.tolist()
        if group.index != 0 and reason is None and nonce:
            address = pid, number, nonce
            arena, reason = _tried(lambda: Arena.open(address, index=group.index, size=group.size), unless_shared)
        without = torch.tensor([arena is None], dtype=torch.int64)
        group.all_reduce(without, what="who shares memory").wait()
        if arena is not None and not int(without):
            arena.meet()
            shared = SharedGroup(
                group, arena, timeout_s=timeout_s, is_lost=is_lost, num_neighbours=num_neighbours, ranks=ranks
            )
            unless_shared.pop_all()
            return shared, None
    reasons = group.gather_objects(reason)
    if reasons[0] is not None and all(text == reasons[0] for text in reasons):  # of the host, and of no single worker
        return group, reasons[0]
    names = ranks or range(group.size)
    named = [f"worker {names[index]}: {text}" for index, text in enumerate(reasons) if text is not None]
    return group, "; ".join(named)


def shared_memory_unavailable(what: str, reason: str) -> Note:
    """What is told where workers of one host cannot share its memory; what several of them say alike is shown once."""
    return Note(text=f"{what} over the loopback network, which is slower: {reason}")


class SharedGroup:
    """Two or more workers of one host. One thread at a time may use it.

    After a SyncError it is of no more use: close it, and make another one of those who are left.
    """

    shares_memory = True

    def __init__(
        self,
        group: WorkerGroup,
        arena: Arena,
        *,
        timeout_s: float,
        is_lost: Callable[[], str | None] | None = None,
        num_neighbours: int | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        self.index, self.size, self.hosts = group.index, group.size, (0,) * group.size
        self.over, self._arena, self._control = group, arena, arena.control
        self._waiting = FutexWaiter(
            arena,
            ranks=ranks or range(group.size),
            timeout_s=timeout_s,
            is_lost=is_lost,
            num_neighbours=num_neighbours or group.size,
        )
        self._pending: deque[SharedMemorySum] = deque()  # announced, and not summed here yet
        self._sequence = 0  # of the last one that was announced
        self._settled = 0  # up to here all members are done
        self._broken: str | None = None
        self._forget_buffers()

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu" or dtype not in SUMMED:
            return self.over.allocate(numel, dtype=dtype, device=device)
        return self._arena.reserve(numel, dtype)

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        if self._broken is not None:
            raise SyncError(self._broken)
        if tensor.device.type != "cpu" or tensor.dtype not in SUMMED:
            self._sum_through(self._sequence)
            return self.over.all_reduce(tensor, what=what)
        tensor = tensor.detach()
        segment = self._arena.segment(tensor)
        if segment is not None and segment.dtype == tensor.dtype and tensor.is_contiguous():
            start, stop = tensor.storage_offset(), tensor.storage_offset() + tensor.numel()
            parts = [slot[start:stop] for slot in segment.slots]
            last = self._announce(
                SharedMemorySum(self._finish, what, parts, tensor), place=min(segment.place, LAST_PLACE)
            )
        elif tensor.numel():
            last = self._send_pieces(tensor, what)
        else:
            return CompletedTransfer()
        self.progress()
        return last

    def progress(self) -> None:
        """Do what has become possible of the sums under way; never blocks."""
        while self._pending and self._have_all(ARRIVED, self._pending[0].sequence):
            self._sum_next()

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        if tensor.device.type != "cpu":
            self._sum_through(self._sequence)
            return self.over.begin_all_gather(tensor, out, what=what)
        row, targets = flat(tensor), list(map(flat, out))
        moves = gather_pieces(row, targets, most=MOVED_BYTES // row.itemsize)
        return self._begin_moves(moves, row.dtype, what, kind=GATHERED) or CompletedTransfer()

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        if rows.device.type != "cpu":
            self._sum_through(self._sequence)
            return self.over.begin_all_to_all(rows, out, what=what)
        sent, targets = list(map(flat, rows)), list(map(flat, out))
        each = [[sent[0].numel()] * self.size] * self.size
        moves = all_to_all_pieces(sent, targets, each, index=self.index, most=MOVED_BYTES // sent[0].itemsize)
        return self._begin_moves(moves, sent[0].dtype, what, kind=EXCHANGED) or CompletedTransfer()

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        if tensor.device.type != "cpu":
            self._sum_through(self._sequence)
            return self.over.all_gather(tensor, out, what=what)
        row, targets = flat(tensor), list(map(flat, out))
        moves = gather_pieces(row, targets, most=MOVED_BYTES // row.itemsize)
        return self.move(moves, row.dtype, what, kind=GATHERED)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        if out.device.type != "cpu" or out.dtype not in SUMMED:
            self._sum_through(self._sequence)
            return self.over.reduce_scatter(parts, out, what=what)
        moves = reduce_scatter_pieces(
            list(map(flat, parts)), flat(out), index=self.index, most=MOVED_BYTES // out.itemsize
        )
        return self.move(moves, out.dtype, what, kind=REDUCE_SCATTERED)

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        if parts[0].device.type != "cpu":
            self._sum_through(self._sequence)
            return self.over.all_to_all(parts, out, what=what)
        sent, targets = list(map(flat, parts)), list(map(flat, out))
        lengths = torch.empty(self.size, self.size, dtype=torch.int64)
        self.all_gather(torch.tensor([part.numel() for part in sent]), lengths.unbind(), what=what)
        each, dtype = lengths.tolist(), sent[0].dtype
        if (given := [row[self.index] for row in each]) != (wanted := [one.numel() for one in targets]):
            self._fail(
                f"workers do not agree in {what}: {self._who(self.index)} wants {wanted} numbers and gets {given}"
            )
        moves = all_to_all_pieces(sent, targets, each, index=self.index, most=MOVED_BYTES // dtype.itemsize)
        return self.move(moves, dtype, what, kind=EXCHANGED)

    def move(self, moves: Iterable[CollectivePiece], dtype: torch.dtype, what: str, *, kind: int) -> None:
        """Do moves to their end; all members do moves of this kind (`comm/shared_memory/summation.py`), type and
        lengths.
        """
        if (last := self._begin_moves(moves, dtype, what, kind=kind)) is not None:
            self._finish(last)

    def mailboxes(self) -> Mailboxes:
        """Return what passes single tensors between neighbours; all members must make it, and not beside another."""
        return Mailboxes(self._arena, self._waiting)

    def arrivals(self) -> tuple[int, ...]:
        """Return how many sums each member has joined since the beginning, by index: who lags is awaited."""
        return tuple(self._control[self._arena.word(index, ARRIVED)] for index in range(self.size))

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        if tensor.device.type != "cpu":
            self._sum_through(self._sequence)
            return self.over.broadcast(tensor, source=source, what=what)
        with fill_pieces([tensor]) as (row,):
            moves = broadcast_pieces(row, source=source, index=self.index, most=MOVED_BYTES // row.itemsize)
            self.move(moves, row.dtype, what, kind=BROADCAST)

    def gather_objects(self, value: Any) -> list[Any]:
        self._sum_through(self._sequence)
        return self.over.gather_objects(value)

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        self._sum_through(self._sequence)
        return self.over.broadcast_object(value, source=source)

    def barrier(self) -> None:
        if self._broken is not None:
            raise SyncError(self._broken)
        self._send_piece(torch.zeros(1, device="cpu"), self._small, "barrier", place=BARRIER).wait()

    def close(self) -> None:
        self._broken = self._broken or "this group of workers was closed: nothing can be sent any more"
        self._pending.clear()
        self._arena.close()
        self.over.close()
        self._forget_buffers()  # they refer to sums, and those to this

    def _forget_buffers(self) -> None:
        self._small = StagingBuffers(SMALL_BYTES, num_places=NUM_SMALL)
        self._large = StagingBuffers(PIECE_BYTES, num_places=NUM_PIECES)
        self._moved = StagingBuffers(MOVED_BYTES, num_places=NUM_MOVED)

    def _begin_moves(
        self, moves: Iterable[CollectivePiece], dtype: torch.dtype, what: str, *, kind: int
    ) -> SharedMemorySum | None:
        """Join with all pieces; the last one is over when all are."""
        if self._broken is not None:
            raise SyncError(self._broken)
        last: SharedMemorySum | None = None
        for move in moves:
            parts = self._next_place(self._moved, move.numel, dtype)
            fill(parts[self.index], move.sent)
            last = SharedMemorySum(self._finish, what, parts, parts[self.index], read=move.read)
            self._moved.use(self._announce(last, place=kind))
            self.progress()
        return last

    def _send_pieces(self, tensor: Tensor, what: str) -> Transfer:
        """Join with a tensor that lies elsewhere, in as many sums as it takes."""
        flat = tensor.reshape(-1)
        buffers = self._small if flat.nbytes <= SMALL_BYTES else self._large
        if flat.nbytes <= buffers.num_bytes and tensor.is_contiguous():
            only = self._send_piece(flat, buffers, what)
            self.progress()
            return only
        sums: list[SharedMemorySum] = []
        for piece in flat.split(buffers.num_bytes // flat.itemsize):
            sums.append(self._send_piece(piece, buffers, what))
            self.progress()
        return PendingPieces(sums, flat, tensor)

    @torch.inference_mode()
    def _send_piece(self, piece: Tensor, buffers: StagingBuffers, what: str, *, place: int = 0) -> SharedMemorySum:
        parts = self._next_place(buffers, piece.numel(), piece.dtype)
        parts[self.index].copy_(piece)
        read: Callable[[Sequence[Tensor]], None] | None = None
        if self.size == 2:
            read = functools.partial(_add_to, piece, 1 - self.index)
        elif buffers is self._small:
            read = functools.partial(_sum_into, piece)
        sum_ = SharedMemorySum(self._finish, what, parts, piece, is_copied=True, read=read)
        return buffers.use(self._announce(sum_, place=place))

    def _next_place(self, buffers: StagingBuffers, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return everybody's part of the next place, once nobody reads what was there before."""
        if (before := buffers.next_user()) is not None:
            self._finish(before)
            self._settle(before.sequence, before.what)
        return buffers.parts(self._arena, numel, dtype)

    def _announce(self, sum_: SharedMemorySum, *, place: int) -> SharedMemorySum:
        """Say that this member has arrived; `place`: the segment that its numbers lie in, 0 where they were copied."""
        self._sequence = sum_.sequence = self._sequence + 1
        if (overwritten := self._sequence - MARKS // 2) > 0 and overwritten % (MARKS // 4) == 0:
            self._settle(overwritten, sum_.what)  # by then all have read what the next marks overwrite
        part = sum_.parts[self.index]
        self._control[self._arena.mark(self.index, self._sequence)] = mark_of(part, place=place)
        self._pending.append(sum_)
        self._arena.announce(ARRIVED, self._sequence)
        return sum_

    def _finish(self, sum_: SharedMemorySum) -> None:
        """Return when the tensor of `sum_` holds the result."""
        if sum_.is_finished:
            return
        if self._broken is not None:
            raise SyncError(self._broken)
        self._sum_through(sum_.sequence)
        if sum_.read is None:
            self._settle(sum_.sequence, sum_.what)
            if sum_.is_copied:
                copy_into(sum_.tensor, sum_.parts[self.index])
        sum_.is_finished = True
        if sum_.is_copied:  # the place that was used remembers its last user, and what that was of may be large
            sum_.tensor = sum_.parts[self.index]

    def _settle(self, sequence: int, what: str) -> None:
        """Return when all members are done with all sums up to `sequence`."""
        if sequence <= self._settled:
            return
        self._sum_through(sequence)
        self._await(DONE, sequence, what)
        self._settled = sequence

    def _sum_through(self, sequence: int) -> None:
        """Do this member's part of all sums up to `sequence`."""
        while self._pending and self._pending[0].sequence <= sequence:
            self._await(ARRIVED, self._pending[0].sequence, self._pending[0].what)
            self._sum_next()

    @torch.inference_mode()  # the only mode in which tensors that were made in it, as in evaluation, can be written to
    def _sum_next(self) -> None:
        sum_ = self._pending[0]
        self._compare_marks(sum_)
        if sum_.read is not None:
            sum_.read(sum_.parts)
            sum_.read = (
                _is_read_by_all  # what it reads into may be large, and the place that was used remembers its last user
            )
        else:
            sum_in_place(sum_.parts, *part_bounds(sum_.parts[0].numel(), self.index, self.size))
        self._pending.popleft()
        self._arena.announce(DONE, sum_.sequence)

    def _compare_marks(self, sum_: SharedMemorySum) -> None:
        marks = [self._control[self._arena.mark(index, sum_.sequence)] for index in range(self.size)]
        own = marks[self.index]
        for index, mark in enumerate(marks):
            if mark == own:
                continue
            if is_barrier(own):  # the errors of those who sum say more: this one is their echo
                self._fail(f"lost contact with a peer during barrier: {self._who(index)} {mark_text(mark)}")
            else:
                self._fail(
                    f"workers are in different calls: in {sum_.what} {self._who(self.index)} {mark_text(own)}, while "
                    f"{self._who(index)} {mark_text(mark)}. All workers must make the same calls in the same order: "
                    "look for a branch that only some take"
                )

    def _have_all(self, name: int, sequence: int) -> bool:
        return all(self._control[self._arena.word(index, name)] >= sequence for index in range(self.size))

    def _await(self, name: int, sequence: int, what: str) -> None:
        """Return when a number in the lines of all members has come to `sequence`."""
        for index in range(self.size):
            word = self._arena.word(index, name)
            if self._control[word] >= sequence:
                continue
            try:
                self._waiting.until(
                    word,
                    sequence,
                    awaited=index,
                    what=what,
                    overdue=lambda waited_s: self._overdue(name, sequence, what, waited_s),
                )
            except SyncError as error:
                self._broken = str(error)
                raise

    def _overdue(self, name: int, sequence: int, what: str, waited_s: float) -> str:
        numbers = {index: self._control[self._arena.word(index, name)] for index in range(self.size)}
        missing = {index: number for index, number in numbers.items() if number < sequence}
        verb = "joined" if name == ARRIVED else "finished"
        told = ", ".join(f"{self._who(index)} ({verb} {number})" for index, number in missing.items())
        return (
            f"{self._who(self.index)} waited {waited_s:.1f} s in {what}, sum number {sequence} of this group, for "
            f"{told}: stopped, stuck, or taking other steps than the rest. A longer timeout_s waits longer"
        )

    def _who(self, index: int) -> str:
        return f"worker {self._waiting.ranks[index]}"

    def _fail(self, message: str) -> NoReturn:
        self._broken = message
        raise SyncError(message)


def _is_read_by_all(parts: Sequence[Tensor]) -> None:
    """Nothing is left to be read."""


def _sum_into(target: Tensor, parts: Sequence[Tensor]) -> None:
    target.copy_(ordered_sum(parts))


def _add_to(target: Tensor, other: int, parts: Sequence[Tensor]) -> None:
    """Add the other one's numbers to one's own, which lie there still: of two it is the same sum on both."""
    target.add_(parts[other])


def _tried(make: Callable[[], Arena], at_end: contextlib.ExitStack) -> tuple[Arena | None, str | None]:
    """Memory, which is let go of `at_end`; or why there is none."""
    try:
        arena = make()
        at_end.callback(arena.close)
        return arena, None
    except OSError as error:
        return None, f"no memory to share: {error.strerror}" + (f" ({error.filename})" if error.filename else "")
