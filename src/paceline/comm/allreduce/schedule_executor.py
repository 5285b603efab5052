"""Walks an all-reduce schedule over point-to-point transfers, chunk by chunk, on any back end of torch.distributed.

What is received lies aside until its turn has come, and receives are posted far ahead: a sender of gloo waits for the
receiver's word, and on a slow link that word takes as long as the data. A chunk is added up in the order of the
schedule, so all members have the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import PeerTensor
from paceline.schedule.allreduce.rounds import bounds
from paceline.schedule.allreduce.worker_program import Program, ReceiveStep

__all__ = ["PointToPoint", "ReceiveBuffers", "ScheduleExecution"]

PREPOSTED_BYTES = 4 * 1024 * 1024  # received before its turn
MIN_PREPOSTED = 4  # receives that are posted, however large they are
ALIGNED_BYTES = 64


class PointToPoint(Protocol):
    """What moves single tensors; see `Group.post`."""

    def post(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], *, tag: int) -> Sequence[dist.Work]: ...


class ReceiveBuffers:
    """Memory for what has come before its turn: so many places of one size, used in turn; kept from walk to walk."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def places(self, size: int, like: Tensor, *, most: int) -> list[Tensor]:
        """Return at most `most` places of `size` numbers."""
        each = -(-size * like.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
        number = min(most, max(MIN_PREPOSTED, PREPOSTED_BYTES // max(each, 1)))
        if self._memory.numel() < number * each or self._memory.device != like.device:
            self._memory = torch.empty(number * each, dtype=torch.uint8, device=like.device)
        starts = range(0, number * each, max(each, 1))
        return [self._memory[start : start + size * like.itemsize].view(like.dtype) for start in starts]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleExecution:
    """A flat tensor, and the program by which `peers` sum it up: the members of the group whom the program calls 0, 1
    and so on. `notes(peer, round)` is told whom this worker waits for."""

    program: Program
    flat: Tensor
    peers: Sequence[int]
    notes: Callable[[int, int], None]

    @torch.inference_mode()  # the only mode in which tensors that were made in it, as in evaluation, can be written to
    def run(self, port: PointToPoint, aside: ReceiveBuffers, *, tag: int) -> None:
        """Do it; blocks until all of this worker's part is done."""
        receives = [receipt for receipt in self.program.receives if self._size(receipt.first, receipt.stop)]
        places = aside.places(self._largest(), self.flat, most=len(receives))
        sending = _PendingSends(self, port, tag)
        coming: list[tuple[dist.Work, Tensor]] = []
        done = 0
        for number, receipt in enumerate(self.program.receives):
            sending.begin(num_received=number)
            if not self._size(receipt.first, receipt.stop):
                continue
            for ahead in receives[len(coming) : done + len(places)]:
                place = places[len(coming) % len(places)][: self._size(ahead.first, ahead.stop)]
                coming.append((port.post((), [(self.peers[ahead.source], place)], tag=tag)[0], place))
            work, came = coming[done]
            self.notes(self.peers[receipt.source], receipt.round)
            work.wait()
            sending.settle(receipt.num_sent)
            self._write(receipt, came)
            done += 1
        sending.begin(num_received=len(self.program.receives))
        sending.settle(len(self.program.sends))

    @torch.inference_mode()
    def enqueue(self, port: PointToPoint, *, tag: int) -> None:
        """Put it into the current stream of a GPU, round by round; a wait there is the stream's."""
        for out, into in self.program.rounds:
            sends = [(self.peers[send.target], part) for send in out if len(part := self.part(send.first, send.stop))]
            taken = [send for send in into if self._size(send.first, send.stop)]
            places = [torch.empty_like(self.part(send.first, send.stop)) for send in taken]
            received = [(self.peers[send.source], place) for send, place in zip(taken, places, strict=True)]
            for work in port.post(sends, received, tag=tag) if sends or received else ():
                work.wait()
            for send, place in zip(taken, places, strict=True):
                part = self.part(send.first, send.stop)
                part.add_(place) if send.adds else part.copy_(place)

    def part(self, first: int, stop: int) -> Tensor:
        """Return some chunks; where there are fewer numbers than chunks, there may be nothing in them."""
        begin, end = self._bounds(first, stop)
        return self.flat[begin:end]

    def _write(self, receipt: ReceiveStep, came: Tensor) -> None:
        part = self.part(receipt.first, receipt.stop)
        if receipt.adds:
            part.add_(came)
        else:
            part.copy_(came)

    def _bounds(self, first: int, stop: int) -> tuple[int, int]:
        total, chunks = self.flat.numel(), self.program.num_chunks
        return bounds(total, chunks, first)[0], bounds(total, chunks, stop - 1)[1]

    def _size(self, first: int, stop: int) -> int:
        begin, end = self._bounds(first, stop)
        return end - begin

    def _largest(self) -> int:
        return max((self._size(one.first, one.stop) for one in self.program.receives), default=0)


class _PendingSends:
    """The sends of a walk: begun in their order, each as soon as all has come that it carries."""

    def __init__(self, walk: ScheduleExecution, port: PointToPoint, tag: int) -> None:
        self._walk, self._port, self._tag = walk, port, tag
        self._begun: list[dist.Work | None] = []
        self._num_settled = 0

    def begin(self, *, num_received: int) -> None:
        """Begin what is possible after so many receives."""
        sends = self._walk.program.sends
        while len(self._begun) < len(sends) and sends[len(self._begun)].num_received <= num_received:
            shipment = sends[len(self._begun)]
            part = self._walk.part(shipment.first, shipment.stop)
            parcel = (self._walk.peers[shipment.to], part)
            self._begun.append(self._port.post([parcel], (), tag=self._tag)[0] if len(part) else None)

    def settle(self, count: int) -> None:
        """Return when the first `count` sends are over, and their places may be written to."""
        for number in range(self._num_settled, count):
            if (work := self._begun[number]) is not None:
                self._walk.notes(self._walk.peers[self._walk.program.sends[number].to], -1)
                work.wait()
                self._begun[number] = None
        self._num_settled = max(self._num_settled, count)
