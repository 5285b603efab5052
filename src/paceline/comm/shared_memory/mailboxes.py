"""Sends tensors between neighboring workers of one host through shared memory.

The members form a circle. Each has a mailbox for the next member and one for the previous: a few *places* in its own
slot, used in turn. Sending copies a tensor into the next place and announces how many were sent. The neighbor copies it
out and announces how many it took, which frees places again. A tensor that finds no free place waits in its sender's
queue and goes when the sender calls in again. Sending never waits, so two workers that send to each other cannot
deadlock.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.shared_memory.arena import MAILBOX_COUNTERS, SENT, TAKEN, Arena
from paceline.comm.shared_memory.futex_wait import FutexWaiter
from paceline.errors import SyncError

__all__ = ["MailboxTransfer", "Mailboxes"]

MAILBOX_BYTES = 8 * 2**20  # bytes of a mailbox, if so many places are of use
MIN_PLACES, MAX_PLACES = 2, MAILBOX_COUNTERS // 2
ALIGNED = 64  # bytes


@dataclasses.dataclass(slots=True, eq=False)
class MailboxTransfer:
    """A tensor under direction; `number` counts the transfers in the same direction."""

    tensor: Tensor
    number: int
    what: str
    finish: Callable[[MailboxTransfer], None]
    is_done: bool = False

    def wait(self) -> None:
        """Return when the tensor may be used; raise SyncError on failure."""
        if not self.is_done:
            self.finish(self)


class Mailboxes:
    """One member's end of the mailboxes. One thread at a time may use it; after a SyncError it is unusable.

    Tensors reach a neighbor in the order of the calls. They must be contiguous and on the CPU.
    """

    def __init__(self, arena: Arena, waiting: FutexWaiter) -> None:
        self._arena, self._waiter = arena, waiting
        self._num_bytes = 0  # of a place
        self._num_places = 0
        self._slots: Sequence[Tensor] = ()
        self._own = torch.empty(0)
        self._out: dict[int, _Direction] = {}  # by the neighbor's index
        self._in: dict[int, _Direction] = {}

    def takes(self, tensor: Tensor, *, source: int, target: int) -> bool:
        """Whether the tensor fits a place, and there is a mailbox between these two; the same on all members."""
        return tensor.nbytes <= self._num_bytes and _side(source, target, self._arena.size) is not None

    def make_room(self, num_bytes: int) -> None:
        """Enlarge the places for tensors of `num_bytes`; all members must make the same call. Raises MemoryError.

        Blocks until the neighbors have taken all earlier tensors.
        """
        if num_bytes <= self._num_bytes:
            return
        for direction in self._out.values():
            while direction.queue:
                self._finish_sending(direction, direction.queue[-1])
            self._wait_for(direction, TAKEN, direction.count, "what was sent before", awaited=direction.target)
        self._num_bytes = -(-num_bytes // ALIGNED) * ALIGNED
        self._num_places = max(MIN_PLACES, min(MAX_PLACES, MAILBOX_BYTES // self._num_bytes))
        for direction in [*self._out.values(), *self._in.values()]:
            direction.places.clear()
        self._own = self._arena.reserve(2 * self._num_places * self._num_bytes, torch.uint8)
        segment = self._arena.segment(self._own)
        self._slots = segment.slots if segment is not None else ()

    def send(self, tensor: Tensor, *, to: int, what: str, way: str) -> MailboxTransfer:
        """Begin to send a tensor for which `takes` is true, and which may not change before the transfer ends."""
        out = self._direction(self._out, self._arena.index, to)
        out.count += 1
        transfer = MailboxTransfer(
            tensor, out.count, f"{way}: sending {what}", lambda one: self._finish_sending(out, one)
        )
        out.queue.append(transfer)
        self._send_more(out)
        return transfer

    def receive(self, tensor: Tensor, *, source: int, what: str, way: str) -> MailboxTransfer:
        """Begin to receive into `tensor`, in place."""
        into = self._direction(self._in, source, self._arena.index)
        into.count += 1
        transfer = MailboxTransfer(
            tensor, into.count, f"{way}: waiting for {what}", lambda one: self._finish_taking(into, one)
        )
        into.queue.append(transfer)
        return transfer

    def _progress(self) -> None:
        """Copy queued tensors into places that have become free; never blocks."""
        for direction in self._out.values():
            self._send_more(direction)

    def _send_more(self, direction: _Direction) -> None:
        taken = self._arena.control[self._arena.counter(direction.target, TAKEN + direction.side)]
        while direction.queue and direction.queue[0].number - taken <= self._num_places:
            transfer = direction.queue.popleft()
            self._place(direction, transfer).copy_(transfer.tensor.detach())
            self._arena.control[self._length_counter(direction, transfer)] = transfer.tensor.nbytes
            self._arena.announce(SENT + direction.side, transfer.number)
            transfer.is_done = True

    def _finish_sending(self, direction: _Direction, transfer: MailboxTransfer) -> None:
        while not transfer.is_done:
            self._wait_for(
                direction, TAKEN, direction.queue[0].number - self._num_places, transfer.what, awaited=direction.target
            )
            self._progress()

    def _finish_taking(self, direction: _Direction, transfer: MailboxTransfer) -> None:
        """Receive all tensors of one direction, up to `transfer`."""
        while not transfer.is_done:
            first = direction.queue[0]
            self._wait_for(direction, SENT, first.number, first.what, awaited=direction.source)
            sent_bytes, tensor = self._arena.control[self._length_counter(direction, first)], first.tensor
            if sent_bytes != tensor.nbytes:
                raise SyncError(
                    f"{first.what}: {sent_bytes:,} bytes came, and {tensor.nbytes:,} were expected. The workers are at "
                    "different micro-batches: look for a branch that only some take"
                )
            with torch.no_grad():
                tensor.copy_(self._place(direction, first))
            self._arena.announce(TAKEN + direction.side, first.number)
            first.is_done = True
            direction.queue.popleft()

    def _wait_for(self, direction: _Direction, name: int, number: int, what: str, *, awaited: int) -> None:
        worker = f"worker {self._waiter.ranks[awaited]}"
        self._waiter.until(
            self._arena.counter(awaited, name + direction.side),
            number,
            awaited=awaited,
            what=what,
            overdue=lambda waited_s: (
                f"{what} failed: {worker} has not come to it in {waited_s:.1f} s. It is stopped, stuck, or in another "
                "call. If it is only slow, set a longer timeout_s"
            ),
            asleep=self._progress,
        )

    def _direction(self, known: dict[int, _Direction], source: int, target: int) -> _Direction:
        peer = target if source == self._arena.index else source
        if peer not in known:
            side = _side(source, target, self._arena.size)
            if side is None:
                raise ValueError(f"member {source} has no mailbox for member {target} of {self._arena.size}")
            known[peer] = _Direction(source, target, side)
        return known[peer]

    def _place(self, direction: _Direction, transfer: MailboxTransfer) -> Tensor:
        """Return the memory of a transfer, as a tensor of its type."""
        tensor, number = transfer.tensor, transfer.number % self._num_places
        place = direction.places.get(number)
        if place is None or place.dtype != tensor.dtype or place.shape != tensor.shape:
            start = (direction.side * self._num_places + number) * self._num_bytes
            place = self._slots[direction.source][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            direction.places[number] = place
        return place

    def _length_counter(self, direction: _Direction, transfer: MailboxTransfer) -> int:
        return self._arena.mailbox_counter(
            direction.source, direction.side * MAX_PLACES + transfer.number % self._num_places
        )


@dataclasses.dataclass(slots=True, eq=False)
class _Direction:
    """The transfers from one member to a neighbor. `count`: how many were begun."""

    source: int
    target: int
    side: int
    count: int = 0
    queue: deque[MailboxTransfer] = dataclasses.field(default_factory=deque)  # not done yet
    places: dict[int, Tensor] = dataclasses.field(default_factory=dict[int, Tensor])  # viewed as the newest tensors


def _side(source: int, target: int, size: int) -> int | None:
    """Return which of the source's mailboxes belongs to the target: 0 for the next member, 1 for the previous one,
    None for others."""
    return 0 if (source + 1) % size == target else 1 if (target + 1) % size == source else None
