"""Who may take which batch, and when its update counts, where replicas do not wait for each other: data, and no I/O.

Batches are dealt in order, to whoever asks. Who has one holds a *turn*: it computes on weights that contain at least
`base` updates, those that were done when it was dealt. Its update is then *permitted*, one after the other, and *done*
when all servers have it. Its worker *notes* that in its books, and until then the state is not saved, nor are batches
over: whoever goes on from there finds every one in some book. An update is behind by those that are not in its base and
may have come to a server before it. One that is permitted while it is on its way may overtake it, so that is known when
it is done:

    behind = permitted until it is done, but for itself - base <= staleness

That is kept by two conditions. The turns under way could be permitted in the order of their bases, each when the one
before is done, without breaking it: a new turn is dealt, and a permission given, only where that holds afterwards. And
no update on its way would be too far behind if one more overtook it, or else that one waits until it is done. Who has
the oldest base can be permitted when nothing is on its way, so nobody waits for ever unless the oldest one computes, or
sends, for ever.

Workers come and go. Where one is *lost*, its batch is dealt again, also where its update was permitted and is not done:
some servers may have it. What was permitted stays permitted, and counts in every distance: so the bound holds on each
of the servers, on those that have it and on those that have it not.

A worker may *wish* that all come together. Then nothing more is dealt, and when all have asked for a batch, so that
nobody has one in hand, each is told to *pause*. Where all batches are dealt they come together at the end, and a wish
changes nothing; neither does it where one of them has left the loop, who would not come. Between two pauses a batch is
dealt: a wish that comes to nothing, again and again, does not keep all from their work.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["DealtBatch", "DealtStream", "Pause", "Save", "StalenessClock", "StreamEnd"]


@dataclasses.dataclass(frozen=True, slots=True)
class DealtBatch:
    """A batch, by its number, and how many updates the weights for it must contain."""

    number: int
    base: int


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """All batches before this number are done, and no other one has begun: the state is that of a step."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """All workers are told this, because one of them has wished it; all batches before this number are done."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class StreamEnd:
    """All batches are done; `has_left`: not all workers have stayed until then."""

    has_left: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DealtStream:
    """A stream whose batches are dealt: how many there are, to whom at first, and before which the state is saved.

    Its batch 0 is that of `step` + 1, at (epoch, position): where it stood when the loop began.
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
    def from_plain(cls, told: Mapping[str, Any]) -> DealtStream:
        """Read it back, from JSON as well; raises KeyError or TypeError where it is not one."""
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
    """Deals `limit` batches to these workers, and to who joins. Before those in `saves` all others are done and noted,
    and the first worker that is there saves."""

    def __init__(self, *, staleness: int | None, limit: int, workers: Iterable[int], saves: Iterable[int] = ()) -> None:
        self.permitted = self.done = 0  # updates; what was permitted to who is lost is done
        self._staleness, self._limit = staleness, limit
        self._workers, self._saves = set(workers), set(saves)
        self._next = 0
        self._again: list[int] = []  # batches of workers that were lost, a heap
        self._turns: dict[int, DealtBatch] = {}  # under way, by worker
        self._applying: dict[int, DealtBatch] = {}  # permitted, and not done
        self._noting: set[int] = set()  # whose batch is done, and may not be in their books yet
        self._saving: int | None = None  # who is at it
        self._is_wished = self._has_left = False
        self._paused_at = 0  # the last time, before the batch of this number
        self.is_over = False  # somebody was told so
        self._awaited: set[int] = set()  # who has joined, and not asked yet: nobody comes to the end before
        self._coming: set[int] = set()  # who waits for a pause
        self._pausing: set[int] = set()  # who is to be told of it: all have come
        self._paused: set[int] = set()  # who was told, and has not asked since: until all have, nothing is dealt

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and everything that is done is noted."""
        return not self._turns and not self._applying and not self._noting

    @property
    def workers(self) -> frozenset[int]:
        """Who takes batches."""
        return frozenset(self._workers)

    @property
    def num_dealt(self) -> int:
        """How many batches have begun; where nothing is under way, all of them are done."""
        return self._next

    def join(self, worker: int) -> None:
        """A worker has come, and will ask."""
        self._workers.add(worker)
        self._awaited.add(worker)

    def returned(self, worker: int) -> None:
        """A worker has nothing in hand, and is going to ask."""
        self._turns.pop(worker, None)
        self._awaited.discard(worker)
        self._paused.discard(worker)

    def ask(self, worker: int) -> DealtBatch | Save | Pause | StreamEnd | None:
        """What a worker that has nothing in hand is to do next; None: it is to wait."""
        self.returned(worker)
        number = self._again[0] if self._again else self._next
        if self._is_pause_due():
            self._coming.add(worker)
            if not self._coming >= self._workers:
                return None
            self._pausing, self._coming = self._coming, set()
            self._is_wished, self._paused_at = False, number
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
        turn = DealtBatch(number, self.done)
        if not self._would_hold([*self._turns.values(), turn], self.permitted):
            return None
        if self._again:
            heapq.heappop(self._again)
        else:
            self._next += 1
        self._turns[worker] = turn
        self._coming.discard(worker)
        return turn

    def noted(self, worker: int) -> None:
        """What this worker has done is in its books."""
        self._noting.discard(worker)

    def saved(self, number: int) -> None:
        """The state before this batch is kept: it may begin."""
        self._saves.discard(number)
        self._saving = None

    def wish(self) -> None:
        """A worker wants all to pause."""
        self._is_wished = True

    def permit(self, worker: int) -> int | None:
        """Let a worker's update be applied; returns how far it is behind if none overtakes it. None: it is to wait."""
        others = [turn for one, turn in self._turns.items() if one != worker]
        if not self._would_hold(others, self.permitted + 1) or self._would_overtake_too_many():
            return None
        turn = self._applying[worker] = self._turns.pop(worker)
        self.permitted += 1
        return self.permitted - 1 - turn.base

    def finish(self, worker: int) -> int:
        """A permitted update is in all weights that are told from now on; returns how far it is behind, at most."""
        turn = self._applying.pop(worker)
        self._noting.add(worker)
        self.done += 1
        return self.permitted - 1 - turn.base

    def skip(self, worker: int) -> None:
        """A worker's batch brings no update: its gradient was not to be used."""
        del self._turns[worker]
        self._noting.add(worker)

    def lost(self, worker: int) -> None:
        """A worker is there no longer. What it had in hand is dealt again."""
        in_hand = self._turns.pop(worker, None)
        if worker in self._applying:
            in_hand = self._applying[worker]
            self.finish(worker)
        for workers in (self._workers, self._awaited, self._coming, self._pausing, self._paused, self._noting):
            workers.discard(worker)
        if worker == self._saving:
            self._saving = None
        if in_hand is not None:
            heapq.heappush(self._again, in_hand.number)

    def left(self, worker: int) -> None:
        """A worker has left the loop, and the others take the batches that are left. From now on there are no pauses;
        where it was the writer, nothing is saved any more."""
        self._has_left = True
        if worker == min(self._workers):
            self._saves.clear()
        self.lost(worker)

    def _is_pause_due(self) -> bool:
        """Whether the next batch is not to be dealt. One that is dealt again comes before: all are done up to it."""
        is_between = self._paused_at < self._next < self._limit
        return self._is_wished and not self._has_left and not self._again and is_between

    def _would_overtake_too_many(self) -> bool:
        """Whether an update on its way would be too far behind if one more were permitted, and came first."""
        if self._staleness is None:
            return False
        return any(self.permitted - turn.base > self._staleness for turn in self._applying.values())

    def _would_hold(self, turns: list[DealtBatch], permitted: int) -> bool:
        """Whether these turns could be permitted after so many updates, in the order of their bases."""
        if self._staleness is None:
            return True
        bases = sorted(turn.base for turn in turns)
        return all(permitted + place - base <= self._staleness for place, base in enumerate(bases))
