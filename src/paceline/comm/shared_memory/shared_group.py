"""Collectives in shared memory for the workers of one host, without locks, copies through the kernel, or threads.

An all-reduce takes two announcements. Each member writes its numbers into its own slot and announces that it has
*arrived*. Member i then sums the i-th part of all slots, in the order of the members, so all members get the same bits.
It writes that sum into every slot, and announces that it is *done*. When all are done, each member has the whole sum in
its own slot, and no other member touches that slot until its owner arrives again. So there are no locks, and a slot can
be reused at once.

Three cases need only one round, in which each member reads all slots for itself: small tensors, for which a second
round costs more than it saves; collectives that are not a sum for all members (`comm/shared_memory/collectives.py`);
and sums of two members outside the arena, where each adds the other's numbers to its own.

Tensors from `allocate` are in their slots already; others are copied in and out, in pieces. A collective proceeds only
when a worker calls in: `all_reduce` does what has become possible and returns; `wait` blocks until the result is there
(`comm/shared_memory/futex_wait.py`). GPU tensors and other types go to the process group of torch below, `base`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.comm.group import CompletedTransfer, Transfer, WorkerGroup, copy_into
from paceline.comm.shared_memory.arena import ARRIVED, DONE, NUM_FINGERPRINTS, Arena
from paceline.comm.shared_memory.collectives import (
    COPY_BYTES,
    NUM_COPY,
    NUM_PIECES,
    NUM_SMALL,
    PIECE_BYTES,
    SMALL_BYTES,
    CollectivePiece,
    PendingPieces,
    SharedMemoryOp,
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
    LAST_PAGE,
    REDUCE_SCATTERED,
    SUMMED,
    fingerprint_of,
    fingerprint_text,
    is_barrier,
    ordered_sum,
    part_bounds,
    sum_in_place,
)
from paceline.errors import SyncError

__all__ = ["SharedGroup"]


class SharedGroup:
    """Two or more workers of one host. One thread at a time may use it.

    After a SyncError it is unusable: close it, and make another group of the remaining workers.
    """

    shares_memory = True

    def __init__(
        self,
        group: WorkerGroup,
        arena: Arena,
        *,
        timeout_s: float,
        check_peers: Callable[[], str | None] | None = None,
        num_local_workers: int | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        self.index, self.size, self.hosts = group.index, group.size, (0,) * group.size
        self.base, self._arena, self._control = group, arena, arena.control
        self._waiter = FutexWaiter(
            arena,
            ranks=ranks or range(group.size),
            timeout_s=timeout_s,
            check_peers=check_peers,
            num_local_workers=num_local_workers or group.size,
        )
        self._pending: deque[SharedMemoryOp] = deque()  # announced, and this member's part is not done yet
        self._sequence = 0  # of the newest announced op
        self._done_through = 0  # all members are done with the ops up to this one
        self._broken: str | None = None
        self._reset_buffers()

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu" or dtype not in SUMMED:
            return self.base.allocate(numel, dtype=dtype, device=device)
        return self._arena.reserve(numel, dtype)

    def all_reduce(self, tensor: Tensor, *, what: str, mean: bool = False) -> Transfer:
        """`mean`: divide the sum by the number of members, which costs little here; only types in `AVERAGED`, on the
        CPU. All members must pass the same."""
        if self._broken is not None:
            raise SyncError(self._broken)
        if tensor.device.type != "cpu" or tensor.dtype not in SUMMED:
            self._run_through(self._sequence)
            return self.base.all_reduce(tensor, what=what)
        tensor = tensor.detach()
        segment = self._arena.segment(tensor)
        if segment is not None and segment.dtype == tensor.dtype and tensor.is_contiguous():
            start, stop = tensor.storage_offset(), tensor.storage_offset() + tensor.numel()
            parts = [slot[start:stop] for slot in segment.slots]
            last = self._announce(
                SharedMemoryOp(self._finish, what, parts, tensor, divisor=self.size if mean else 1),
                origin=min(segment.page, LAST_PAGE),
            )
        elif tensor.numel():
            last = self._sum_staged(tensor, what, mean=mean)
        else:
            return CompletedTransfer()
        self.progress()
        return last

    def progress(self) -> None:
        """Do what has become possible of the ops in flight; never blocks."""
        while self._pending and self._have_all(ARRIVED, self._pending[0].sequence):
            self._run_next()

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        if tensor.device.type != "cpu":
            self._run_through(self._sequence)
            return self.base.begin_all_gather(tensor, out, what=what)
        row, targets = flat(tensor), list(map(flat, out))
        pieces = gather_pieces(row, targets, most=COPY_BYTES // row.itemsize)
        return self._begin_pieces(pieces, row.dtype, what, kind=GATHERED) or CompletedTransfer()

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        if rows.device.type != "cpu":
            self._run_through(self._sequence)
            return self.base.begin_all_to_all(rows, out, what=what)
        sent, targets = list(map(flat, rows)), list(map(flat, out))
        each = [[sent[0].numel()] * self.size] * self.size
        pieces = all_to_all_pieces(sent, targets, each, index=self.index, most=COPY_BYTES // sent[0].itemsize)
        return self._begin_pieces(pieces, sent[0].dtype, what, kind=EXCHANGED) or CompletedTransfer()

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        if tensor.device.type != "cpu":
            self._run_through(self._sequence)
            return self.base.all_gather(tensor, out, what=what)
        row, targets = flat(tensor), list(map(flat, out))
        pieces = gather_pieces(row, targets, most=COPY_BYTES // row.itemsize)
        return self.run_pieces(pieces, row.dtype, what, kind=GATHERED)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        if out.device.type != "cpu" or out.dtype not in SUMMED:
            self._run_through(self._sequence)
            return self.base.reduce_scatter(parts, out, what=what)
        pieces = reduce_scatter_pieces(
            list(map(flat, parts)), flat(out), index=self.index, most=COPY_BYTES // out.itemsize
        )
        return self.run_pieces(pieces, out.dtype, what, kind=REDUCE_SCATTERED)

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        if parts[0].device.type != "cpu":
            self._run_through(self._sequence)
            return self.base.all_to_all(parts, out, what=what)
        sent, targets = list(map(flat, parts)), list(map(flat, out))
        lengths = torch.empty(self.size, self.size, dtype=torch.int64)
        self.all_gather(torch.tensor([part.numel() for part in sent]), lengths.unbind(), what=what)
        each, dtype = lengths.tolist(), sent[0].dtype
        if (given := [row[self.index] for row in each]) != (wanted := [one.numel() for one in targets]):
            self._fail(
                f"workers do not agree in {what}: {self._name(self.index)} expects {wanted} numbers and gets {given}"
            )
        pieces = all_to_all_pieces(sent, targets, each, index=self.index, most=COPY_BYTES // dtype.itemsize)
        return self.run_pieces(pieces, dtype, what, kind=EXCHANGED)

    def run_pieces(self, pieces: Iterable[CollectivePiece], dtype: torch.dtype, what: str, *, kind: int) -> None:
        """Run a collective piece by piece; all members must pass the same kind (`comm/shared_memory/summation.py`),
        type and lengths.
        """
        if (last := self._begin_pieces(pieces, dtype, what, kind=kind)) is not None:
            self._finish(last)

    def mailboxes(self) -> Mailboxes:
        """Return the mailboxes for point-to-point transfers; all members must call this, and only once."""
        return Mailboxes(self._arena, self._waiter)

    def joined_counts(self) -> tuple[int, ...]:
        """Return how many ops each member has joined since the beginning, by index."""
        return tuple(self._control[self._arena.counter(index, ARRIVED)] for index in range(self.size))

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        if tensor.device.type != "cpu":
            self._run_through(self._sequence)
            return self.base.broadcast(tensor, source=source, what=what)
        with fill_pieces([tensor]) as (row,):
            pieces = broadcast_pieces(row, source=source, index=self.index, most=COPY_BYTES // row.itemsize)
            self.run_pieces(pieces, row.dtype, what, kind=BROADCAST)

    def gather_objects(self, value: Any) -> list[Any]:
        self._run_through(self._sequence)
        return self.base.gather_objects(value)

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        self._run_through(self._sequence)
        return self.base.broadcast_object(value, source=source)

    def barrier(self) -> None:
        if self._broken is not None:
            raise SyncError(self._broken)
        self._sum_piece(torch.zeros(1, device="cpu"), self._small, "barrier", origin=BARRIER).wait()

    def settle(self) -> None:
        return  # a transfer has ended where its `wait` returns

    def close(self) -> None:
        self._broken = self._broken or "this group of workers was closed: nothing can be sent any more"
        self._pending.clear()
        self._arena.close()
        self.base.close()
        self._reset_buffers()  # they refer to ops, and these to this group

    def _reset_buffers(self) -> None:
        self._small = StagingBuffers(SMALL_BYTES, num_buffers=NUM_SMALL)
        self._large = StagingBuffers(PIECE_BYTES, num_buffers=NUM_PIECES)
        self._copy = StagingBuffers(COPY_BYTES, num_buffers=NUM_COPY)

    def _begin_pieces(
        self, pieces: Iterable[CollectivePiece], dtype: torch.dtype, what: str, *, kind: int
    ) -> SharedMemoryOp | None:
        """Announce all pieces and return the last one, which ends when all pieces have ended."""
        if self._broken is not None:
            raise SyncError(self._broken)
        last: SharedMemoryOp | None = None
        for piece in pieces:
            parts = self._next_buffer(self._copy, piece.numel, dtype)
            fill(parts[self.index], piece.sent)
            last = SharedMemoryOp(self._finish, what, parts, parts[self.index], read=piece.read)
            self._copy.use(self._announce(last, origin=kind))
            self.progress()
        return last

    def _sum_staged(self, tensor: Tensor, what: str, *, mean: bool) -> Transfer:
        """Announce the sum of a tensor outside the arena, in as many pieces as it takes."""
        flat = tensor.reshape(-1)
        buffers = self._small if flat.nbytes <= SMALL_BYTES else self._large
        if flat.nbytes <= buffers.num_bytes and tensor.is_contiguous():
            only = self._sum_piece(flat, buffers, what, mean=mean)
            self.progress()
            return only
        sums: list[SharedMemoryOp] = []
        for piece in flat.split(buffers.num_bytes // flat.itemsize):
            sums.append(self._sum_piece(piece, buffers, what, mean=mean))
            self.progress()
        return PendingPieces(sums, flat, tensor)

    @torch.inference_mode()
    def _sum_piece(
        self, piece: Tensor, buffers: StagingBuffers, what: str, *, origin: int = 0, mean: bool = False
    ) -> SharedMemoryOp:
        parts, divisor = self._next_buffer(buffers, piece.numel(), piece.dtype), self.size if mean else 1
        read: Callable[[Sequence[Tensor]], None] | None = None
        if self.size == 2 and mean:  # a half is exact, so it does not matter whether it is taken before or behind
            torch.mul(piece, 0.5, out=parts[self.index])
            read = functools.partial(_add_both, piece)
        else:
            parts[self.index].copy_(piece)
            if self.size == 2:
                read = functools.partial(_add_to, piece, 1 - self.index)
            elif buffers is self._small:
                read = functools.partial(_sum_into, piece, divisor)
        op = SharedMemoryOp(self._finish, what, parts, piece, is_copied=True, divisor=divisor, read=read)
        return buffers.use(self._announce(op, origin=origin))

    def _next_buffer(self, buffers: StagingBuffers, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return all members' parts of the next buffer, once no member reads its former content."""
        if (before := buffers.next_user()) is not None:
            self._finish(before)
            self._wait_until_done(before.sequence, before.what)
        return buffers.parts(self._arena, numel, dtype)

    def _announce(self, op: SharedMemoryOp, *, origin: int) -> SharedMemoryOp:
        """Announce that this member has arrived; `origin` as for `fingerprint_of`."""
        self._sequence = op.sequence = self._sequence + 1
        if (overwritten := self._sequence - NUM_FINGERPRINTS // 2) > 0 and overwritten % (NUM_FINGERPRINTS // 4) == 0:
            self._wait_until_done(overwritten, op.what)  # all have read the fingerprints that the next ones overwrite
        part = op.parts[self.index]
        self._control[self._arena.fingerprint(self.index, self._sequence)] = fingerprint_of(part, origin=origin)
        self._pending.append(op)
        self._arena.announce(ARRIVED, self._sequence)
        return op

    def _finish(self, op: SharedMemoryOp) -> None:
        """Return when the tensor of `op` holds the result."""
        if op.is_finished:
            return
        if self._broken is not None:
            raise SyncError(self._broken)
        self._run_through(op.sequence)
        if op.read is None:
            self._wait_until_done(op.sequence, op.what)
            if op.is_copied:
                copy_into(op.tensor, op.parts[self.index])
        op.is_finished = True
        if op.is_copied:  # the buffer keeps its last op, which must not keep a large tensor alive
            op.tensor = op.parts[self.index]

    def _wait_until_done(self, sequence: int, what: str) -> None:
        """Return when all members are done with all ops up to `sequence`."""
        if sequence <= self._done_through:
            return
        self._run_through(sequence)
        self._wait_for_all(DONE, sequence, what)
        self._done_through = sequence

    def _run_through(self, sequence: int) -> None:
        """Do this member's part of all ops up to `sequence`."""
        while self._pending and self._pending[0].sequence <= sequence:
            self._wait_for_all(ARRIVED, self._pending[0].sequence, self._pending[0].what)
            self._run_next()

    @torch.inference_mode()  # only in this mode can tensors be written to that were made in it, as in evaluation
    def _run_next(self) -> None:
        op = self._pending[0]
        self._compare_fingerprints(op)
        if op.read is not None:
            op.read(op.parts)
            op.read = _nothing_to_read  # the buffer keeps its last op, which must not keep large targets alive
        else:
            bounds = part_bounds(op.parts[0].numel(), self.index, self.size)
            sum_in_place(op.parts, *bounds, divisor=op.divisor)
        self._pending.popleft()
        self._arena.announce(DONE, op.sequence)

    def _compare_fingerprints(self, op: SharedMemoryOp) -> None:
        fingerprints = [self._control[self._arena.fingerprint(index, op.sequence)] for index in range(self.size)]
        own = fingerprints[self.index]
        for index, other in enumerate(fingerprints):
            if other == own:
                continue
            if is_barrier(own):  # a member that left its collective after an error: its own error explains more
                self._fail(f"lost contact with a peer during barrier: {self._name(index)} {fingerprint_text(other)}")
            else:
                self._fail(
                    f"workers are in different calls: in {op.what} {self._name(self.index)} {fingerprint_text(own)}, "
                    f"while {self._name(index)} {fingerprint_text(other)}. All workers must make the same calls in the "
                    "same order: look for a branch that only some take"
                )

    def _have_all(self, name: int, sequence: int) -> bool:
        return all(self._control[self._arena.counter(index, name)] >= sequence for index in range(self.size))

    def _wait_for_all(self, name: int, sequence: int, what: str) -> None:
        """Return when a counter of all members has reached `sequence`."""
        for index in range(self.size):
            word = self._arena.counter(index, name)
            if self._control[word] >= sequence:
                continue
            try:
                self._waiter.until(
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
        numbers = {index: self._control[self._arena.counter(index, name)] for index in range(self.size)}
        missing = {index: number for index, number in numbers.items() if number < sequence}
        verb = "joined" if name == ARRIVED else "finished"
        awaited = ", ".join(f"{self._name(index)} ({verb} {number})" for index, number in missing.items())
        return (
            f"{self._name(self.index)} waited {waited_s:.1f} s in {what}, sum number {sequence} of this group, for "
            f"{awaited}: stopped, stuck, or taking other steps than the rest. A longer timeout_s waits longer"
        )

    def _name(self, index: int) -> str:
        return f"worker {self._waiter.ranks[index]}"

    def _fail(self, message: str) -> NoReturn:
        self._broken = message
        raise SyncError(message)


def _nothing_to_read(parts: Sequence[Tensor]) -> None:
    """The read of an op that is done."""


def _sum_into(target: Tensor, divisor: int, parts: Sequence[Tensor]) -> None:
    summed = ordered_sum(parts)
    target.copy_(summed if divisor == 1 else summed.div_(divisor))


def _add_both(target: Tensor, parts: Sequence[Tensor]) -> None:
    torch.add(parts[0], parts[1], out=target)


def _add_to(target: Tensor, other: int, parts: Sequence[Tensor]) -> None:
    """Add the other member's numbers to this one's, in place: with two members the sum has the same bits on both."""
    target.add_(parts[other])
