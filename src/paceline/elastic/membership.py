"""Which replicas take part in a run: a state machine that is told what happened, and says what to do about it.

A *generation* is a set of replicas that take steps together; each change of the set is a new one, with a higher number.
Its workers vote at the end of every step, so a step is committed by all members of a generation or by none, and since
only one place hands out generations, two groups never both commit a step.

    starting --ready--> waiting --(planned generation)--> member --(to go)--> leaving --(planned one without it)--> gone
       ^                                                    |  |
       `-----(loss before it is known to have the state)----'  `--(end of its program)--> done

A death forms a generation *at once*: the members drop the step under way and take it again. Everything else (a replica
that joins, one that leaves) is *planned*: it happens between two steps, after which a newcomer is sent the state. Until
it says that it has got it, it is not counted on: after a loss it has to say first which of the two it is.

Nothing here does I/O or looks at a clock: whoever calls tells the time, and carries out the decisions that come back.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from paceline.elastic.decisions import Decision, EndWorker, GiveUp, Limits, StartReplica
from paceline.elastic.hearing import Hearing
from paceline.elastic.notices import AT_ONCE, PREEMPTED, TOO_FEW, Finish, Form
from paceline.elastic.trouble import Trouble

__all__ = ["Decision", "EndWorker", "GiveUp", "Limits", "Membership", "StartReplica"]

QUICK_STARTS = 3  # replacements in a row that died before they took a step; then there are pauses
PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


class State(enum.Enum):
    STARTING = "starting"  # on its way, or thrown back: it has to say that it has no state, and waits
    WAITING = "waiting"  # at its first step, and wants to be taken in
    MEMBER = "member"
    LEAVING = "leaving"  # a member that wants to go, or has to
    DONE = "done"  # its program has come to its end, and so have the others' soon


@dataclasses.dataclass(slots=True)
class Replica:
    """What is known of one."""

    workers: tuple[int, ...]
    state: State
    is_proven: bool  # it has taken a step, or the run began with it
    must_leave: bool = False  # asked from outside: it will be gone soon
    ready: set[int] = dataclasses.field(default_factory=set[int])  # workers of a starting one that have said so
    since: int = AT_ONCE  # what they said before they knew of this generation does not count
    ended: set[int] = dataclasses.field(default_factory=set[int])  # workers that have ended in good order


class Membership:
    """Decides. Every method returns what is to be done, in this order."""

    def __init__(self, limits: Limits, *, replicas: int, now: float) -> None:
        """All `replicas` that a run begins with are members of generation 0."""
        self.limits = limits
        self.target = replicas
        self._replicas = {
            number: Replica(self._workers_of(number), State.MEMBER, is_proven=True) for number in range(replicas)
        }
        everybody = tuple(worker for replica in self._replicas.values() for worker in replica.workers)
        self.form = Form(generation=0, members=everybody, planned=False, holds=False, reason="the run begins")
        self._members = frozenset(everybody)  # of the newest generation
        self._missing = set(everybody)  # of them, have not joined it
        self._active = set(everybody)  # workers that are known to have the run's state
        self._left_out: frozenset[int] = frozenset()
        self._now = now
        self._hearing = Hearing(limits)
        for worker in everybody:
            self._hearing.expect(worker, now)
        self._trouble = Trouble()
        self._form_by: float | None = None  # generation 0 takes as long as the users' imports
        self._short_since: float | None = None
        self._failed_starts = 0
        self._pause_until = now
        self._finish: Finish | None = None
        self._is_over = False  # nobody joins any more

    # What is known.

    @property
    def generation(self) -> int:
        return self.form.generation

    @property
    def is_formed(self) -> bool:
        """Whether all members of the newest generation have joined it."""
        return not self._missing

    @property
    def num_members(self) -> int:
        """Replicas that take steps, or will with the next generation."""
        return len(self._in(State.MEMBER))

    @property
    def num_workers(self) -> int:
        """Workers that the run has when it has all the replicas that it wants."""
        return self.target * self.limits.workers_each

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers that are there, in whatever state."""
        return tuple(
            worker for replica in self._replicas.values() for worker in replica.workers if worker not in replica.ended
        )

    @property
    def left_out(self) -> frozenset[int]:
        """Workers that are not in the newest generation, but have to know of it: it replaces what they were told."""
        return self._left_out

    @property
    def leaving_workers(self) -> frozenset[int]:
        return self._left_out

    @property
    def ending(self) -> Finish | None:
        """What everybody was told, once the run is to end."""
        return self._finish

    def would_form(self, worker: int, generation: int) -> bool:
        """Whether this worker is the last that the newest generation waits for."""
        return generation == self.generation and not self._missing - {worker}

    def is_member(self, worker: int) -> bool:
        return worker in self._members

    # What workers say.

    def heard(self, worker: int, now: float) -> None:
        """A worker has said something."""
        self._now = now
        self._hearing.heard(worker, now)

    def ready(self, worker: int, now: float, *, generation: int = AT_ONCE) -> list[Decision]:
        """A worker has not the run's state, and waits to be taken in. `generation`: the newest that it has heard of."""
        self.heard(worker, now)
        number, replica = self._replica_of(worker)
        if replica is None or generation < replica.since:
            return []
        if replica.state is State.MEMBER and not self.form.planned and generation == self.generation:
            # It was taken for one that has the state, since nobody else was left.
            reason = f"replica {number} has not got the state"
            replica.state, replica.since, replica.ready = State.STARTING, generation, {worker}
            return self._interrupt(set(replica.workers), reason)
        if replica.state is not State.STARTING:
            return []
        replica.ready.add(worker)
        if replica.ready < set(replica.workers):
            return []
        replica.state = State.WAITING
        return self._plan()

    def formed(self, worker: int, generation: int, now: float) -> list[Decision]:
        """A worker has joined a generation, and has the run's state."""
        self.heard(worker, now)
        if generation != self.generation or worker not in self._missing:
            return []
        self._missing.discard(worker)
        self._active.add(worker)
        if self._missing:
            if self._form_by is None:  # a planned one begins after the step under way, however long that takes
                waits_s = self.limits.handing_s if self._pending() else self.limits.forming_s
                self._form_by = now + waits_s
            return []
        self._active &= self._members
        self._form_by = None
        self._trouble.formed(generation, planned=self.form.planned)
        if not self.form.holds:
            self._short_since = None
        return self._plan()

    def committed(self, worker: int, now: float) -> None:
        """A worker has committed a step of the newest generation."""
        self.heard(worker, now)
        _, replica = self._replica_of(worker)
        if replica is None or worker not in self._active:
            return
        self._trouble.committed()
        if not replica.is_proven:
            replica.is_proven = True
            self._failed_starts, self._pause_until = 0, now

    def stuck(self, worker: int, generation: int, now: float, *, peer: int | None = None) -> list[Decision]:
        """A transfer of a generation has failed for a worker, though it knows of no newer one. `peer`: with whom.

        Mostly a death is behind it, which is heard of within moments. Where it is not, `tick` has the same members form
        again, over new connections, and the second time in a row gives one of them up.
        """
        self.heard(worker, now)
        is_concerned = worker in self._members or worker in self._active
        if is_concerned and not self.form.interrupts(generation):
            self._trouble.report(worker, generation, peer, now)
        return []

    # What happens to workers.

    def lost(self, workers: Iterable[int], now: float, *, reason: str, replace: bool = True) -> list[Decision]:
        """Workers are gone or not to be trusted any more: their replicas are. They may be of several replicas at once.

        `replace`: whether replacements may be started (not where their place went with them: the run is smaller then).
        """
        self._now = now
        known = set(workers)
        ends: list[Decision] = []
        gone: set[int] = set()
        for number in sorted({worker // self.limits.workers_each for worker in known} & self._replicas.keys()):
            replica = self._replicas[number]
            first = min(known.intersection(replica.workers))
            ends += self._remove(number, f"replica {number} has lost worker {first}", besides=known)
            gone.update(replica.workers)
            if not replica.is_proven:
                self._note_failed_start(now)
            if not replace and replica.state is not State.LEAVING:
                self.target -= 1
        return [*ends, *self._without(gone, reason), *self._refill()]

    def ended(self, worker: int, now: float) -> list[Decision]:
        """A worker has ended in good order: it left, as it was to, or its program has come to its end."""
        self._now = now
        number, replica = self._replica_of(worker)
        if replica is None:
            return []
        self._hearing.forget(worker)
        replica.ended.add(worker)
        if replica.state is State.LEAVING:
            return self._left(number, replica, worker)
        if replica.state in (State.STARTING, State.WAITING):
            # It had got the state, but the others had to go on without it; or it wants to take no steps.
            reason = f"worker {worker} of replica {number} has left"
            ends = self._remove(number, reason)
            if not replica.is_proven:
                self._note_failed_start(now)
            return [*ends, *self._refill()]
        return self._done(replica, worker)

    def leaving(self, worker: int, now: float) -> list[Decision]:
        """A worker was asked to go, from outside: its replica leaves between two steps, if enough are left."""
        self.heard(worker, now)
        number, replica = self._replica_of(worker)
        if replica is None or self._finish is not None or replica.must_leave or replica.state is State.DONE:
            return []
        reason = f"worker {worker} was asked to leave"
        if replica.state is not State.LEAVING:
            if not self._has_state(replica):
                self.target = max(self.limits.least, self.target - 1)
                return [*self._remove(number, reason), *self._without(set(replica.workers), reason), *self._refill()]
            if self.num_members - 1 < self.limits.least:
                return self.finish(PREEMPTED, reason)
            self.target = max(self.limits.least, self.target - 1)
        replica.state, replica.must_leave = State.LEAVING, True
        return self._preempted() or self._plan()

    # What is wanted of all.

    def resize(self, replicas: int, now: float) -> list[Decision]:
        """Go on with so many replicas; raises ValueError where the plan does not allow it, or the run ends."""
        self._now = now
        if not self.limits.least <= replicas <= self.limits.most:
            raise ValueError(
                f"the plan allows {self.limits.least} to {self.limits.most} replicas, so the run cannot be resized to "
                f"{replicas}"
            )
        if self._is_over:
            raise ValueError(f"the run is about to end, so it cannot be resized to {replicas} any more")
        self.target = replicas
        self._failed_starts, self._pause_until = 0, now
        numbers = self._in(State.STARTING, State.WAITING, State.MEMBER)
        numbers.sort(key=lambda number: (self._has_state(self._replicas[number]), -number))
        decisions: list[Decision] = []
        gone: set[int] = set()
        for number in numbers[: max(0, len(numbers) - replicas)]:
            if self._has_state(self._replicas[number]):
                self._replicas[number].state = State.LEAVING
            else:
                gone.update(self._replicas[number].workers)
                decisions += self._remove(number, f"the run was made smaller ({replicas} replicas)")
        return [*decisions, *(self._without(gone, f"resized to {replicas}") or self._plan()), *self._refill()]

    def finish(self, exit_code: int, reason: str) -> list[Decision]:
        """Everybody saves and leaves; said once."""
        if self._finish is not None:
            return []
        self._finish = Finish(exit_code=exit_code, reason=reason)
        return [*self._turn_away(reason), self._finish]

    def tick(self, now: float) -> list[Decision]:
        """Time passes. What is overdue is dealt with one at a time."""
        self._now = now
        away_s = self._hearing.listen(now)
        if away_s and self._form_by is not None:
            self._form_by += away_s
        silent = self._hearing.silent(now)
        if silent:
            return self._fence(silent)
        if self._form_by is not None and now > self._form_by:
            late = {w for w in self._missing if self._hearing.is_known_for(w, self.limits.forming_s, now)}
            if late:
                return self._mend(late, "in time")
        if self._trouble.is_overdue(now, self.limits.stuck_s):
            return self._mend(set(), "or broke up, though nobody died")
        if self._short_since is not None and now - self._short_since > self.limits.patience_s:
            self._short_since = None
            few = f"{self.num_members} of at least {self.limits.least} replicas were left"
            return self.finish(TOO_FEW, f"{few} for {self.limits.patience_s:.0f} s")
        return self._refill()

    # How a change is made.

    def _plan(self) -> list[Decision]:
        """A generation with all who wait and without all who leave, between two steps; once the newest is formed."""
        if self._is_over or self._missing:
            return []  # `formed` looks again
        wanted = self._wanted()
        joins, leaves = wanted - self._members, self._members - wanted
        if not joins and not leaves:
            return []
        parts = [f"{_named(self._numbers(joins))} joins"] if joins else []
        parts += [f"{_named(self._numbers(leaves))} leaves"] if leaves else []
        return [self._form_planned(", ".join(parts), after=self.generation)]

    def _form_planned(self, reason: str, *, after: int) -> Form:
        wanted = self._wanted()
        for replica in self._replicas.values():
            if replica.state is State.WAITING:
                replica.state = State.MEMBER
        self._form_by = None
        return self._form(wanted, reason, planned=True, after=after)

    def _form_at_once(self, reason: str) -> Form:
        """Who is being taken in, and is not known to have the state, has to say first which of the two it is."""
        for number in self._pending():
            replica = self._replicas[number]
            replica.state, replica.since = State.STARTING, self.generation + 1
            replica.ready.clear()
        self._form_by = self._now + self.limits.forming_s
        return self._form(frozenset(self._active), reason, planned=False, after=AT_ONCE)

    def _form(self, members: frozenset[int], reason: str, *, planned: bool, after: int) -> Form:
        there = {worker for replica in self._replicas.values() for worker in replica.workers}
        self._left_out = frozenset(((self._members | self._active) & there) - members)
        self._members, self._missing = members, set(members)
        if not planned:  # otherwise who is stuck still is, until then
            self._trouble.forget(self.generation + 1)
        holds = not self._is_over and self.num_members < self.limits.least
        if holds and self._short_since is None:
            self._short_since = self._now
        self.form = Form(
            generation=self.generation + 1,
            members=tuple(sorted(members)),
            planned=planned,
            holds=holds,
            reason=reason,
            after=after,
        )
        return self.form

    def _without(self, gone: set[int], reason: str) -> list[Decision]:
        """What the newest generation needs when these workers are no longer there."""
        if not gone.isdisjoint(self._active):
            return self._interrupt(gone, reason)
        if gone.isdisjoint(self._members):
            return []
        # Who was only about to join has not interrupted anybody: the others go on until they are between two steps.
        return [self._form_planned(reason, after=self.form.after)]

    def _interrupt(self, gone: set[int], reason: str) -> list[Decision]:
        """Go on at once with all who have the state; where nobody is known to have it, with all who may."""
        self._active -= gone
        for replica in self._replicas.values():
            if replica.state is not State.DONE and not self._has_state(replica):
                self._active.difference_update(replica.workers)  # half a replica is none
        if not self._active:
            self._active = {worker for number in self._pending() for worker in self._replicas[number].workers}
        if not self._active:
            self._is_over = True
            return [GiveUp(reason=f"no replica is left that has the run's state ({reason})")]
        return [self._form_at_once(reason), *self._preempted()]

    def _preempted(self) -> list[Decision]:
        """Where only those have the state who were asked to go, it is saved now."""
        having = [replica for replica in self._replicas.values() if self._has_state(replica)]
        if not having or any(not replica.must_leave for replica in having):
            return []
        return self.finish(PREEMPTED, "all workers that have the state were asked to leave")

    def _left(self, number: int, replica: Replica, worker: int) -> list[Decision]:
        """A worker that was to leave has done so, or the last one of a replica."""
        if replica.ended.issuperset(replica.workers):
            del self._replicas[number]
        if worker in self._missing:
            return self._interrupt({worker}, f"worker {worker} has left")
        was_active = worker in self._active
        self._active.discard(worker)
        if was_active and self._missing and self.form.planned and self.form.after != AT_ONCE:
            # It left where all had agreed to: nobody is within a step any more, and may wait there for this one.
            self.form = dataclasses.replace(self.form, after=AT_ONCE)
            self._form_by = self._now + (self.limits.handing_s if self._pending() else self.limits.forming_s)
            return [self.form]
        return []

    def _done(self, replica: Replica, worker: int) -> list[Decision]:
        """A member's program has come to its end: the others' do as well, and nobody can join them."""
        replica.state = State.DONE
        ends = self._turn_away("the run is at its end")
        was_missing = worker in self._missing
        self._active.discard(worker)
        self._missing.discard(worker)
        if was_missing and self._active:
            ends += self._interrupt({worker}, f"worker {worker} has ended")
        return ends

    def _turn_away(self, reason: str) -> list[Decision]:
        """Nobody joins any more."""
        self._is_over = True
        ends: list[Decision] = []
        gone: set[int] = set()
        for number in self._in(State.STARTING, State.WAITING, State.MEMBER):
            replica = self._replicas[number]
            if replica.state is not State.MEMBER or not self._has_state(replica):
                ends += self._remove(number, reason)
                gone.update(replica.workers)
        return [*ends, *self._without(gone, reason)]

    def _remove(self, number: int, reason: str, *, besides: Iterable[int] = ()) -> list[Decision]:
        """Forget a replica, and end its workers, besides those that have ended."""
        replica = self._replicas.pop(number)
        for worker in replica.workers:
            self._hearing.forget(worker)
        over = replica.ended.union(besides)
        return [EndWorker(worker=worker, reason=reason) for worker in replica.workers if worker not in over]

    # Whom to start, and whom to give up.

    def _refill(self) -> list[Decision]:
        """Start what is missing for the target."""
        if self._is_over or self._now < self._pause_until:
            return []
        missing = self.target - len(self._in(State.MEMBER, State.STARTING, State.WAITING))
        decisions: list[Decision] = []
        number = 0
        while missing > 0:
            if number not in self._replicas:
                workers = self._workers_of(number)
                self._replicas[number] = Replica(workers, State.STARTING, is_proven=False)
                for worker in workers:
                    self._hearing.expect(worker, self._now)
                decisions.append(StartReplica(replica=number, workers=workers))
                missing -= 1
            number += 1
        return decisions

    def _note_failed_start(self, now: float) -> None:
        """After some in a row the next one waits a while: whatever kills them might pass."""
        self._failed_starts += 1
        if self._failed_starts >= QUICK_STARTS:
            pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(8, self._failed_starts - QUICK_STARTS))
            self._pause_until = now + pause_s

    def _fence(self, workers: dict[int, str]) -> list[Decision]:
        """Whom we give up must not come back: it is killed, as far as we reach."""
        ends: list[Decision] = [
            EndWorker(worker=worker, reason=reason, silent_s=self._hearing.silence(worker, self._now))
            for worker, reason in workers.items()
        ]
        return ends + self.lost(workers, self._now, reason=next(iter(workers.values())))

    def _mend(self, late: set[int], how: str) -> list[Decision]:
        """Members that are alive cannot form: have them try again over new connections, then give up as few as can be.

        A newcomer is given up before anybody who has the state, and one replica at a time: two workers that cannot
        reach each other make all the others late as well, and all but one of them may go on.
        """
        pending = self._pending() if self._missing else []
        replicas = self._numbers(late)
        reason = f"generation {self.generation} did not form {how}"
        if len(replicas) == 1:
            guilty = replicas[0]
        elif self._trouble.is_first(joining=bool(pending)):
            return [self._form_at_once(f"{reason}: once more")]
        else:
            everybody = self._numbers(self._members | self._active)
            guilty = self._trouble.blame(pending or replicas, everybody, workers_each=self.limits.workers_each)
        workers = [worker for worker in self._workers_of(guilty) if worker not in self._replicas[guilty].ended]
        return self._fence({worker: f"{reason}: worker {worker} could not be reached by others" for worker in workers})

    # Who is who.

    def _wanted(self) -> frozenset[int]:
        """Who is to be in the next planned generation: the state must not go with those who leave."""
        staying = self._in(State.MEMBER, State.WAITING)
        if not any(self._has_state(self._replicas[number]) for number in staying):
            staying += [number for number in self._in(State.LEAVING) if self._has_state(self._replicas[number])]
        return frozenset(worker for number in staying for worker in self._replicas[number].workers)

    def _pending(self) -> list[int]:
        """Replicas that are being taken in, and are not known to have the state."""
        return [number for number in self._in(State.MEMBER) if not self._has_state(self._replicas[number])]

    def _has_state(self, replica: Replica) -> bool:
        return self._active.issuperset(replica.workers)

    def _in(self, *states: State) -> list[int]:
        return [number for number, replica in self._replicas.items() if replica.state in states]

    def _numbers(self, workers: Iterable[int]) -> list[int]:
        """The replicas of these workers, as far as they are there."""
        return sorted({worker // self.limits.workers_each for worker in workers} & self._replicas.keys())

    def _replica_of(self, worker: int) -> tuple[int, Replica | None]:
        number = worker // self.limits.workers_each
        return number, self._replicas.get(number)

    def _workers_of(self, number: int) -> tuple[int, ...]:
        each = self.limits.workers_each
        return tuple(range(number * each, (number + 1) * each))


def _named(numbers: list[int]) -> str:
    """ "replica 3", or "replicas 3, 4" """
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"replica{'s' if len(numbers) > 1 else ''} {shown}"
