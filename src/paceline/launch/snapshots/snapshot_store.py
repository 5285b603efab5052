"""The vaults of this host, as long as the supervisor lives: from one start of the workers to the next.

They are its own workers', and copies of those of another host's, which lives on here when that host is lost.

Where replicas come and go, those at the same place of each hold the same state, and whoever has a number inherits the
vault of its predecessor. So a place can begin with what any worker at that place has kept, also one that was lost
since: what a slot that counts holds, all had committed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from paceline.comm.memory_checkpoint import MemoryCheckpoint, ReplicationStatus, SnapshotHeader, SnapshotSlot
from paceline.launch.job.restart_plan import StoredSnapshot, newest_step

__all__ = ["SnapshotStore"]


class SnapshotStore:
    """Makes and holds them; `close` gives the memory back."""

    def __init__(self) -> None:
        self.workers_each: int | None = None  # of replicas that come and go; None: each worker has a place of its own
        self._memory_checkpoints: dict[int, MemoryCheckpoint] = {}  # by worker
        self._copies: dict[int, MemoryCheckpoint] = {}  # of other hosts' workers
        self._left: set[int] = set()  # workers that have left, and whose snapshots for all are still the newest
        self._is_replicating = False  # what this host's workers keep is to go to another host

    def file_descriptors_for(self, worker: int, *, step: int | None) -> tuple[int, ...]:
        """What a worker is handed: its vault's two slots, and the one that holds the state after `step`.

        Empty where this system has no such memory. LookupError where nobody has that state.
        """
        if sys.platform != "linux":
            return ()
        self._left.discard(worker)  # it has a successor, which inherits
        if worker not in self._memory_checkpoints:
            self._memory_checkpoints[worker] = MemoryCheckpoint.create(f"w{worker}")
            if self._is_replicating:
                _note([self._memory_checkpoints[worker]], ReplicationStatus())
        fds = tuple(slot.fd for slot in self._memory_checkpoints[worker].slots)
        return fds if step is None else (*fds, self._source(worker, step).fd)

    def newest(self, num_workers: int) -> int | None:
        """The newest step whose state so many workers of this host can begin with; None: there is none."""
        return newest_step(self.snapshots, num_workers, workers_each=self.workers_each)

    @property
    def snapshots(self) -> tuple[StoredSnapshot, ...]:
        """All that counts here."""
        found: list[StoredSnapshot] = []
        for memory_checkpoints, is_copy in ((self._memory_checkpoints, False), (self._copies, True)):
            for worker, memory_checkpoint in memory_checkpoints.items():
                found += [
                    _kept(worker, mark, is_copy=is_copy) for slot in memory_checkpoint.slots if (mark := slot.mark)
                ]
        return tuple(found)

    def keep_only(self, step: int | None) -> None:
        """The workers begin again with this step (None: not from here): nothing else counts any more."""
        for memory_checkpoint in (*self._memory_checkpoints.values(), *self._copies.values()):
            memory_checkpoint.keep_only(step)
        for worker in [worker for worker, memory_checkpoint in self._copies.items() if not memory_checkpoint.steps]:
            self._copies.pop(worker).close()

    def drop(self, worker: int) -> None:
        """A worker has left for good: what it has kept counts no more; if it wrote for all, once somebody else has a
        snapshot that is as new. Until then it may be the only state that there is."""
        self._left.add(worker)
        self.tidy()

    def tidy(self) -> None:
        """Give back what those who have left have kept, where it does not count any more."""
        for worker in sorted(self._left):
            if not self._is_needed(worker):
                self._left.discard(worker)
                for memory_checkpoints in (self._memory_checkpoints, self._copies):
                    if worker in memory_checkpoints:
                        memory_checkpoints.pop(worker).close()

    def _is_needed(self, worker: int) -> bool:
        """Whether a worker wrote for all, and nobody else has written anything as new since."""
        for_all = [one for one in self.snapshots if one.is_for_all]
        newest = max((one.step for one in for_all if one.worker == worker), default=None)
        others = (one.step for one in for_all if one.worker != worker and one.worker not in self._left)
        return newest is not None and newest > max(others, default=-1)

    def close(self) -> None:
        self._left.clear()
        for memory_checkpoints in (self._memory_checkpoints, self._copies):
            while memory_checkpoints:
                memory_checkpoints.popitem()[1].close()

    # What travels between hosts (`paceline.launch.snapshots.snapshot_replication`).

    @property
    def own(self) -> tuple[int, ...]:
        """The workers that have vaults of their own here."""
        return tuple(sorted(self._memory_checkpoints))

    def set_replicating(self, is_replicating: bool) -> None:
        """From now on workers wait until what they keep has arrived on another host, or do not."""
        self._is_replicating = is_replicating
        _note(self._memory_checkpoints.values(), ReplicationStatus() if is_replicating else None)

    def newest_of(self, worker: int) -> SnapshotSlot | None:
        """The newest snapshot of an own worker."""
        return self._memory_checkpoints[worker].newest if worker in self._memory_checkpoints else None

    def find(self, worker: int, step: int) -> SnapshotSlot | None:
        """A worker's state after a step, kept here by itself or for another host."""
        found = (
            memory_checkpoints[worker].at(step)
            for memory_checkpoints in (self._memory_checkpoints, self._copies)
            if worker in memory_checkpoints
        )
        return next((slot for slot in found if slot is not None), None)

    def room_for(self, worker: int) -> SnapshotSlot:
        """The slot for a copy of another host's worker; OSError where there is no such memory."""
        if worker not in self._copies:
            self._copies[worker] = MemoryCheckpoint.create(f"copy{worker}")
        return self._copies[worker].next

    def _at_same_place(self, worker: int) -> Iterator[MemoryCheckpoint]:
        """The vaults of all who are, or were, at a worker's place; its own first."""
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
        raise LookupError(f"no vault has the state of worker {worker} after step {step}")


def _note(memory_checkpoints: Iterable[MemoryCheckpoint], replication_status: ReplicationStatus | None) -> None:
    for memory_checkpoint in memory_checkpoints:
        for slot in memory_checkpoint.slots:
            slot.note(replication_status)


def _kept(worker: int, mark: SnapshotHeader, *, is_copy: bool) -> StoredSnapshot:
    return StoredSnapshot(worker=worker, step=mark.step, is_for_all=mark.is_for_all, is_copy=is_copy)
