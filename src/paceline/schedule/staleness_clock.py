"""Bounded staleness (stale synchronous parallel): which worker gets which batch, and when its update counts. No I/O.

Batches are handed out in order, on request. A worker computes its batch on weights that contain at least `base`
updates: those that were done when it got the batch. Updates are then *permitted* one after the other, and an update is
*done* when all servers have it. Its worker *records* it in its step log. Until then the state is not saved, and the
stream is not over. So a resumed run finds every update in some log.

The staleness of an update is the number of other updates that are not in its base and may have reached a server before
it. An update that is permitted while another one is being sent may overtake it. So the staleness is known only when the
update is done:

    behind = permitted until it is done, except itself - base <= staleness

Two conditions ensure this. First, the batches in progress could be permitted in the order of their bases, each when the
one before is done, without exceeding the bound. A new batch is handed out, and a permission given, only if that holds
afterwards. Second, no update that is being sent would exceed the bound if one more overtook it; otherwise that one
waits until the first is done. The worker with the oldest base can be permitted when no update is being sent. So there
is no deadlock unless that worker computes or sends forever.

Workers join and leave. If one is *lost*, its batch is handed out again, even if its update was permitted but is not
done: some servers may have it. What was permitted stays permitted, and counts in every distance. So the bound holds on
all servers, whether they have that update or not.

A worker may request that all workers *pause*. Then no more batches are handed out. When all workers have asked for a
batch, so that none has one, each is told to pause. If all batches are handed out already, the workers meet at the end,
and a request changes nothing. The same holds if a worker has left the loop, because it would not come. At least one
batch is handed out between two pauses, so repeated requests do not keep the workers from their work.

The worker that saves keeps its place among those that wait for a batch. Otherwise the others, which wait meanwhile,
would take all batches up to the next save each time, where saves are close together.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["AsyncBatch", "AsyncStream", "Pause", "Save", "StalenessClock", "StreamEnd"]


@dataclasses.dataclass(frozen=True, slots=True)
class AsyncBatch:
    """A batch, by its number, and how many updates the weights for it must contain."""

    number: int
    base: int


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """All batches before this number are done, and no other one has begun: the state is that of a step."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """All workers get this answer, because one of them has requested it; all batches before this number are done."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class StreamEnd:
    """All batches are done; `has_left`: not all workers have stayed until then."""

    has_left: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AsyncStream:
    """A stream whose batches are handed out: how many, to which workers at first, and before which the state is saved.

    Its batch 0 is that of `step` + 1, at (epoch, position): the stream's position when the loop began.
    """

    stream: str
    limit: int
    workers: tuple[int, ...]
    saves: tuple[int, int, int]  # as a range
    step: int
    epoch: int
    position: int

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, told: Mapping[str, Any]) -> AsyncStream:
        """Read it back, from JSON as well; raise KeyError or TypeError if it is something else."""
        begin, end, every = told["saves"]
        return cls(
            stream=str(told["stream"]),
            limit=int(told["limit"]),
            workers=tuple(told["workers"]),
            saves=(int(begin), int(end), int(every)),
            step=int(told["step"]),
            epoch=int(told["epoch"]),
            position=int(told["position"]),
        )


class StalenessClock:
    """Hands out `limit` batches to these workers, and to those that join. Before a batch in `saves`, all earlier ones
    are done and recorded, and the first worker present saves."""

    def __init__(self, *, staleness: int | None, limit: int, workers: Iterable[int], saves: Iterable[int] = ()) -> None:
        self.permitted = self.done = 0  # updates; permitted updates of lost workers count as done
        self._staleness, self._limit = staleness, limit
        self._workers, self._saves = set(workers), set(saves)
        self._next = 0
        self._returned: list[int] = []  # batches of workers that were lost, a heap
        self._in_progress: dict[int, AsyncBatch] = {}  # by worker
        self._applying: dict[int, AsyncBatch] = {}  # permitted, and not done
        self._unrecorded: set[int] = set()  # workers whose batch is done, and perhaps not in their step log yet
        self._saving: int | None = None  # the worker that saves
        self._has_saved: int | None = None  # the worker that saved last, until it gets a batch
        self._since: dict[int, int] = {}  # worker -> since when it waits for a batch, as a number in order
        self._num_waits = 0
        self._is_pause_requested = self._has_left = False
        self._paused_at = 0  # the last pause was before the batch of this number
        self.is_over = False  # some worker got that answer
        self._awaited: set[int] = set()  # joined, but without a request so far: the end waits for them
        self._ready_to_pause: set[int] = set()  # workers that wait for a pause
        self._pausing: set[int] = set()  # workers still to be told to pause, after all have come
        self._paused: set[int] = set()  # told to pause, and without a request since: no batch is handed out before

    @property
    def is_idle(self) -> bool:
        """Whether no batch is in progress, and everything that is done is recorded."""
        return not self._in_progress and not self._applying and not self._unrecorded

    @property
    def workers(self) -> frozenset[int]:
        """The workers that take batches."""
        return frozenset(self._workers)

    @property
    def num_begun(self) -> int:
        """How many batches have begun; if none is in progress, all of them are done."""
        return self._next

    def join(self, worker: int) -> None:
        """A worker has joined, and will ask for batches."""
        self._workers.add(worker)
        self._awaited.add(worker)

    def returned(self, worker: int) -> None:
        """A worker has no batch, and is about to ask for one."""
        self._in_progress.pop(worker, None)
        self._awaited.discard(worker)
        self._paused.discard(worker)

    def ask(self, worker: int) -> AsyncBatch | Save | Pause | StreamEnd | None:
        """Return what a worker without a batch does next; None: it waits."""
        self.returned(worker)
        if worker not in self._since:
            self._since[worker] = self._num_waits
            self._num_waits += 1
        number = self._returned[0] if self._returned else self._next
        if self._is_pause_due():
            self._ready_to_pause.add(worker)
            if not self._ready_to_pause >= self._workers:
                return None
            self._pausing, self._ready_to_pause = self._ready_to_pause, set()
            self._is_pause_requested, self._paused_at = False, number
        if worker in self._pausing:
            self._pausing.remove(worker)
            self._paused.add(worker)
            return Pause(number)
        if self._pausing or self._paused:
            return None
        if number in self._saves:
            if not self.is_idle or self._saving is not None or worker != min(self._workers):
                return None
            self._saving = worker
            return Save(number)
        if number == self._limit:
            self.is_over = self.is_idle and (self.is_over or not self._awaited)
            return StreamEnd(self._has_left) if self.is_over else None
        batch = AsyncBatch(number, self.done)
        if self._is_for_saver(worker) or not self._would_hold([*self._in_progress.values(), batch], self.permitted):
            return None
        if self._returned:
            heapq.heappop(self._returned)
        else:
            self._next += 1
        self._in_progress[worker] = batch
        self._ready_to_pause.discard(worker)
        self._stops_waiting(worker)
        return batch

    def recorded(self, worker: int) -> None:
        """What this worker has done is in its step log."""
        self._unrecorded.discard(worker)

    def saved(self, number: int) -> None:
        """The state before this batch is saved: the batch may begin."""
        self._saves.discard(number)
        self._saving, self._has_saved = None, self._saving

    def request_pause(self) -> None:
        """Make all workers pause."""
        self._is_pause_requested = True

    def permit(self, worker: int) -> int | None:
        """Let a worker's update be applied; return its staleness if no update overtakes it. None: it has to wait."""
        others = [batch for one, batch in self._in_progress.items() if one != worker]
        if not self._would_hold(others, self.permitted + 1) or self._would_overtake_too_many():
            return None
        batch = self._applying[worker] = self._in_progress.pop(worker)
        self.permitted += 1
        return self.permitted - 1 - batch.base

    def finish(self, worker: int) -> int:
        """A permitted update is in all weights that are sent from now on; return its staleness, at most."""
        batch = self._applying.pop(worker)
        self._unrecorded.add(worker)
        self.done += 1
        return self.permitted - 1 - batch.base

    def skip(self, worker: int) -> None:
        """A worker's batch has no update, because its gradient was not to be used."""
        del self._in_progress[worker]
        self._unrecorded.add(worker)

    def lost(self, worker: int) -> None:
        """A worker was lost: its batch is handed out again."""
        in_hand = self._in_progress.pop(worker, None)
        if worker in self._applying:
            in_hand = self._applying[worker]
            self.finish(worker)
        for workers in (
            self._workers,
            self._awaited,
            self._ready_to_pause,
            self._pausing,
            self._paused,
            self._unrecorded,
        ):
            workers.discard(worker)
        self._stops_waiting(worker)
        if worker == self._saving:
            self._saving = None
        if in_hand is not None:
            heapq.heappush(self._returned, in_hand.number)

    def left(self, worker: int) -> None:
        """A worker has left the loop, and the others take the remaining batches. From now on there are no pauses; if it
        was the writer, nothing is saved any more."""
        self._has_left = True
        if worker == min(self._workers):
            self._saves.clear()
        self.lost(worker)

    def _stops_waiting(self, worker: int) -> None:
        self._since.pop(worker, None)
        if worker == self._has_saved:
            self._has_saved = None

    def _is_for_saver(self, worker: int) -> bool:
        """Whether only one batch is left before the next save, and the worker that saved last waits longer for it."""
        saver = self._has_saved
        if saver is None or self._since[worker] <= self._since[saver]:
            return False
        follows = self._next + (not self._returned)
        return len(self._returned) <= 1 and follows in self._saves

    def _is_pause_due(self) -> bool:
        """Whether to pause before the next batch. Returned batches come first, so that all before it are done."""
        is_between = self._paused_at < self._next < self._limit
        return self._is_pause_requested and not self._has_left and not self._returned and is_between

    def _would_overtake_too_many(self) -> bool:
        """Whether an update that is being sent would exceed the bound if one more were permitted, and overtook it."""
        if self._staleness is None:
            return False
        return any(self.permitted - batch.base > self._staleness for batch in self._applying.values())

    def _would_hold(self, batches: list[AsyncBatch], permitted: int) -> bool:
        """Whether these batches could be permitted after `permitted` updates, in the order of their bases."""
        if self._staleness is None:
            return True
        bases = sorted(batch.base for batch in batches)
        return all(permitted + place - base <= self._staleness for place, base in enumerate(bases))
