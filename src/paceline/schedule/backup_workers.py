"""Who may take which share of a batch, and when its update is made, where the slowest replicas are left out: no I/O.

Backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD"): steps come one after the other, and each
is cut into as many shares as there are replicas, which go to whoever asks. When all but `drop` of them have arrived,
the step is *closed*: these are the *chosen* ones, and the replica that came last of them, its *closer*, has the
servers take the step. Then it is over, and the next one begins, whoever still computes on a share of an old one: that
share is late, and is thrown away.

A short batch may have fewer micro-batches than there are replicas, and so fewer shares: of these all but `drop` are
waited for, too, and one at least. Shares that nobody computes, because their workers have left the loop or passed over
a batch, are not waited for. Where that are all of a step, it has no update. A step that is over, and that nobody has
noted who could, is for the next one who asks to note.

Saves come between two steps, when all who were chosen have noted theirs, and so does the end. Pauses do, too, which a
worker may *wish* (`paceline.schedule.staleness_clock` says what they are): all come to them, the late ones when they
are done with what they have in hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from paceline.schedule.staleness_clock import DealtStream, Pause, Save, StreamEnd

__all__ = ["BackupClock", "BackupShare", "DealtShares", "num_micro_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class BackupShare:
    """Part `index` of the `count` into which the micro-batches of a batch, by its number, are dealt."""

    number: int
    index: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DealtShares(DealtStream):
    """A stream of whose batches shares are dealt: how many steps its first epoch has left and each later one has, and
    how many micro-batches a step has, the last one of the first epoch, and of a later one."""

    epochs: tuple[int, int]
    micros: tuple[int, int, int]


def num_micro_of(number: int, *, epochs: Sequence[int], micros: Sequence[int]) -> int:
    """Return how many micro-batches a batch has, by its number; `epochs` and `micros` as in `DealtShares`."""
    first, later = epochs
    full, first_last, last = micros
    if number < first:
        return first_last if number == first - 1 else full
    return last if (number - first) % later == later - 1 else full


class BackupClock:
    """Deals the shares of `limit` batches to so many workers. `num_micro(number)` is how many micro-batches one has.

    Before those in `saves` all others are done and noted, and `writer` saves.
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
        self.done = 0  # steps that are over; the number of the one under way
        self.closer: int | None = None  # the worker that is to finish it
        self._drop, self._limit, self._workers, self._writer = drop, limit, workers, writer
        self._num_micro, self._saves = num_micro, set(saves)
        self._num_present = workers
        self._is_open = False  # the step has begun
        self._count = self._num_dealt = 0  # of its shares
        self._arrived: dict[int, int] = {}  # share -> worker, in the order of their coming
        self._turns: dict[int, BackupShare] = {}  # what each worker has in hand, of whatever step
        self._noting: dict[int, set[int]] = {}  # by worker: steps that are over, and may not be in its books yet
        self._unnoted: set[int] = set()  # steps that are over, and may be in nobody's books
        self._is_wished = self._has_lost = False
        self._paused_at = 0
        self._coming: set[int] = set()  # who waits for a pause
        self._pausing: set[int] = set()  # who is to be told of it: all have come

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way. Late shares of old ones may be."""
        return not self._is_open

    @property
    def chosen(self) -> tuple[int, ...]:
        """The shares that have arrived in time, in order."""
        return tuple(sorted(self._arrived))

    @property
    def oldest(self) -> int:
        """The oldest step of which somebody may still ask how it ended."""
        return min((share.number for share in self._turns.values()), default=self.done)

    def ask(self, worker: int) -> BackupShare | Save | Pause | StreamEnd | None:
        """What a worker is to do next; None: it is to wait. What it had in hand before it is done with."""
        self.returned(worker)
        if worker in self._pausing:
            self._pausing.remove(worker)
            return Pause(self.done)
        if self._is_open:
            return self._deal(worker)
        if self._is_pause_due():
            self._coming.add(worker)
            if len(self._coming) < self._workers:
                return None
            self._pausing, self._coming = self._coming - {worker}, set()
            self._is_wished, self._paused_at = False, self.done
            return Pause(self.done)
        if self.done in self._saves:
            return Save(self.done) if worker == self._writer and not self._noting else None
        if self.done == self._limit:
            return None if self._noting else StreamEnd(self._has_lost)
        self._is_open, self._num_dealt = True, 0
        self._count = min(self._num_micro(self.done), self._num_present)
        return self._deal(worker)

    def returned(self, worker: int) -> None:
        """A worker is going to ask. It is done with its share; where that has not arrived nobody waits for it any more.
        What it has not noted, others are to note."""
        self._noting.pop(worker, None)
        if self._turns.pop(worker, None) is not None:
            self._close_if_due()

    def arrive(self, worker: int) -> BackupShare | None:
        """A worker's gradients are on all servers; returns its share, or None where that is late."""
        share = self._turns[worker]
        if share.number != self.done or self.closer is not None:
            return None
        self._arrived[share.index] = worker
        self._close_if_due()
        return share

    def settle(self, *, without: int | None = None) -> None:
        """The step under way is over, whether there was an update or not. `without`: a worker that will not note it."""
        waiting = {worker for worker in self._arrived.values() if worker in self._turns} - {without}
        self._unnoted.add(self.done)
        for worker in waiting:
            self._noting.setdefault(worker, set()).add(self.done)
        self._is_open, self.closer = False, None
        self._arrived.clear()
        self.done += 1

    def take_passed_over(self, worker: int) -> list[int]:
        """Return the steps that are over and that nobody else is going to note: this worker is to."""
        passed_over = self._unnoted.difference(*self._noting.values())
        if passed_over:
            self._noting.setdefault(worker, set()).update(passed_over)
        return sorted(passed_over)

    def noted(self, worker: int) -> None:
        """What this worker was to note is in its books."""
        self._unnoted -= self._noting.pop(worker, set())

    def saved(self, number: int) -> None:
        """The state before this batch is kept: it may begin."""
        self._saves.discard(number)

    def wish(self) -> None:
        """A worker wants all to pause."""
        self._is_wished = True

    def lost(self, worker: int) -> None:
        """A worker takes no more shares; what has arrived of it counts. Without the writer nothing is saved any more,
        and there are no pauses."""
        self._has_lost = True
        self._num_present -= 1
        if worker == self._writer:
            self._saves.clear()
        if self.closer == worker:
            self.settle(without=worker)
        self.returned(worker)
        self._close_if_due()

    def _deal(self, worker: int) -> BackupShare | None:
        if self.closer is not None or self._num_dealt == self._count:
            return None
        share = self._turns[worker] = BackupShare(self.done, self._num_dealt, self._count)
        self._num_dealt += 1
        return share

    def _close_if_due(self) -> None:
        if not self._is_open or self.closer is not None:
            return
        num_needed = max(1, min(self._count, self._num_present) - self._drop)
        is_awaited = self._num_dealt < self._count or any(
            share.number == self.done and share.index not in self._arrived for share in self._turns.values()
        )
        if len(self._arrived) < num_needed and is_awaited:
            return
        here = [worker for worker in self._arrived.values() if worker in self._turns]
        if here:
            self.closer = here[-1]
        elif not is_awaited:  # nobody is left who could finish it
            self.settle()

    def _is_pause_due(self) -> bool:
        return self._is_wished and not self._has_lost and self._paused_at < self.done < self._limit
