"""The memory checkpoints of a host's workers. They live as long as the supervisor: from one start of the workers to the
next.

The store also holds copies for another host, whose workers' state survives here if that host is lost.

In an elastic run, workers at the same place of each replica have the same state, and a successor inherits the memory
checkpoint of its predecessor. So a place can restart from the snapshot of any worker at that place, even a lost one: a
valid snapshot holds only committed state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from paceline.comm.memory_checkpoint import MemoryCheckpoint, ReplicationStatus, SnapshotHeader, SnapshotSlot
from paceline.launch.job.restart_plan import StoredSnapshot, newest_step

__all__ = ["SnapshotStore"]


class SnapshotStore:
    """Creates and holds the memory checkpoints; `close` frees the memory."""

    def __init__(self) -> None:
        self.workers_each: int | None = (
            None  # workers of each elastic replica; None: each worker has a place of its own
        )
        self._memory_checkpoints: dict[int, MemoryCheckpoint] = {}  # by worker
        self._copies: dict[int, MemoryCheckpoint] = {}  # of other hosts' workers
        self._left: set[int] = set()  # workers that left, but wrote the newest snapshot valid for all
        self._is_replicating = False  # snapshots of this host's workers are replicated to a neighbor

    def file_descriptors_for(self, worker: int, *, step: int | None) -> tuple[int, ...]:
        """Return what a worker inherits: the two slots of its memory checkpoint, and the slot with the state after
        `step`.

        Empty on systems without such memory. LookupError if no snapshot of that state exists.
        """
        if sys.platform != "linux":
            return ()
        self._left.discard(worker)  # its successor inherits the memory
        if worker not in self._memory_checkpoints:
            self._memory_checkpoints[worker] = MemoryCheckpoint.create(f"w{worker}")
            if self._is_replicating:
                _note([self._memory_checkpoints[worker]], ReplicationStatus())
        fds = tuple(slot.fd for slot in self._memory_checkpoints[worker].slots)
        return fds if step is None else (*fds, self._source(worker, step).fd)

    def newest(self, num_workers: int) -> int | None:
        """Return the newest step from which `num_workers` workers of this host can restart; None if there is none."""
        return newest_step(self.snapshots, num_workers, workers_each=self.workers_each)

    @property
    def snapshots(self) -> tuple[StoredSnapshot, ...]:
        """All valid snapshots on this host."""
        found: list[StoredSnapshot] = []
        for memory_checkpoints, is_copy in ((self._memory_checkpoints, False), (self._copies, True)):
            for worker, memory_checkpoint in memory_checkpoints.items():
                found += [
                    _kept(worker, mark, is_copy=is_copy) for slot in memory_checkpoint.slots if (mark := slot.mark)
                ]
        return tuple(found)

    def keep_only(self, step: int | None) -> None:
        """Invalidate all snapshots but those of `step`, from which workers restart (None: from elsewhere)."""
        for memory_checkpoint in (*self._memory_checkpoints.values(), *self._copies.values()):
            memory_checkpoint.keep_only(step)
        for worker in [worker for worker, memory_checkpoint in self._copies.items() if not memory_checkpoint.steps]:
            self._copies.pop(worker).close()

    def drop(self, worker: int) -> None:
        """Free the snapshots of a worker that left for good. If it wrote for all workers, that waits until another
        worker's snapshot is as new.
        """
        self._left.add(worker)
        self.tidy()

    def tidy(self) -> None:
        """Free snapshots of workers that have left, where they are no longer needed."""
        for worker in sorted(self._left):
            if not self._is_needed(worker):
                self._left.discard(worker)
                for memory_checkpoints in (self._memory_checkpoints, self._copies):
                    if worker in memory_checkpoints:
                        memory_checkpoints.pop(worker).close()

    def _is_needed(self, worker: int) -> bool:
        """Return whether a worker wrote the newest snapshot that is valid for all workers."""
        for_all = [one for one in self.snapshots if one.is_for_all]
        newest = max((one.step for one in for_all if one.worker == worker), default=None)
        others = (one.step for one in for_all if one.worker != worker and one.worker not in self._left)
        return newest is not None and newest > max(others, default=-1)

    def close(self) -> None:
        self._left.clear()
        for memory_checkpoints in (self._memory_checkpoints, self._copies):
            while memory_checkpoints:
                memory_checkpoints.popitem()[1].close()

    # Called by the replication between hosts (`paceline.launch.snapshots.snapshot_replication`).

    @property
    def own(self) -> tuple[int, ...]:
        """The workers that have memory checkpoints of their own here."""
        return tuple(sorted(self._memory_checkpoints))

    def set_replicating(self, is_replicating: bool) -> None:
        """From now on workers wait, or do not wait, until their snapshots have arrived on another host."""
        self._is_replicating = is_replicating
        _note(self._memory_checkpoints.values(), ReplicationStatus() if is_replicating else None)

    def newest_of(self, worker: int) -> SnapshotSlot | None:
        """Return the newest snapshot of a worker of this host."""
        return self._memory_checkpoints[worker].newest if worker in self._memory_checkpoints else None

    def find(self, worker: int, step: int) -> SnapshotSlot | None:
        """Return the snapshot of a worker's state after a step, its own or a copy."""
        found = (
            memory_checkpoints[worker].at(step)
            for memory_checkpoints in (self._memory_checkpoints, self._copies)
            if worker in memory_checkpoints
        )
        return next((slot for slot in found if slot is not None), None)

    def room_for(self, worker: int) -> SnapshotSlot:
        """Return the slot for a copy of another host's worker; OSError on systems without such memory."""
        if worker not in self._copies:
            self._copies[worker] = MemoryCheckpoint.create(f"copy{worker}")
        return self._copies[worker].next

    def _at_same_place(self, worker: int) -> Iterator[MemoryCheckpoint]:
        """The memory checkpoints of all workers at a worker's place, present or lost; its own first."""
        both = self._memory_checkpoints, self._copies
        yield from (memory_checkpoints[worker] for memory_checkpoints in both if worker in memory_checkpoints)
        if self.workers_each is not None:
            for other, memory_checkpoint in (
                item for memory_checkpoints in both for item in memory_checkpoints.items()
            ):
                if other != worker and (other - worker) % self.workers_each == 0:
                    yield memory_checkpoint

    def _source(self, worker: int, step: int) -> SnapshotSlot:
        for memory_checkpoint in self._at_same_place(worker):
            if (slot := memory_checkpoint.at(step)) is not None:
                return slot
        for memory_checkpoint in (*self._memory_checkpoints.values(), *self._copies.values()):
            slot = memory_checkpoint.at(step)
            if slot is not None and slot.mark is not None and slot.mark.is_for_all:
                return slot
        raise LookupError(f"no memory checkpoint has the state of worker {worker} after step {step}")


def _note(memory_checkpoints: Iterable[MemoryCheckpoint], replication_status: ReplicationStatus | None) -> None:
    for memory_checkpoint in memory_checkpoints:
        for slot in memory_checkpoint.slots:
            slot.note(replication_status)


def _kept(worker: int, mark: SnapshotHeader, *, is_copy: bool) -> StoredSnapshot:
    return StoredSnapshot(worker=worker, step=mark.step, is_for_all=mark.is_for_all, is_copy=is_copy)
