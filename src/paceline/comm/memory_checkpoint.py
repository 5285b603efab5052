"""A worker's memory checkpoint: its newest snapshots, in memory that outlives the worker.

The memory belongs to two files without a name (memfd). The supervisor makes and holds them, and hands them to the
worker when it is forked; when the last holder has gone, the memory is freed. The worker fills the two *slots* in turn.
A slot loses its header before its first byte changes, and gets a new one after its last byte is written. So a snapshot
that a kill cut off does not count, and the one before it does. The content of a slot is the worker's business
(`paceline.worker.state.memory_checkpointing`).

Slots are written by system calls and never mapped: their memory is the host's, and not part of any worker's size.

In a job on several hosts the supervisor copies each snapshot to a neighbor host, and notes the progress in the slot.
The worker does not overwrite the older snapshot before the newer one has arrived there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
from collections.abc import Iterable, Sequence

__all__ = ["FIRST_BYTE", "MemoryCheckpoint", "ReplicationStatus", "SnapshotHeader", "SnapshotSlot", "common_step"]

FIRST_BYTE = 4096  # behind the mark
MAGIC = b"paceslot"
HEADER = struct.Struct("<8sqqq?")
REPLICATION_AT = 64  # behind the mark, which belongs to another process
REPLICATION_MAGIC = b"pacetrip"
REPLICATION = struct.Struct("<8sqdd")
PIECE_BYTES = 1 << 30  # in one call: the system takes at most 2 GiB


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotHeader:
    """What a valid slot contains."""

    step: int  # the state after it
    index: int  # where the description of the rest begins
    index_bytes: int
    is_for_all: bool = False  # all workers of this host have the same state, and this is it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicationStatus:
    """Which snapshot of a slot has arrived on the neighbor host."""

    step: int = -1  # of the snapshot that has arrived last; -1: none yet
    work_s: float = 0.0  # that sending has kept a core of this host busy, and receiving others
    took_s: float = 0.0  # from its beginning to its end


class SnapshotSlot:
    """One snapshot, or room for one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def mark(self) -> SnapshotHeader | None:
        """The header; None if the slot was never filled, or not completely."""
        data = os.pread(self.fd, HEADER.size, 0)
        if len(data) < HEADER.size:
            return None
        magic, step, index, index_bytes, is_for_all = HEADER.unpack(data)
        if magic != MAGIC:
            return None
        return SnapshotHeader(step=step, index=index, index_bytes=index_bytes, is_for_all=is_for_all)

    def clear(self) -> None:
        """Invalidate the slot."""
        if self.num_bytes:
            os.pwrite(self.fd, bytes(HEADER.size), 0)

    def commit(self, mark: SnapshotHeader) -> None:
        """Make the filled slot valid."""
        os.pwrite(self.fd, HEADER.pack(MAGIC, mark.step, mark.index, mark.index_bytes, mark.is_for_all), 0)

    @property
    def num_bytes(self) -> int:
        """The memory that the slot uses."""
        return os.fstat(self.fd).st_size

    @property
    def replication_status(self) -> ReplicationStatus | None:
        """How far replication has come; None if the snapshot is not to be replicated."""
        data = os.pread(self.fd, REPLICATION.size, REPLICATION_AT)
        if len(data) < REPLICATION.size:
            return None
        magic, step, work_s, took_s = REPLICATION.unpack(data)
        return ReplicationStatus(step=step, work_s=work_s, took_s=took_s) if magic == REPLICATION_MAGIC else None

    def note(self, replication_status: ReplicationStatus | None) -> None:
        """Record how far replication has come (None: the snapshot is not to be replicated)."""
        data = (
            bytes(REPLICATION.size)
            if replication_status is None
            else REPLICATION.pack(
                REPLICATION_MAGIC, replication_status.step, replication_status.work_s, replication_status.took_s
            )
        )
        os.pwrite(self.fd, data, REPLICATION_AT)

    def reserve(self, num_bytes: int) -> None:
        """Allocate memory for this many bytes, header included; OSError if the system does not give it."""
        if self.num_bytes < num_bytes:
            os.posix_fallocate(self.fd, 0, num_bytes)

    def give_back(self) -> None:
        """Return the slot's memory to the system; the slot is invalid then."""
        os.ftruncate(self.fd, 0)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Copy bytes to a place behind the header."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self.fd, view[:PIECE_BYTES], offset)
            view, offset = view[done:], offset + done

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from a place; EOFError where there is nothing."""
        while target:
            done = os.preadv(self.fd, [target[:PIECE_BYTES]], offset)
            if done == 0:
                raise EOFError(f"a snapshot in memory ends at byte {offset}")
            target, offset = target[done:], offset + done


class MemoryCheckpoint:
    """Two slots, of which the one that is not the newest is filled next."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.slots = tuple(map(SnapshotSlot, fds))

    @staticmethod
    def create(name: str) -> MemoryCheckpoint:
        """Make two files without a name (`name` is for people who look into /proc); OSError if the system has none."""
        first = os.memfd_create(f"paceline-{name}")
        try:
            return MemoryCheckpoint((first, os.memfd_create(f"paceline-{name}")))
        except OSError:
            os.close(first)
            raise

    @property
    def next(self) -> SnapshotSlot:
        """The slot to be filled: an invalid one, or the older one."""
        return min(self.slots, key=_step_of)

    @property
    def newest(self) -> SnapshotSlot | None:
        """The slot that holds the newest snapshot; None where there is none."""
        return max((slot for slot in self.slots if slot.mark is not None), key=_step_of, default=None)

    @property
    def is_replicated(self) -> bool:
        """Whether the newest snapshot has arrived where it is to go, so the older one may be overwritten."""
        newest = self.newest
        replication_status = None if newest is None else newest.replication_status
        return newest is None or replication_status is None or replication_status.step == _step_of(newest)

    def at(self, step: int) -> SnapshotSlot | None:
        """Return the slot that holds the state after a step."""
        return next((slot for slot in self.slots if slot.mark is not None and slot.mark.step == step), None)

    @property
    def steps(self) -> frozenset[int]:
        """The steps of the valid slots."""
        return frozenset(slot.mark.step for slot in self.slots if slot.mark is not None)

    def keep_only(self, step: int | None) -> None:
        """Invalidate all slots but that of a step (None: all): what came after it is undone."""
        for slot in self.slots:
            if slot.mark is not None and slot.mark.step != step:
                slot.clear()

    def close(self) -> None:
        """Release the memory. A later read or write of a slot raises OSError, and never reaches another file with the
        same number.
        """
        for slot in self.slots:
            fd, slot.fd = slot.fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)


def _step_of(slot: SnapshotSlot) -> int:
    mark = slot.mark
    return -1 if mark is None else mark.step


def common_step(steps: Iterable[frozenset[int]]) -> int | None:
    """Return the newest step that all of them have; None where there is none."""
    found = list(steps)
    return max(frozenset.intersection(*found), default=None) if found else None
