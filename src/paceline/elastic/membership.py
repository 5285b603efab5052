"""Decides which replicas take part in a run: a state machine that is told what happened and returns what to do.

A *generation* is a set of replicas that take steps together; each change of the set is a new one, with a higher number.
Its workers vote at the end of every step, so all members of a generation commit a step, or none does. Since only the
coordinator creates generations, two groups never both commit the same step.

    starting --ready--> waiting --(planned generation)--> member --(to go)--> leaving --(planned one without it)--> gone
       ^                                                    |  |
       `-----(loss before it is known to have the state)----'  `--(end of its program)--> done

A death creates a generation *at once*: the members drop the current step and take it again. All other changes (a
replica joins or leaves) are *planned*: they happen between two steps, and a newcomer is then sent the state. Until it
reports that it has the state, it does not count as having it: after a loss it must first say which of the two is true.

`paceline.elastic.generations` makes one generation from another; this module decides when, and what follows. Nothing
does I/O or reads a clock: the caller passes the time, and carries out the decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.elastic.decisions import Decision, EndWorker, GiveUp, Limits, StartReplica
from paceline.elastic.failure_backoff import RestartBackoff, TransferFailures
from paceline.elastic.generations import Generations
from paceline.elastic.heartbeats import Heartbeats
from paceline.elastic.membership_messages import AT_ONCE, PREEMPTED, TOO_FEW, Finish, MembershipView
from paceline.elastic.replica_table import ReplicaRecord, ReplicaState, ReplicaTable

__all__ = ["Decision", "EndWorker", "GiveUp", "Limits", "Membership", "StartReplica"]


class Membership:
    """The state machine. Every method returns the decisions to carry out, in order."""

    def __init__(self, limits: Limits, *, replicas: int, now: float) -> None:
        """All `replicas` that a run begins with are members of generation 0."""
        self.limits = limits
        self.target = replicas
        self._roster = ReplicaTable(replicas=replicas, workers_each=limits.workers_each)
        self._generations = Generations(self._roster, limits)
        self._now = now
        self._hearing = Heartbeats(limits)
        for worker in self.form.members:
            self._hearing.expect(worker, now)
        self._trouble, self._pauses = TransferFailures(), RestartBackoff()
        self._finish: Finish | None = None
        self._is_over = False  # no worker is admitted any more

    # Queries.

    @property
    def form(self) -> MembershipView:
        """The newest generation."""
        return self._generations.form

    @property
    def generation(self) -> int:
        return self._generations.number

    @property
    def is_formed(self) -> bool:
        """Whether all members of the newest generation have joined it."""
        return not self._generations.missing

    @property
    def num_members(self) -> int:
        """Replicas that take steps, or will with the next generation."""
        return len(self._roster.all_in(ReplicaState.MEMBER))

    @property
    def num_workers(self) -> int:
        """Workers that the run has when it has all the replicas that it wants."""
        return self.target * self.limits.workers_each

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers that are present, in whatever state."""
        return tuple(
            worker
            for replica in self._roster.replicas.values()
            for worker in replica.workers
            if worker not in replica.ended
        )

    @property
    def left_out(self) -> frozenset[int]:
        """Workers outside the newest generation that must know of it, because it replaces what they were told."""
        return self._generations.left_out

    @property
    def ending(self) -> Finish | None:
        """What all workers were told, once the run is to end."""
        return self._finish

    def would_form(self, worker: int, generation: int) -> bool:
        """Return whether this worker is the last one that the newest generation waits for."""
        return generation == self.generation and not self._generations.missing - {worker}

    def is_member(self, worker: int) -> bool:
        return worker in self._generations.members

    def is_over(self, worker: int) -> bool:
        """Return whether a worker has finished its part in the run, though its process may still be alive."""
        replica = self._roster.of(worker)
        return replica is not None and replica.state is ReplicaState.DONE and worker in replica.ended

    def why_left(self, worker: int) -> tuple[str, bool] | None:
        """Return why a worker leaves while the others go on, and whether because of a resize; None if it does not
        leave.
        """
        replica = self._roster.of(worker)
        if replica is None or replica.state is not ReplicaState.LEAVING:
            return None
        return replica.why, not replica.must_leave

    # Reports of workers.

    def heard(self, worker: int, now: float) -> None:
        """A worker has sent something."""
        self._now = now
        self._hearing.heard(worker, now)

    def ready(self, worker: int, now: float, *, generation: int = AT_ONCE) -> list[Decision]:
        """A worker lacks the run's state and waits to be admitted. `generation` is the newest that it knows of."""
        self.heard(worker, now)
        replica = self._roster.of(worker)
        if replica is None or generation < replica.since:
            return []
        if replica.state is ReplicaState.MEMBER and not self.form.planned and generation == self.generation:
            # It was presumed to have the state, because no other replica was left.
            replica.throw_back(since=generation)
            replica.ready.add(worker)
            return self._interrupt(set(replica.workers), f"replica {replica.number} has not got the state")
        if replica.state is not ReplicaState.STARTING:
            return []
        replica.ready.add(worker)
        if replica.ready < set(replica.workers):
            return []
        replica.state = ReplicaState.WAITING
        return self._plan()

    def formed(self, worker: int, generation: int, now: float) -> list[Decision]:
        """A worker has joined a generation, and has the run's state."""
        self.heard(worker, now)
        if generation != self.generation or worker not in self._generations.missing:
            return []
        if not self._generations.join(worker, now):
            return []
        self._trouble.formed(generation, planned=self.form.planned)
        return self._plan() or (self._hurry() if self.left_out else [])

    def committed(self, worker: int, now: float) -> None:
        """A worker has committed a step of the newest generation."""
        self.heard(worker, now)
        replica = self._roster.of(worker)
        if replica is None or worker not in self._roster.active:
            return
        self._trouble.committed()
        if not replica.is_proven:
            replica.is_proven = True
            self._pauses.forgive()

    def stuck(self, worker: int, generation: int, now: float, *, peer: int | None = None) -> list[Decision]:
        """A transfer of a generation failed for a worker that knows of no newer one. `peer` is the other end, if known.

        Usually a death is the cause, and is reported within moments. If not, `tick` makes the same members form again
        over new connections; the second time in a row it gives one of them up.
        """
        self.heard(worker, now)
        is_concerned = self.is_member(worker) or worker in self._roster.active
        if is_concerned and not self.form.interrupts(generation):
            self._trouble.report(worker, generation, peer, now)
        return []

    def over(self, worker: int, now: float) -> list[Decision]:
        """A worker takes part in nothing any more and sends nothing, though its program may run on for any time.

        A member is done with that; for any other worker the end of its process decides (`ended`).
        """
        self._now = now
        self._hearing.forget(worker)
        replica = self._roster.of(worker)
        if replica is None or self._finish is not None:
            return []
        if replica.state is ReplicaState.LEAVING:
            return self._parted(worker)
        is_unsure = replica.is_presumed and worker in self._generations.missing
        if replica.state not in (ReplicaState.MEMBER, ReplicaState.DONE) or is_unsure:
            return []
        replica.ended.add(worker)
        return self._done(replica, worker)

    # Ends of workers.

    def lost(self, workers: Iterable[int], now: float, *, reason: str, room: int | None = None) -> list[Decision]:
        """Workers are gone or no longer trusted, and so are their replicas, of which there may be several.

        `room` is for how many replicas there are free slots, if the lost workers' slots went with them. If that is less
        than what the run lacks, the run is smaller from now on. None: there is room for all.
        """
        self._now = now
        known = set(workers)
        ends: list[Decision] = []
        gone: set[int] = set()
        failed = False
        for replica in self._roster.of_all(known):
            first = min(known.intersection(replica.workers))
            ends += self._remove(replica, f"replica {replica.number} has lost worker {first}", besides=known)
            gone.update(replica.workers)
            failed = failed or not replica.is_proven
        if failed and room is None:  # with `room`, slots were lost too, which says nothing about replacements
            self._pauses.failed(now)
        if room is not None:
            self.target = min(self.target, self._num_coming_and_there + room)
        return [*ends, *self._without(gone, reason), *self._refill()]

    def ended(self, worker: int, now: float, *, has_saved: bool = False) -> list[Decision]:
        """A worker ended as planned: it left on request, or its program finished.

        `has_saved`: it left because all workers were told to finish, after all had saved together.
        """
        self._now = now
        replica = self._roster.of(worker)
        if replica is None:
            return []
        if replica.is_presumed and worker in self._generations.missing and not has_saved:
            return self.lost([worker], now, reason=f"worker {worker} has left")
        self._hearing.forget(worker)
        replica.ended.add(worker)
        if replica.state is ReplicaState.LEAVING and not has_saved:
            return self._left(replica, worker)
        if replica.state in (ReplicaState.STARTING, ReplicaState.WAITING):
            # It had got the state, but the others had to go on without it; or its program takes no steps.
            ends = self._remove(replica, f"worker {worker} of replica {replica.number} has left")
            if not replica.is_proven:
                self._pauses.failed(now)
            return [*ends, *self._refill()]
        return self._done(replica, worker)

    def leaving(self, worker: int, now: float, *, why: str = "SIGTERM") -> list[Decision]:
        """A worker was asked to leave from outside; it is not replaced."""
        self.heard(worker, now)
        return self.leave([worker], now, reason=f"worker {worker} was asked to leave", why=why)

    def leave(
        self, workers: Iterable[int], now: float, *, reason: str, why: str = "", room: int | None = None
    ) -> list[Decision]:
        """Make workers leave: their replicas leave between two steps if enough remain, else all workers save and leave.
        `why`, in a few words, is kept for `why_left`.

        `room` is for how many replicas there are free slots elsewhere; as many are replaced there. None: none is
        replaced.
        """
        self._now = now
        asked = [
            one for one in self._roster.of_all(workers) if not one.must_leave and one.state is not ReplicaState.DONE
        ]
        if self._finish is not None or not asked:
            return []
        having = [one for one in asked if one.state is ReplicaState.LEAVING or self._roster.has_state(one)]
        fewer = [
            one for one in asked if one.state is not ReplicaState.LEAVING
        ]  # those that leave anyway are already subtracted
        stay = self._num_coming_and_there - len(fewer)
        members = self.num_members - sum(one.state is ReplicaState.MEMBER for one in fewer)
        enough = members if room is None else stay + room
        if enough < self.limits.least and any(one in having for one in fewer):
            return self.finish(PREEMPTED, reason)
        self.target = (
            max(self.limits.least, self.target - len(fewer)) if room is None else min(self.target, stay + room)
        )
        for replica in having:
            replica.state, replica.must_leave, replica.why = ReplicaState.LEAVING, True, why or reason
        if ends := self._preempted():
            return ends
        newcomers = [one for one in asked if not one.must_leave]
        gone = {worker for replica in newcomers for worker in replica.workers}
        ends = [end for replica in newcomers for end in self._remove(replica, reason, is_loss=False)]
        return [*ends, *(self._without(gone, reason) or self._plan()), *self._refill()]

    # Requests to the whole run.

    def resize(self, replicas: int, now: float) -> list[Decision]:
        """Go on with this many replicas; raise ValueError if the plan does not allow it or the run is ending."""
        self._now = now
        if not self.limits.least <= replicas <= self.limits.most:
            raise ValueError(
                f"the plan allows {self.limits.least} to {self.limits.most} replicas, so the run cannot be resized to "
                f"{replicas}"
            )
        if self._is_over:
            raise ValueError(f"the run is about to end, so it cannot be resized to {replicas} any more")
        self.target = replicas
        self._pauses.forgive()
        there = self._roster.all_in(ReplicaState.STARTING, ReplicaState.WAITING, ReplicaState.MEMBER)
        there.sort(key=lambda replica: (self._roster.has_state(replica), -replica.number))
        decisions: list[Decision] = []
        gone: set[int] = set()
        for replica in there[: max(0, len(there) - replicas)]:
            if self._roster.has_state(replica):
                replica.state, replica.why = ReplicaState.LEAVING, f"resized to {_counted(replicas)}"
            else:
                gone.update(replica.workers)
                decisions += self._remove(replica, f"resized to {_counted(replicas)}", is_loss=False)
        return [*decisions, *(self._without(gone, f"resized to {replicas}") or self._plan()), *self._refill()]

    def grow(self, replicas: int, now: float) -> list[Decision]:
        """There is room for this many more replicas: use it as far as the plan allows."""
        self._now = now
        if not self._is_over:
            self._pauses.forgive()
            self.target = max(self.target, min(self.limits.most, self.target + replicas))
        return self._refill()

    def finish(self, exit_code: int, reason: str) -> list[Decision]:
        """Make all workers save and leave; announced once."""
        if self._finish is not None:
            return []
        self._finish = Finish(exit_code=exit_code, reason=reason)
        ends, gone = self._turn_away(reason)
        return [*ends, *self._without(gone, reason), self._finish]

    def tick(self, now: float, *, unheard: Collection[int] = ()) -> list[Decision]:
        """Let time pass, and handle what is overdue, one thing at a time.

        Workers in `unheard` are on hosts that are silent too; the coordinator gives them up with their host, or hears
        them again.
        """
        self._now = now
        away_s = self._hearing.listen(now)
        form_by = self._generations.form_by
        if away_s and form_by is not None:
            form_by = self._generations.form_by = form_by + away_s
        silent = {worker: why for worker, why in self._hearing.silent(now).items() if worker not in unheard}
        if silent:
            return self._fence(silent)
        if form_by is not None and now > form_by:
            awaited = self._generations.missing.difference(unheard)
            late = {w for w in awaited if self._hearing.is_known_for(w, self.limits.forming_s, now)}
            if late:
                return self._mend(late, "in time")
        if self._trouble.is_overdue(now, self.limits.stuck_s):
            return self._mend(set(), "or broke up, though nobody died")
        short_since = self._generations.short_since
        is_short = short_since is not None and now - short_since > self.limits.patience_s
        if is_short and not self._is_over:
            few = f"{self.num_members} of at least {self.limits.least} replicas were left"
            return self.finish(TOO_FEW, f"{few} for {self.limits.patience_s:.0f} s")
        return self._refill()

    # How a change is made.

    def _plan(self) -> list[Decision]:
        """Make a generation with all that wait and without all that leave, between two steps, once the newest one is
        formed.
        """
        if self._is_over or not self.is_formed:
            return []  # `formed` looks again
        if not self._roster.wanted():
            return self._interrupt(set(), "those that had it have left")
        planned = self._generations.planned(self._now)
        return [] if planned is None else [planned]

    def _without(self, gone: set[int], reason: str) -> list[Decision]:
        """Return what the newest generation needs once these workers are gone."""
        if not gone.isdisjoint(self._roster.active):
            return self._interrupt(gone, reason)
        if gone.isdisjoint(self._generations.members):
            return []
        planned = self._generations.without_newcomers(reason, self._now)
        return self._interrupt(gone, reason) if planned is None else [planned]

    def _interrupt(self, gone: set[int], reason: str) -> list[Decision]:
        """Go on at once with the members that stay; without any, give up the run."""
        form = self._generations.at_once(gone, reason, self._now)
        if form is None:
            self._is_over = True
            return [GiveUp(reason=f"no replica is left that has the run's state ({reason})")]
        self._trouble.forget(form.generation)  # a planned one forgets nothing: stuck workers stay stuck until it forms
        return [form, *self._preempted()]

    def _preempted(self) -> list[Decision]:
        """Save now if only replicas that were asked to leave have the state."""
        having = [replica for replica in self._roster.replicas.values() if self._roster.has_state(replica)]
        if not having or any(not replica.must_leave for replica in having):
            return []
        return self.finish(PREEMPTED, "all workers that have the state were asked to leave")

    def _left(self, replica: ReplicaRecord, worker: int) -> list[Decision]:
        """A worker that was to leave has left, perhaps the last one of its replica."""
        if replica.ended.issuperset(replica.workers):
            del self._roster.replicas[replica.number]
        return self._parted(worker)

    def _parted(self, worker: int) -> list[Decision]:
        """A leaving worker takes part in nothing any more."""
        if worker in self._generations.missing:
            return self._interrupt({worker}, f"worker {worker} has left")
        had_state = self._generations.leave(worker, self._now)
        return self._hurry() if had_state and not self.is_formed else []

    def _hurry(self) -> list[Decision]:
        """All members have agreed to the newest generation: none has to wait for a step any longer.

        A member may already have finished its program; no other is told to join it.
        """
        over = self._generations.members.difference(self.workers)
        if not over:
            return [*self._generations.hurry()]
        is_anybody_left = bool(self._roster.active - self.left_out - over)
        return self._interrupt(set(over), f"worker {min(over)} has ended") if is_anybody_left else []

    def _done(self, replica: ReplicaRecord, worker: int) -> list[Decision]:
        """A member's program has finished: so will the others', and no worker can join them."""
        replica.state = ReplicaState.DONE
        ends, gone = self._turn_away("the run is at its end")
        gone.add(worker)
        generations = self._generations
        is_needed = worker in generations.missing or not generations.members.isdisjoint(gone - {worker})
        self._roster.active.discard(worker)
        generations.missing -= gone
        if is_needed and self._roster.active:  # the others wait for a member that does not come
            ends += self._interrupt(gone, f"worker {worker} has ended")
        return ends

    def _turn_away(self, reason: str) -> tuple[list[Decision], set[int]]:
        """Admit no more workers; return the decisions that end newcomers, and all their workers."""
        self._is_over = True
        ends: list[Decision] = []
        gone: set[int] = set()
        for replica in self._roster.all_in(ReplicaState.STARTING, ReplicaState.WAITING, ReplicaState.MEMBER):
            if replica.state is not ReplicaState.MEMBER or not self._roster.has_state(replica):
                ends += self._remove(replica, reason, is_loss=False)
                gone.update(replica.workers)
        return ends, gone

    def _remove(
        self, replica: ReplicaRecord, reason: str, *, besides: Iterable[int] = (), is_loss: bool = True
    ) -> list[Decision]:
        """Forget a replica and end its workers, except those that have ended."""
        del self._roster.replicas[replica.number]
        for worker in replica.workers:
            self._hearing.forget(worker)
        over = replica.ended.union(besides)
        ended = [worker for worker in replica.workers if worker not in over]
        return [EndWorker(worker=worker, reason=reason, is_loss=is_loss) for worker in ended]

    # Which replicas to start, and which to give up.

    @property
    def _num_coming_and_there(self) -> int:
        """Replicas that stay or are being started."""
        return len(self._roster.all_in(ReplicaState.MEMBER, ReplicaState.STARTING, ReplicaState.WAITING))

    def _refill(self) -> list[Decision]:
        """Start what is missing for the target."""
        if self._is_over or not self._pauses.is_over(self._now):
            return []
        decisions: list[Decision] = []
        for number in self._roster.free_numbers(self.target - self._num_coming_and_there):
            replica = self._roster.add(number, ReplicaState.STARTING, is_proven=False)
            for worker in replica.workers:
                self._hearing.expect(worker, self._now)
            decisions.append(StartReplica(replica=number, workers=replica.workers))
        return decisions

    def _fence(self, workers: dict[int, str]) -> list[Decision]:
        """Give workers up and kill them where they can be reached, because they must not return."""
        ends: list[Decision] = [
            EndWorker(worker=worker, reason=reason, silent_s=self._hearing.silence(worker, self._now))
            for worker, reason in workers.items()
        ]
        return ends + self.lost(workers, self._now, reason=next(iter(workers.values())))

    def _mend(self, late: set[int], how: str) -> list[Decision]:
        """Members that are alive cannot form: retry over new connections, then give up as few as possible.

        A newcomer is given up before a replica that has the state, and one replica at a time. Two workers that cannot
        reach each other delay all others too, and all but one of them may go on.
        """
        roster, trouble = self._roster, self._trouble
        pending = roster.pending() if not self.is_formed else []
        suspects = roster.of_all(late)
        reason = f"generation {self.generation} did not form {how}"
        if len(suspects) == 1:
            guilty = suspects[0]
        elif trouble.is_first(joining=bool(pending)):
            return self._interrupt(set(), f"{reason}: once more")
        else:
            suspects = pending or suspects or roster.of_all(self._generations.members | roster.active)
            guilty = max(suspects, key=lambda replica: (trouble.blame_on(replica.workers), replica.number))
        workers = [worker for worker in guilty.workers if worker not in guilty.ended]
        return self._fence({worker: f"{reason}: worker {worker} could not be reached by others" for worker in workers})


def _counted(replicas: int) -> str:
    return f"{replicas} replica{'s' * (replicas != 1)}"
