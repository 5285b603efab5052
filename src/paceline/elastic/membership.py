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
from collections.abc import Collection, Iterable

from paceline.elastic.decisions import Decision, EndWorker, GiveUp, Limits, StartReplica
from paceline.elastic.hearing import Hearing
from paceline.elastic.notices import AT_ONCE, PREEMPTED, TOO_FEW, Finish, Form
from paceline.elastic.roster import Replica, Roster, State
from paceline.elastic.trouble import Trouble

__all__ = ["Decision", "EndWorker", "GiveUp", "Limits", "Membership", "StartReplica"]

QUICK_STARTS = 3  # replacements in a row that died before they took a step; then there are pauses
PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


class Membership:
    """Decides. Every method returns what is to be done, in this order."""

    def __init__(self, limits: Limits, *, replicas: int, now: float) -> None:
        """All `replicas` that a run begins with are members of generation 0."""
        self.limits = limits
        self.target = replicas
        self._roster = Roster(replicas=replicas, workers_each=limits.workers_each)
        everybody = tuple(sorted(self._roster.active))
        self.form = Form(generation=0, members=everybody, planned=False, holds=False, reason="the run begins")
        self._members = frozenset(everybody)  # of the newest generation
        self._missing = set(everybody)  # of them, have not joined it
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
        return len(self._roster.all_in(State.MEMBER))

    @property
    def num_workers(self) -> int:
        """Workers that the run has when it has all the replicas that it wants."""
        return self.target * self.limits.workers_each

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers that are there, in whatever state."""
        return tuple(
            worker
            for replica in self._roster.replicas.values()
            for worker in replica.workers
            if worker not in replica.ended
        )

    @property
    def left_out(self) -> frozenset[int]:
        """Workers that are not in the newest generation, but have to know of it: it replaces what they were told."""
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
        replica = self._roster.of(worker)
        if replica is None or generation < replica.since:
            return []
        if replica.state is State.MEMBER and not self.form.planned and generation == self.generation:
            # It was taken for one that has the state, since nobody else was left.
            replica.throw_back(since=generation)
            replica.ready.add(worker)
            return self._interrupt(set(replica.workers), f"replica {replica.number} has not got the state")
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
        self._roster.active.add(worker)
        if self._missing:
            if self._form_by is None:  # a planned one begins after the step under way, however long that takes
                waits_s = self.limits.handing_s if self._roster.pending() else self.limits.forming_s
                self._form_by = now + waits_s
            return []
        self._roster.active &= self._members
        self._form_by = None
        self._trouble.formed(generation, planned=self.form.planned)
        if not self.form.holds:
            self._short_since = None
        return self._plan() or self._hurry(self._left_out)

    def committed(self, worker: int, now: float) -> None:
        """A worker has committed a step of the newest generation."""
        self.heard(worker, now)
        replica = self._roster.of(worker)
        if replica is None or worker not in self._roster.active:
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
        is_concerned = worker in self._members or worker in self._roster.active
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
        for replica in self._roster.of_all(known):
            first = min(known.intersection(replica.workers))
            ends += self._remove(replica, f"replica {replica.number} has lost worker {first}", besides=known)
            gone.update(replica.workers)
            if not replica.is_proven:
                self._note_failed_start(now)
            if not replace and replica.state is not State.LEAVING:
                self.target -= 1
        return [*ends, *self._without(gone, reason), *self._refill()]

    def ended(self, worker: int, now: float, *, has_saved: bool = False) -> list[Decision]:
        """A worker has ended in good order: it left, as it was to, or its program has come to its end.

        `has_saved`: it left because everybody was told to finish, after all had saved together.
        """
        self._now = now
        replica = self._roster.of(worker)
        if replica is None:
            return []
        if replica.is_presumed and worker in self._missing and not has_saved:
            return self.lost([worker], now, reason=f"worker {worker} has left")
        self._hearing.forget(worker)
        replica.ended.add(worker)
        if replica.state is State.LEAVING and not has_saved:
            return self._left(replica, worker)
        if replica.state in (State.STARTING, State.WAITING):
            # It had got the state, but the others had to go on without it; or it wants to take no steps.
            ends = self._remove(replica, f"worker {worker} of replica {replica.number} has left")
            if not replica.is_proven:
                self._note_failed_start(now)
            return [*ends, *self._refill()]
        return self._done(replica, worker)

    def leaving(self, worker: int, now: float) -> list[Decision]:
        """A worker was asked to go, from outside: its replica leaves between two steps, if enough are left."""
        self.heard(worker, now)
        replica = self._roster.of(worker)
        if replica is None or self._finish is not None or replica.must_leave or replica.state is State.DONE:
            return []
        reason = f"worker {worker} was asked to leave"
        if replica.state is not State.LEAVING:
            if not self._roster.has_state(replica):
                self.target = max(self.limits.least, self.target - 1)
                return [*self._remove(replica, reason), *self._without(set(replica.workers), reason), *self._refill()]
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
        there = self._roster.all_in(State.STARTING, State.WAITING, State.MEMBER)
        there.sort(key=lambda replica: (self._roster.has_state(replica), -replica.number))
        decisions: list[Decision] = []
        gone: set[int] = set()
        for replica in there[: max(0, len(there) - replicas)]:
            if self._roster.has_state(replica):
                replica.state = State.LEAVING
            else:
                gone.update(replica.workers)
                decisions += self._remove(replica, f"the run was made smaller ({replicas} replicas)")
        return [*decisions, *(self._without(gone, f"resized to {replicas}") or self._plan()), *self._refill()]

    def finish(self, exit_code: int, reason: str) -> list[Decision]:
        """Everybody saves and leaves; said once."""
        if self._finish is not None:
            return []
        self._finish = Finish(exit_code=exit_code, reason=reason)
        ends, gone = self._turn_away(reason)
        return [*ends, *self._without(gone, reason), self._finish]

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
        is_short = self._short_since is not None and now - self._short_since > self.limits.patience_s
        if is_short and not self._is_over:
            few = f"{self.num_members} of at least {self.limits.least} replicas were left"
            return self.finish(TOO_FEW, f"{few} for {self.limits.patience_s:.0f} s")
        return self._refill()

    # How a change is made.

    def _plan(self) -> list[Decision]:
        """A generation with all who wait and without all who leave, between two steps; once the newest is formed."""
        if self._is_over or self._missing:
            return []  # `formed` looks again
        wanted = self._roster.wanted()
        joins, leaves = wanted - self._members, self._members - wanted
        if not joins and not leaves:
            return []
        if not wanted:
            return self._interrupt(set(), "those that had it have left")
        parts = [f"{_named(self._roster.of_all(joins))} to join"] if joins else []
        parts += [f"{_named(self._roster.of_all(leaves))} to leave"] if leaves else []
        return [self._form_planned(wanted, ", ".join(parts), after=self.generation)]

    def _form_planned(self, members: frozenset[int], reason: str, *, after: int) -> Form:
        for replica in self._roster.of_all(members):
            if replica.state is State.WAITING:
                replica.state = State.MEMBER
        self._form_by = None
        return self._form(members, reason, planned=True, after=after)

    def _throw_back_newcomers(self) -> None:
        """Who is being taken in, and is not known to have the state, has to say first which of the two it is."""
        for replica in self._roster.pending():
            replica.throw_back(since=self.generation + 1)

    def _form_at_once(self, reason: str) -> Form:
        self._throw_back_newcomers()
        self._form_by = self._now + self.limits.forming_s
        return self._form(frozenset(self._roster.active), reason, planned=False, after=AT_ONCE)

    def _form(self, members: frozenset[int], reason: str, *, planned: bool, after: int) -> Form:
        told = self._members | self._roster.active | self._left_out
        elsewhere = (
            replica for replica in self._roster.replicas.values() if replica.state in (State.LEAVING, State.STARTING)
        )
        self._left_out = frozenset(
            worker for replica in elsewhere for worker in replica.workers if worker in told and worker not in members
        )
        self._members, self._missing = members, set(members)
        if not planned:  # otherwise who is stuck still is, until then
            self._trouble.forget(self.generation + 1)
        holds = self.num_members < self.limits.least
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
        if not gone.isdisjoint(self._roster.active):
            return self._interrupt(gone, reason)
        if gone.isdisjoint(self._members):
            return []
        # Who was only about to join has interrupted nobody: the others go on until they are between two steps. But some
        # may have been stepping with it already, and newcomers cannot be sent the state within a step: they join later.
        wanted = self._roster.wanted(joins=False)
        if not wanted:
            return self._interrupt(gone, reason)
        self._throw_back_newcomers()
        return [self._form_planned(wanted, reason, after=self.form.after)]

    def _interrupt(self, gone: set[int], reason: str) -> list[Decision]:
        """Go on at once with all who have the state and stay; where there are none, with all who may have it."""
        self._roster.active -= gone
        self._roster.count_halves_out()
        staying = self._roster.active - self._left_out
        if staying:
            # Who is left out may have been left behind already: then it knows it, but nobody else may.
            self._roster.active = staying
        else:
            self._roster.presume()
        if not self._roster.active:
            self._is_over = True
            return [GiveUp(reason=f"no replica is left that has the run's state ({reason})")]
        return [self._form_at_once(reason), *self._preempted()]

    def _preempted(self) -> list[Decision]:
        """Where only those have the state who were asked to go, it is saved now."""
        having = [replica for replica in self._roster.replicas.values() if self._roster.has_state(replica)]
        if not having or any(not replica.must_leave for replica in having):
            return []
        return self.finish(PREEMPTED, "all workers that have the state were asked to leave")

    def _left(self, replica: Replica, worker: int) -> list[Decision]:
        """A worker that was to leave has done so, or the last one of a replica."""
        if replica.ended.issuperset(replica.workers):
            del self._roster.replicas[replica.number]
        if worker in self._missing:
            return self._interrupt({worker}, f"worker {worker} has left")
        self._left_out -= {worker}
        if worker not in self._roster.active:
            return []
        self._roster.active.discard(worker)
        if self._form_by is None:
            self._form_by = self._now + (self.limits.handing_s if self._roster.pending() else self.limits.forming_s)
        return self._hurry(self._missing)

    def _hurry(self, workers: Collection[int]) -> list[Decision]:
        """Somebody has gone over into a planned generation, so all have agreed to it: nobody is to wait any longer."""
        if not workers or not self.form.planned or self.form.after == AT_ONCE:
            return []
        self.form = dataclasses.replace(self.form, after=AT_ONCE)
        return [self.form]

    def _done(self, replica: Replica, worker: int) -> list[Decision]:
        """A member's program has come to its end: the others' do as well, and nobody can join them."""
        replica.state = State.DONE
        ends, gone = self._turn_away("the run is at its end")
        gone.add(worker)
        is_needed = worker in self._missing or not self._members.isdisjoint(gone - {worker})
        self._roster.active.discard(worker)
        self._missing -= gone
        if is_needed and self._roster.active:  # the others wait for somebody who does not come
            ends += self._interrupt(gone, f"worker {worker} has ended")
        return ends

    def _turn_away(self, reason: str) -> tuple[list[Decision], set[int]]:
        """Nobody joins any more; returns whom that ends, and all of their workers."""
        self._is_over = True
        ends: list[Decision] = []
        gone: set[int] = set()
        for replica in self._roster.all_in(State.STARTING, State.WAITING, State.MEMBER):
            if replica.state is not State.MEMBER or not self._roster.has_state(replica):
                ends += self._remove(replica, reason)
                gone.update(replica.workers)
        return ends, gone

    def _remove(self, replica: Replica, reason: str, *, besides: Iterable[int] = ()) -> list[Decision]:
        """Forget a replica, and end its workers, besides those that have ended."""
        del self._roster.replicas[replica.number]
        for worker in replica.workers:
            self._hearing.forget(worker)
        over = replica.ended.union(besides)
        return [EndWorker(worker=worker, reason=reason) for worker in replica.workers if worker not in over]

    # Whom to start, and whom to give up.

    def _refill(self) -> list[Decision]:
        """Start what is missing for the target."""
        if self._is_over or self._now < self._pause_until:
            return []
        there = self._roster.all_in(State.MEMBER, State.STARTING, State.WAITING)
        decisions: list[Decision] = []
        for number in self._roster.free_numbers(self.target - len(there)):
            replica = self._roster.add(number, State.STARTING, is_proven=False)
            for worker in replica.workers:
                self._hearing.expect(worker, self._now)
            decisions.append(StartReplica(replica=number, workers=replica.workers))
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
        roster, trouble = self._roster, self._trouble
        pending = roster.pending() if self._missing else []
        suspects = roster.of_all(late)
        reason = f"generation {self.generation} did not form {how}"
        if len(suspects) == 1:
            guilty = suspects[0]
        elif trouble.is_first(joining=bool(pending)):
            return self._interrupt(set(), f"{reason}: once more")
        else:
            suspects = pending or suspects or roster.of_all(self._members | roster.active)
            guilty = max(suspects, key=lambda replica: (trouble.blame_on(replica.workers), replica.number))
        workers = [worker for worker in guilty.workers if worker not in guilty.ended]
        return self._fence({worker: f"{reason}: worker {worker} could not be reached by others" for worker in workers})


def _named(replicas: list[Replica]) -> str:
    """ "replica 3", or "replicas 3, 4" """
    shown = ", ".join(str(replica.number) for replica in replicas[:8])
    more = f" and {len(replicas) - 8} more" if len(replicas) > 8 else ""
    return f"replica{'s' if len(replicas) > 1 else ''} {shown}{more}"
