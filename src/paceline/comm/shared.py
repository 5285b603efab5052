"""A group of workers of one host that sum tensors in memory which they share; everything else goes over torch's group.

A sum takes two announcements. Each member puts its numbers into its own slot and says that it has *arrived*; member i
then sums the i-th part of all slots, always in the order of the members, so that all get the same bits, writes the sum
into every slot, and says that it is *done*. When all are done, each finds the whole sum in its own slot, and nobody
else touches that slot until its owner arrives again: there are no locks, and a slot can be used again at once. Where
tensors are so small that a second round costs more than it saves, everyone sums all of them for itself.

Tensors from `allocate` lie in their slots already; others are copied in and out, in pieces.

There is no thread behind this. A sum moves on when a worker calls in: `all_reduce` does what has become possible and
returns; `wait` stays until the sum is there, first looking for some microseconds, then asleep in the kernel. Whoever
waits looks fifty times a second whether the others are alive.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.comm import arena as memory
from paceline.comm.arena import ARRIVED, DONE, MARKS, Arena
from paceline.comm.group import Disrupted, Landed, Transfer, WorkerGroup
from paceline.comm.pieces import PIECE_BYTES, SMALL_BYTES, Buffers, Pieces, Sum
from paceline.comm.sums import BARRIER, SUMMED, is_barrier, mark_of, share_of, sum_in_place, told, total, write
from paceline.errors import SyncError

__all__ = ["SharedGroup", "share"]

NUM_LOOKS = 700  # before going to sleep: some 50 us
NUM_YIELDS = 20  # instead, where there are more workers than cores: the one that is awaited may need this very core
SLICE_S = 0.02  # asleep at a time


def share(
    group: WorkerGroup, *, timeout_s: float, is_lost: Callable[[], str | None] | None = None
) -> tuple[WorkerGroup, str | None]:
    """Return a group that sums in shared memory; or `group` itself, with the reason, where one of its workers cannot.

    All workers of the group must call; blocks. `is_lost`, asked while waiting, may say who is dead,
    or raise what ends the wait.
    """
    arena, reason = None, memory.refusal()
    offer = torch.zeros(3, dtype=torch.int64)
    if group.index == 0 and reason is None:
        arena, reason = _tried(lambda: Arena.create(size=group.size))
        if arena is not None:
            offer = torch.tensor(arena.address, dtype=torch.int64)
    group.broadcast(offer, what="the place of shared memory")
    pid, number, nonce = offer.tolist()
    if group.index != 0 and reason is None and nonce:
        arena, reason = _tried(lambda: Arena.open((pid, number, nonce), index=group.index, size=group.size))
    without = torch.tensor([arena is None], dtype=torch.int64)
    group.all_reduce(without, what="who shares memory").wait()
    if arena is not None and not int(without):
        arena.meet()
        return SharedGroup(group, arena, timeout_s=timeout_s, is_lost=is_lost), None
    if arena is not None:
        arena.close()
    reasons = [f"worker {index}: {text}" for index, text in enumerate(group.gather_objects(reason)) if text is not None]
    return group, "; ".join(reasons)


class SharedGroup:
    """Two or more workers of one host. One thread at a time may use it.

    After a SyncError it is of no more use: close it, and make another one of those who are left.
    """

    def __init__(
        self, group: WorkerGroup, arena: Arena, *, timeout_s: float, is_lost: Callable[[], str | None] | None = None
    ) -> None:
        self.index, self.size = group.index, group.size
        self.over, self._arena, self._control = group, arena, arena.control
        self._timeout_s, self._is_lost = timeout_s, is_lost
        self._pending: deque[Sum] = deque()  # announced, and not summed here yet
        self._sequence = 0  # of the last one that was announced
        self._settled = 0  # up to here all members are done
        self._broken: str | None = None
        self._is_crowded = group.size > len(os.sched_getaffinity(0))
        self._small, self._large = Buffers(SMALL_BYTES), Buffers(PIECE_BYTES)

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
            last = self._announce(Sum(self._finish, what, parts, tensor), place=segment.place)
        elif tensor.numel():
            last = self._send_pieces(tensor, what)
        else:
            return Landed()
        self.progress()
        return last

    def progress(self) -> None:
        """Do what has become possible of the sums under way; never blocks."""
        while self._pending and self._have_all(ARRIVED, self._pending[0].sequence):
            self._sum_next()

    def arrivals(self) -> tuple[int, ...]:
        """Return how many sums each member has joined since the beginning, by index: who lags is awaited."""
        return tuple(self._control[self._arena.word(index, ARRIVED)] for index in range(self.size))

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        self._sum_through(self._sequence)
        self.over.broadcast(tensor, source=source, what=what)

    def gather_objects(self, value: Any) -> list[Any]:
        self._sum_through(self._sequence)
        return self.over.gather_objects(value)

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        self._sum_through(self._sequence)
        return self.over.broadcast_object(value, source=source)

    def barrier(self) -> None:
        if self._broken is not None:
            raise SyncError(self._broken)
        self._send_piece(torch.zeros(1), self._small, "barrier", place=BARRIER).wait()

    def close(self) -> None:
        self._broken = self._broken or "this group of workers was closed: nothing can be sent any more"
        self._pending.clear()
        self._arena.close()
        self.over.close()
        self._small, self._large = Buffers(SMALL_BYTES), Buffers(PIECE_BYTES)  # they refer to sums, and those to this

    def _send_pieces(self, tensor: Tensor, what: str) -> Transfer:
        """Join with a tensor that lies elsewhere, in as many sums as it takes."""
        flat = tensor.reshape(-1)
        buffers = self._small if flat.nbytes <= SMALL_BYTES else self._large
        sums = []
        for piece in flat.split(buffers.num_bytes // flat.itemsize):
            sums.append(self._send_piece(piece, buffers, what))
            self.progress()
        if len(sums) == 1 and tensor.is_contiguous():
            return sums[0]
        return Pieces(sums, flat, tensor)

    @torch.inference_mode()
    def _send_piece(self, piece: Tensor, buffers: Buffers, what: str, *, place: int = 0) -> Sum:
        if (before := buffers.next_user()) is not None:
            self._finish(before)
            self._settle(before.sequence, before.what)
        parts = buffers.parts(self._arena, piece.numel(), piece.dtype)
        parts[self.index].copy_(piece)
        sum_ = Sum(self._finish, what, parts, piece, is_copied=True, is_small=buffers is self._small)
        return buffers.use(self._announce(sum_, place=place))

    def _announce(self, sum_: Sum, *, place: int) -> Sum:
        """Say that this member has arrived; `place`: the segment that its numbers lie in, 0 where they were copied."""
        self._sequence = sum_.sequence = self._sequence + 1
        if (overwritten := self._sequence - MARKS // 2) > 0 and overwritten % (MARKS // 4) == 0:
            self._settle(overwritten, sum_.what)  # by then all have read what the next marks overwrite
        part = sum_.parts[self.index]
        self._control[self._arena.mark(self.index, self._sequence)] = mark_of(part, place=place)
        self._pending.append(sum_)
        self._arena.announce(ARRIVED, self._sequence)
        return sum_

    def _finish(self, sum_: Sum) -> None:
        """Return when the tensor of `sum_` holds the result."""
        if sum_.is_finished:
            return
        if self._broken is not None:
            raise SyncError(self._broken)
        self._sum_through(sum_.sequence)
        if not sum_.is_small:
            self._settle(sum_.sequence, sum_.what)
            if sum_.is_copied:
                write(sum_.tensor, sum_.parts[self.index])
        sum_.is_finished = True

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
        if sum_.is_small:
            write(sum_.tensor, total(sum_.parts))
        else:
            sum_in_place(sum_.parts, *share_of(sum_.parts[0].numel(), self.index, self.size))
        self._pending.popleft()
        self._arena.announce(DONE, sum_.sequence)

    def _compare_marks(self, sum_: Sum) -> None:
        marks = [self._control[self._arena.mark(index, sum_.sequence)] for index in range(self.size)]
        own = marks[self.index]
        for index, mark in enumerate(marks):
            if mark == own:
                continue
            if is_barrier(own):  # the errors of those who sum say more: this one is their echo
                self._fail(f"lost contact with a peer during barrier: worker {index} {told(mark)}")
            else:
                self._fail(
                    f"workers are in different calls: in {sum_.what} worker {self.index} {told(own)}, while "
                    f"worker {index} {told(mark)}. All workers must make the same calls in the same order: look "
                    "for a branch that only some take"
                )

    def _have_all(self, name: int, sequence: int) -> bool:
        return all(self._control[self._arena.word(index, name)] >= sequence for index in range(self.size))

    def _await(self, name: int, sequence: int, what: str) -> None:
        """Return when a number in the lines of all members has come to `sequence`."""
        for index in range(self.size):
            word = self._arena.word(index, name)
            if self._control[word] < sequence and not self._look(word, sequence):
                self._sleep(index, word, sequence, what)

    def _look(self, word: int, sequence: int) -> bool:
        control = self._control
        if not self._is_crowded:
            return any(control[word] >= sequence for _ in range(NUM_LOOKS))
        for _ in range(NUM_YIELDS):
            os.sched_yield()
            if control[word] >= sequence:
                return True
        return False

    def _sleep(self, awaited: int, word: int, sequence: int, what: str) -> None:
        began = time.monotonic()
        while (seen := self._control[word]) < sequence:
            self._arena.sleep(word, seen, SLICE_S)
            if self._control[word] >= sequence:
                return
            gone = dict(self._arena.gone())
            if awaited in gone and self._control[word] < sequence:  # it may have said so last of all
                self._fail(f"lost contact with a peer during {what}: worker {awaited} {gone[awaited]}", Disrupted)
            if self._is_lost is not None and (lost := self._is_lost()) is not None:
                self._fail(f"lost contact with a peer during {what}: {lost}", Disrupted)
            if (waited_s := time.monotonic() - began) > self._timeout_s:
                self._fail(self._overdue(word - self._arena.word(awaited, 0), sequence, what, waited_s))

    def _overdue(self, name: int, sequence: int, what: str, waited_s: float) -> str:
        numbers = {index: self._control[self._arena.word(index, name)] for index in range(self.size)}
        missing = {index: number for index, number in numbers.items() if number < sequence}
        verb = "joined" if name == ARRIVED else "finished"
        told = ", ".join(f"worker {index} ({verb} {number})" for index, number in missing.items())
        return (
            f"worker {self.index} waited {waited_s:.1f} s in {what}, sum number {sequence} of this group, for {told}: "
            "stopped, stuck, or taking other steps than the rest. A longer timeout_s waits longer"
        )

    def _fail(self, message: str, kind: type[SyncError] = SyncError) -> NoReturn:
        self._broken = message
        raise kind(message)


def _tried(make: Callable[[], Arena]) -> tuple[Arena | None, str | None]:
    try:
        return make(), None
    except OSError as error:
        return None, f"no memory to share: {error.strerror}" + (f" ({error.filename})" if error.filename else "")
