"""Backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD"): which replica gets which share of a
batch, and when a step is taken without the slowest replicas. No I/O.

Each step is split into as many shares as there are replicas, handed out on request. When all but `drop` shares have
arrived, the step is *closed*: these shares are the *chosen* ones, and the replica that arrived last, the *closer*,
makes the servers take the step. Then the next step begins, even if a replica still computes a share of an old one. That
share is late, and is dropped.

A short batch may have fewer micro-batches than there are replicas, and so fewer shares. All but `drop` of them are
waited for, but at least one. Shares whose workers have left the loop or skipped the batch are not waited for. If these
are all shares of a step, it has no update. A step that is over may remain unrecorded because its workers have left.
Then the next worker that asks records it.

Saves happen between two steps, when all chosen workers have recorded theirs, and so does the end. Pauses do, too, which
a worker may request (`paceline.schedule.staleness_clock` explains them). Late workers come to a pause when they are
done with their share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from paceline.schedule.staleness_clock import AsyncStream, Pause, Save, StreamEnd

__all__ = ["AsyncShares", "BackupClock", "BackupShare", "num_micro_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class BackupShare:
    """Share `index` of the `count` shares into which the micro-batches of batch `number` are split."""

    number: int
    index: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AsyncShares(AsyncStream):
    """A stream whose batches are handed out in shares. `epochs`: the steps left in the first epoch, and those of each
    later one. `micros`: the micro-batches of a step, of the first epoch's last step, and of a later epoch's last."""

    epochs: tuple[int, int]
    micros: tuple[int, int, int]


def num_micro_of(number: int, *, epochs: Sequence[int], micros: Sequence[int]) -> int:
    """Return how many micro-batches a batch has, by its number; `epochs` and `micros` as in `AsyncShares`."""
    first, later = epochs
    full, first_last, last = micros
    if number < first:
        return first_last if number == first - 1 else full
    return last if (number - first) % later == later - 1 else full


class BackupClock:
    """Hands out the shares of `limit` batches to `workers` workers. `num_micro(number)`: a batch's micro-batches.

    Before a batch in `saves`, all earlier ones are done and recorded, and `writer` saves.
    """

    def __init__(
        self,
        *,
        drop: int,
        limit: int,
        workers: int,
        num_micro: Callable[[int], int],
        saves: Iterable[int] = (),
        writer: int = 0,
    ) -> None:
        self.done = 0  # steps that are over: the number of the current one
        self.closer: int | None = None  # the worker that has to finish it
        self._drop, self._limit, self._workers, self._writer = drop, limit, workers, writer
        self._num_micro, self._saves = num_micro, set(saves)
        self._num_present = workers
        self._is_open = False  # the step has begun
        self._count = self._num_assigned = 0  # of its shares
        self._arrived: dict[int, int] = {}  # share -> worker, in the order of arrival
        self._in_progress: dict[int, BackupShare] = {}  # each worker's share, of any step
        self._recording: dict[int, set[int]] = {}  # by worker: steps that are over, perhaps not in its step log yet
        self._unrecorded: set[int] = set()  # steps that are over, perhaps in no step log
        self._is_pause_requested = self._has_lost = False
        self._paused_at = 0
        self._ready_to_pause: set[int] = set()  # workers that wait for a pause
        self._pausing: set[int] = set()  # workers still to be told to pause, after all have come

    @property
    def is_idle(self) -> bool:
        """Whether no step has begun. Late shares of old steps may be in progress."""
        return not self._is_open

    @property
    def chosen(self) -> tuple[int, ...]:
        """The shares that have arrived in time, in order."""
        return tuple(sorted(self._arrived))

    @property
    def oldest(self) -> int:
        """The oldest step about whose end a worker may still ask."""
        return min((share.number for share in self._in_progress.values()), default=self.done)

    def ask(self, worker: int) -> BackupShare | Save | Pause | StreamEnd | None:
        """Return what a worker does next; None: it waits. It is done with its earlier share."""
        self.returned(worker)
        if worker in self._pausing:
            self._pausing.remove(worker)
            return Pause(self.done)
        if self._is_open:
            return self._assign(worker)
        if self._is_pause_due():
            self._ready_to_pause.add(worker)
            if len(self._ready_to_pause) < self._workers:
                return None
            self._pausing, self._ready_to_pause = self._ready_to_pause - {worker}, set()
            self._is_pause_requested, self._paused_at = False, self.done
            return Pause(self.done)
        if self.done in self._saves:
            return Save(self.done) if worker == self._writer and not self._recording else None
        if self.done == self._limit:
            return None if self._recording else StreamEnd(self._has_lost)
        self._is_open, self._num_assigned = True, 0
        self._count = min(self._num_micro(self.done), self._num_present)
        return self._assign(worker)

    def returned(self, worker: int) -> None:
        """A worker is about to ask. It is done with its share, which is no longer waited for if it has not arrived.
        What it has not recorded, others will record."""
        self._recording.pop(worker, None)
        if self._in_progress.pop(worker, None) is not None:
            self._close_if_due()

    def arrive(self, worker: int) -> BackupShare | None:
        """A worker's gradients are on all servers; return its share, or None if it is late."""
        share = self._in_progress[worker]
        if share.number != self.done or self.closer is not None:
            return None
        self._arrived[share.index] = worker
        self._close_if_due()
        return share

    def settle(self, *, without: int | None = None) -> None:
        """End the current step, with or without an update. `without`: a worker that will not record it."""
        waiting = {worker for worker in self._arrived.values() if worker in self._in_progress} - {without}
        self._unrecorded.add(self.done)
        for worker in waiting:
            self._recording.setdefault(worker, set()).add(self.done)
        self._is_open, self.closer = False, None
        self._arrived.clear()
        self.done += 1

    def claim_unrecorded(self, worker: int) -> list[int]:
        """Return the steps that are over and that no other worker will record: this worker has to."""
        passed_over = self._unrecorded.difference(*self._recording.values())
        if passed_over:
            self._recording.setdefault(worker, set()).update(passed_over)
        return sorted(passed_over)

    def recorded(self, worker: int) -> None:
        """What this worker had to record is in its step log."""
        self._unrecorded -= self._recording.pop(worker, set())

    def saved(self, number: int) -> None:
        """The state before this batch is saved: the batch may begin."""
        self._saves.discard(number)

    def request_pause(self) -> None:
        """Make all workers pause."""
        self._is_pause_requested = True

    def lost(self, worker: int) -> None:
        """A worker takes no more shares; its share that has arrived counts. There are no more pauses, and without the
        writer nothing is saved any more."""
        self._has_lost = True
        self._num_present -= 1
        if worker == self._writer:
            self._saves.clear()
        if self.closer == worker:
            self.settle(without=worker)
        self.returned(worker)
        self._close_if_due()

    def _assign(self, worker: int) -> BackupShare | None:
        if self.closer is not None or self._num_assigned == self._count:
            return None
        share = self._in_progress[worker] = BackupShare(self.done, self._num_assigned, self._count)
        self._num_assigned += 1
        return share

    def _close_if_due(self) -> None:
        if not self._is_open or self.closer is not None:
            return
        num_needed = max(1, min(self._count, self._num_present) - self._drop)
        is_awaited = self._num_assigned < self._count or any(
            share.number == self.done and share.index not in self._arrived for share in self._in_progress.values()
        )
        if len(self._arrived) < num_needed and is_awaited:
            return
        here = [worker for worker in self._arrived.values() if worker in self._in_progress]
        if here:
            self.closer = here[-1]
        elif not is_awaited:  # no worker is left to finish it
            self.settle()

    def _is_pause_due(self) -> bool:
        return self._is_pause_requested and not self._has_lost and self._paused_at < self.done < self._limit
