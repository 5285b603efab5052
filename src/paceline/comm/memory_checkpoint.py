"""A worker's vault: its newest snapshots, in memory that outlives it.

The memory belongs to two files without a name. Whoever starts workers makes them, holds them, and hands them to the
worker when it is forked; when the last holder has gone, so has the memory. The worker fills them in turn: a *slot*
loses its mark before the first byte changes and gets it back when the last one has, so a snapshot that a kill has cut
off does not count, and the one before it does. What is in a slot is the worker's business
(`paceline.worker.state.memory_checkpointing`).

Slots are written by system calls and never mapped: their memory is the host's, and not part of any worker's size.

Where a job has several hosts, whoever holds the memory sends what is in it to another one, and notes there how far that
is: the worker does not overwrite the older snapshot before the newer one has arrived.
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
REPLICATION_AT = 64  # behind the mark, which is somebody else's
REPLICATION_MAGIC = b"pacetrip"
REPLICATION = struct.Struct("<8sqdd")
PIECE_BYTES = 1 << 30  # in one call: the system takes at most 2 GiB


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotHeader:
    """What a slot that counts holds."""

    step: int  # the state after it
    index: int  # where the description of the rest begins
    index_bytes: int
    is_for_all: bool = False  # all workers of this host have the same state, and this is it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicationStatus:
    """How far what a slot holds is on its way to another host."""

    step: int = -1  # of the snapshot that has arrived last; -1: none yet
    work_s: float = 0.0  # that sending has kept a core of this host busy, and receiving others
    took_s: float = 0.0  # from its beginning to its end


class SnapshotSlot:
    """One snapshot, or room for one."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def mark(self) -> SnapshotHeader | None:
        """What it holds; None where it was never filled, or not to its end."""
        data = os.pread(self.fd, HEADER.size, 0)
        if len(data) < HEADER.size:
            return None
        magic, step, index, index_bytes, is_for_all = HEADER.unpack(data)
        if magic != MAGIC:
            return None
        return SnapshotHeader(step=step, index=index, index_bytes=index_bytes, is_for_all=is_for_all)

    def clear(self) -> None:
        """From now on it does not count."""
        if self.num_bytes:
            os.pwrite(self.fd, bytes(HEADER.size), 0)

    def commit(self, mark: SnapshotHeader) -> None:
        """It is filled: from now on it counts."""
        os.pwrite(self.fd, HEADER.pack(MAGIC, mark.step, mark.index, mark.index_bytes, mark.is_for_all), 0)

    @property
    def num_bytes(self) -> int:
        """The memory that it has."""
        return os.fstat(self.fd).st_size

    @property
    def replication_status(self) -> ReplicationStatus | None:
        """How far it is on its way; None where it is to stay here."""
        data = os.pread(self.fd, REPLICATION.size, REPLICATION_AT)
        if len(data) < REPLICATION.size:
            return None
        magic, step, work_s, took_s = REPLICATION.unpack(data)
        return ReplicationStatus(step=step, work_s=work_s, took_s=took_s) if magic == REPLICATION_MAGIC else None

    def note(self, replication_status: ReplicationStatus | None) -> None:
        """Say how far it is on its way (None: it is to stay here)."""
        data = (
            bytes(REPLICATION.size)
            if replication_status is None
            else REPLICATION.pack(
                REPLICATION_MAGIC, replication_status.step, replication_status.work_s, replication_status.took_s
            )
        )
        os.pwrite(self.fd, data, REPLICATION_AT)

    def reserve(self, num_bytes: int) -> None:
        """Get the memory for so many bytes, mark included; OSError where the system does not give it."""
        if self.num_bytes < num_bytes:
            os.posix_fallocate(self.fd, 0, num_bytes)

    def give_back(self) -> None:
        """Return its memory to the system; it does not count any more."""
        os.ftruncate(self.fd, 0)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Copy bytes to a place behind the mark."""
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
        """Get two files without a name (`name` is for people who look into /proc); OSError where there are none."""
        first = os.memfd_create(f"paceline-{name}")
        try:
            return MemoryCheckpoint((first, os.memfd_create(f"paceline-{name}")))
        except OSError:
            os.close(first)
            raise

    @property
    def next(self) -> SnapshotSlot:
        """The slot to be filled: one that does not count, or the older one."""
        return min(self.slots, key=_step_of)

    @property
    def newest(self) -> SnapshotSlot | None:
        """The slot that holds the newest snapshot; None where there is none."""
        return max((slot for slot in self.slots if slot.mark is not None), key=_step_of, default=None)

    @property
    def is_replicated(self) -> bool:
        """Whether the newest snapshot is where it is to go: the older one may be overwritten."""
        newest = self.newest
        replication_status = None if newest is None else newest.replication_status
        return newest is None or replication_status is None or replication_status.step == _step_of(newest)

    def at(self, step: int) -> SnapshotSlot | None:
        """The slot that holds the state after a step."""
        return next((slot for slot in self.slots if slot.mark is not None and slot.mark.step == step), None)

    @property
    def steps(self) -> frozenset[int]:
        """The steps of the slots that count."""
        return frozenset(slot.mark.step for slot in self.slots if slot.mark is not None)

    def keep_only(self, step: int | None) -> None:
        """Have no slot count but that of a step (None: none): what came after it is undone."""
        for slot in self.slots:
            if slot.mark is not None and slot.mark.step != step:
                slot.clear()

    def close(self) -> None:
        """Let go of the memory. Who still writes or reads a slot of it gets an OSError, and never another file, which
        may have the same number by then."""
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
