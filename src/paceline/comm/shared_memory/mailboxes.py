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
    """A tensor under way; `number` counts the transfers in the same direction."""

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
    """One member's end. One thread at a time may use it; after a SyncError it is unusable.

    Tensors reach a neighbor in the order of the calls. They must be contiguous and on the CPU.
    """

    def __init__(self, arena: Arena, waiting: FutexWaiter) -> None:
        self._arena, self._waiting = arena, waiting
        self._num_bytes = 0  # that a place has
        self._num_places = 0
        self._slots: Sequence[Tensor] = ()
        self._own = torch.empty(0)
        self._out: dict[int, _Direction] = {}  # by the neighbour's index
        self._in: dict[int, _Direction] = {}

    def takes(self, tensor: Tensor, *, source: int, target: int) -> bool:
        """Whether there is a place for such a tensor, and a mailbox between these two; all members say the same."""
        return tensor.nbytes <= self._num_bytes and _side(source, target, self._arena.size) is not None

    def make_room(self, num_bytes: int) -> None:
        """Let tensors have so many bytes from now on; all members call it alike. Raises MemoryError.

        Blocks until the neighbours have taken what was sent before.
        """
        if num_bytes <= self._num_bytes:
            return
        for way in self._out.values():
            while way.queue:
                self._finish_sending(way, way.queue[-1])
            self._await(way, TAKEN, way.count, "what was sent before", awaited=way.target)
        self._num_bytes = -(-num_bytes // ALIGNED) * ALIGNED
        self._num_places = max(MIN_PLACES, min(MAX_PLACES, MAILBOX_BYTES // self._num_bytes))
        for way in [*self._out.values(), *self._in.values()]:
            way.places.clear()
        self._own = self._arena.reserve(2 * self._num_places * self._num_bytes, torch.uint8)
        segment = self._arena.segment(self._own)
        self._slots = segment.slots if segment is not None else ()

    def send(self, tensor: Tensor, *, to: int, what: str, way: str) -> MailboxTransfer:
        """Begin to send a tensor that it `takes`, which may not change before the end."""
        out = self._way(self._out, self._arena.index, to)
        out.count += 1
        passage = MailboxTransfer(
            tensor, out.count, f"{way}: sending {what}", lambda one: self._finish_sending(out, one)
        )
        out.queue.append(passage)
        self._send_more(out)
        return passage

    def receive(self, tensor: Tensor, *, source: int, what: str, way: str) -> MailboxTransfer:
        """Begin to receive into `tensor`, in place."""
        into = self._way(self._in, source, self._arena.index)
        into.count += 1
        passage = MailboxTransfer(
            tensor, into.count, f"{way}: waiting for {what}", lambda one: self._finish_taking(into, one)
        )
        into.queue.append(passage)
        return passage

    def _progress(self) -> None:
        """Put what waits in the queues into places that have become free; never blocks."""
        for way in self._out.values():
            self._send_more(way)

    def _send_more(self, way: _Direction) -> None:
        taken = self._arena.control[self._arena.word(way.target, TAKEN + way.side)]
        while way.queue and way.queue[0].number - taken <= self._num_places:
            passage = way.queue.popleft()
            self._place(way, passage).copy_(passage.tensor.detach())
            self._arena.control[self._note(way, passage)] = passage.tensor.nbytes
            self._arena.announce(SENT + way.side, passage.number)
            passage.is_done = True

    def _finish_sending(self, way: _Direction, passage: MailboxTransfer) -> None:
        while not passage.is_done:
            self._await(way, TAKEN, way.queue[0].number - self._num_places, passage.what, awaited=way.target)
            self._progress()

    def _finish_taking(self, way: _Direction, passage: MailboxTransfer) -> None:
        """Receive everything that comes in one direction, up to `passage`."""
        while not passage.is_done:
            first = way.queue[0]
            self._await(way, SENT, first.number, first.what, awaited=way.source)
            sent_bytes, tensor = self._arena.control[self._note(way, first)], first.tensor
            if sent_bytes != tensor.nbytes:
                raise SyncError(
                    f"{first.what}: {sent_bytes:,} bytes came, and {tensor.nbytes:,} were expected. The workers are at "
                    "different micro-batches: look for a branch that only some take"
                )
            with torch.no_grad():
                tensor.copy_(self._place(way, first))
            self._arena.announce(TAKEN + way.side, first.number)
            first.is_done = True
            way.queue.popleft()

    def _await(self, way: _Direction, name: int, number: int, what: str, *, awaited: int) -> None:
        who = f"worker {self._waiting.ranks[awaited]}"
        self._waiting.until(
            self._arena.word(awaited, name + way.side),
            number,
            awaited=awaited,
            what=what,
            overdue=lambda waited_s: (
                f"{what} failed: {who} has not come to it in {waited_s:.1f} s. It is stopped, stuck, or elsewhere; a "
                "longer timeout_s waits longer"
            ),
            asleep=self._progress,
        )

    def _way(self, ways: dict[int, _Direction], source: int, target: int) -> _Direction:
        peer = target if source == self._arena.index else source
        if peer not in ways:
            side = _side(source, target, self._arena.size)
            if side is None:
                raise ValueError(f"member {source} has no mailbox for member {target} of {self._arena.size}")
            ways[peer] = _Direction(source, target, side)
        return ways[peer]

    def _place(self, way: _Direction, passage: MailboxTransfer) -> Tensor:
        """Return the memory of a transfer, as a tensor of its type."""
        tensor, number = passage.tensor, passage.number % self._num_places
        place = way.places.get(number)
        if place is None or place.dtype != tensor.dtype or place.shape != tensor.shape:
            start = (way.side * self._num_places + number) * self._num_bytes
            place = self._slots[way.source][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            way.places[number] = place
        return place

    def _note(self, way: _Direction, passage: MailboxTransfer) -> int:
        return self._arena.note(way.source, way.side * MAX_PLACES + passage.number % self._num_places)


@dataclasses.dataclass(slots=True, eq=False)
class _Direction:
    """Transfers from one member to a neighbor. `count`: how many were begun."""

    source: int
    target: int
    side: int
    count: int = 0
    queue: deque[MailboxTransfer] = dataclasses.field(default_factory=deque)  # not done yet
    places: dict[int, Tensor] = dataclasses.field(default_factory=dict[int, Tensor])  # as the newest tensors there


def _side(source: int, target: int, size: int) -> int | None:
    """Which of the source's mailboxes is the target's: 0 for the next one, 1 for the one before, None for others."""
    return 0 if (source + 1) % size == target else 1 if (target + 1) % size == source else None
