"""Executes an all-reduce schedule over point-to-point transfers, chunk by chunk, on any back end of torch.distributed.

Receives are posted long before their data is needed, and received chunks wait in buffers until their step. This is
because a gloo sender waits for the receiver's answer, which takes as long as the data on a slow link. Chunks are added
in the order of the schedule, so all members have the same bits.
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

PREPOSTED_BYTES = 4 * 1024 * 1024  # of receives posted ahead
MIN_PREPOSTED = 4  # receives posted ahead, however large they are
ALIGNED_BYTES = 64


class PointToPoint(Protocol):
    """A transport for single tensors; see `Group.post`."""

    def post(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], *, tag: int) -> Sequence[dist.Work]: ...


class ReceiveBuffers:
    """Memory for chunks received ahead: buffers of one size, used round robin, and kept between executions."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int, like: Tensor, *, most: int) -> list[Tensor]:
        """Return at most `most` buffers of `size` numbers."""
        each = -(-size * like.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
        number = min(most, max(MIN_PREPOSTED, PREPOSTED_BYTES // max(each, 1)))
        if self._memory.numel() < number * each or self._memory.device != like.device:
            self._memory = torch.empty(number * each, dtype=torch.uint8, device=like.device)
        starts = range(0, number * each, max(each, 1))
        return [self._memory[start : start + size * like.itemsize].view(like.dtype) for start in starts]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleExecution:
    """One all-reduce of a flat tensor: this worker's `program`, and `peers`, the members of the group that the program
    numbers 0, 1 and so on. `report_wait(peer, round)` is called with the peer that this worker waits for."""

    program: Program
    flat: Tensor
    peers: Sequence[int]
    report_wait: Callable[[int, int], None]

    @torch.inference_mode()  # only in this mode can tensors be written to that were made in it, as in evaluation
    def run(self, port: PointToPoint, buffers: ReceiveBuffers, *, tag: int) -> None:
        """Run the program; blocks until this worker's part is done."""
        receives = [step for step in self.program.receives if self._size(step.first, step.stop)]
        ahead = buffers.allocate(self._largest(), self.flat, most=len(receives))
        sending = _PendingSends(self, port, tag)
        posted: list[tuple[dist.Work, Tensor]] = []
        done = 0
        for number, step in enumerate(self.program.receives):
            sending.begin(num_received=number)
            if not self._size(step.first, step.stop):
                continue
            for later in receives[len(posted) : done + len(ahead)]:
                buffer = ahead[len(posted) % len(ahead)][: self._size(later.first, later.stop)]
                posted.append((port.post((), [(self.peers[later.source], buffer)], tag=tag)[0], buffer))
            work, received = posted[done]
            self.report_wait(self.peers[step.source], step.round)
            work.wait()
            sending.settle(step.num_sent)
            self._write(step, received)
            done += 1
        sending.begin(num_received=len(self.program.receives))
        sending.settle(len(self.program.sends))

    @torch.inference_mode()
    def enqueue(self, port: PointToPoint, *, tag: int) -> None:
        """Enqueue the program in the current CUDA stream, round by round; the waits are the stream's."""
        for out, into in self.program.rounds:
            sends = [(self.peers[send.target], part) for send in out if len(part := self.part(send.first, send.stop))]
            taken = [send for send in into if self._size(send.first, send.stop)]
            ahead = [torch.empty_like(self.part(send.first, send.stop)) for send in taken]
            received = [(self.peers[send.source], buffer) for send, buffer in zip(taken, ahead, strict=True)]
            for work in port.post(sends, received, tag=tag) if sends or received else ():
                work.wait()
            for send, buffer in zip(taken, ahead, strict=True):
                part = self.part(send.first, send.stop)
                part.add_(buffer) if send.adds else part.copy_(buffer)

    def part(self, first: int, stop: int) -> Tensor:
        """Return a range of chunks; it may be empty if there are fewer numbers than chunks."""
        begin, end = self._bounds(first, stop)
        return self.flat[begin:end]

    def _write(self, step: ReceiveStep, received: Tensor) -> None:
        part = self.part(step.first, step.stop)
        if step.adds:
            part.add_(received)
        else:
            part.copy_(received)

    def _bounds(self, first: int, stop: int) -> tuple[int, int]:
        total, chunks = self.flat.numel(), self.program.num_chunks
        return bounds(total, chunks, first)[0], bounds(total, chunks, stop - 1)[1]

    def _size(self, first: int, stop: int) -> int:
        begin, end = self._bounds(first, stop)
        return end - begin

    def _largest(self) -> int:
        return max((self._size(one.first, one.stop) for one in self.program.receives), default=0)


class _PendingSends:
    """The sends of an execution: begun in their order, each as soon as everything it depends on was received."""

    def __init__(self, execution: ScheduleExecution, port: PointToPoint, tag: int) -> None:
        self._execution, self._port, self._tag = execution, port, tag
        self._begun: list[dist.Work | None] = []
        self._num_settled = 0

    def begin(self, *, num_received: int) -> None:
        """Begin all sends that are possible after `num_received` receives."""
        sends = self._execution.program.sends
        while len(self._begun) < len(sends) and sends[len(self._begun)].num_received <= num_received:
            send = sends[len(self._begun)]
            part = self._execution.part(send.first, send.stop)
            outgoing = (self._execution.peers[send.to], part)
            self._begun.append(self._port.post([outgoing], (), tag=self._tag)[0] if len(part) else None)

    def settle(self, count: int) -> None:
        """Return when the first `count` sends are done, so that their chunks may be overwritten."""
        for number in range(self._num_settled, count):
            if (work := self._begun[number]) is not None:
                self._execution.report_wait(self._execution.peers[self._execution.program.sends[number].to], -1)
                work.wait()
                self._begun[number] = None
        self._num_settled = max(self._num_settled, count)
