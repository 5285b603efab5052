"""Decides which replicas take part in a run: a state machine that is told what happened and returns what to do.

A *generation* is a set of replicas that take steps together; each change of the set is a new one, with a higher number.
Its workers vote at the end of every step, so all members of a generation commit a step, or none does. Since only the
coordinator creates generations, two groups never both commit the same step.

    starting --ready--> waiting --(planned generation)--> member --(asked)--> leaving --(planned one without it)--> gone
       ^                                                    |  |
       `-----(loss before it is known to have the state)----'  `--(end of its program)--> done

The loss of a worker creates a generation *at once*: the members drop the current step and take it again. All other
changes (a replica joins or leaves) are *planned*: they happen between two steps, and a newcomer is then sent the state.
Until it reports that it has the state, it does not count as having it. After a loss it must first report whether it has
the state.

This module takes reports (`ready`, `ended`) and requests (`leave`, `resize`, `grow`); its base class
decides on the changes, and `paceline.elastic.generations` makes one generation from another. Nothing does I/O or
reads the time: the caller passes the time, and carries out the decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from paceline.elastic.generations import Generations
from paceline.elastic.membership_base import MembershipBase
from paceline.elastic.membership_messages import (
    AT_ONCE,
    PREEMPTED,
    TOO_FEW,
    Decision,
    EndWorker,
    Finish,
    GiveUp,
    Limits,
    MembershipView,
    StartReplica,
    WorkerReport,
)
from paceline.elastic.replica_table import ReplicaState, ReplicaTable

__all__ = ["Decision", "EndWorker", "GiveUp", "Limits", "Membership", "StartReplica"]


class Membership(MembershipBase):
    """The state machine. Every method returns the decisions to carry out, in order."""

    # A change of the coordinator.

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which another coordinator can take over, until a newer generation is made."""
        return {**self._generations.to_json(), "table": self._table.to_json(), "target": self.target}

    @classmethod
    def taken_over(cls, limits: Limits, data: Mapping[str, Any], now: float) -> Membership:
        """Return the membership of a lost coordinator, which told `data` before it announced the newest generation.

        Call `resume` next. Raise LookupError, TypeError or ValueError if `data` is something else.
        """
        membership = cls(limits, replicas=0, now=now)
        table = membership._table = ReplicaTable.from_json(data["table"])
        membership._generations = Generations.from_json(data, table, limits, now=now)
        membership.target = int(data["target"])
        return membership

    def resume(
        self, reports: Mapping[int, WorkerReport], now: float, *, reason: str, room: int | None = None
    ) -> list[Decision]:
        """The hosts that are left have told of their workers, and all others are lost; `room` as in `lost`.

        The newest generation goes on if nobody is lost and all have joined it. Otherwise there is another one, since
        what the lost coordinator knew of its rendezvous is gone.
        """
        self._now = now
        table, generations = self._table, self._generations
        have_finished = self._take_reports(reports)
        decisions: list[Decision] = [
            EndWorker(worker=worker, reason=reason, is_loss=False)
            for worker, report in reports.items()
            if table.of(worker) is None and not report.has_ended
        ]
        replicas = {worker: table.of(worker) for worker in reports}
        if have_finished:
            decisions += self._reject_newcomers("the run is at its end")[0]
        present = [worker for replica in table.replicas.values() for worker in replica.workers]
        lost = [worker for worker in present if worker not in reports]
        if lost:
            decisions += self.lost(lost, now, reason=reason, room=room)
        is_changed = any(isinstance(one, MembershipView | GiveUp) for one in decisions)
        if not (self.is_formed or is_changed) and (table.active or not have_finished):
            decisions += self._interrupt(have_finished - table.active, reason)
        for worker, report in sorted(reports.items()):
            if worker in have_finished or table.of(worker) is None or table.of(worker) is not replicas[worker]:
                continue
            if report.has_ended:
                decisions += self.ended(worker, now, has_saved=report.has_saved)
            elif report.leaving and not report.is_over:
                decisions += self.leaving(worker, now, why=report.leaving)
            elif report.ready is not None:
                decisions += self.ready(worker, now, generation=report.ready)
            elif report.stuck is not None:
                self.stuck(worker, report.stuck[0], now, peer=report.stuck[1])
        if have_finished and not table.active:
            generations.missing.clear()
        return _with_last_view([*decisions, *self._refill()])

    def _take_reports(self, reports: Mapping[int, WorkerReport]) -> set[int]:
        """Note what has happened since the lost coordinator announced the newest generation; return the members whose
        program has finished.
        """
        table, generations = self._table, self._generations
        have_finished, have_left = set[int](), set[int]()
        for number in {worker // table.each for worker in reports}:
            workers, replica = table.workers_of(number), table.replicas.get(number)
            if all(worker in reports and reports[worker].is_new for worker in workers) and (
                replica is None or replica.state is ReplicaState.LEAVING or table.has_state(replica)
            ):  # started after the newest generation was announced, perhaps in the place of one that had left
                table.active.difference_update(workers)
                generations.left_out -= set(workers)
                table.add(number, ReplicaState.STARTING, is_proven=False)
        for replica in table.all_in(ReplicaState.STARTING, ReplicaState.WAITING):
            replica.state = ReplicaState.STARTING
            replica.ready.clear()  # perhaps of processes that were lost since; the reports have those that are there
        for worker, report in reports.items():
            replica = table.of(worker)
            if report.formed == self.generation:
                generations.missing.discard(worker)
                table.active.add(worker)
            if not (report.is_over or report.has_ended):
                self._heartbeats.expect(worker, self._now)
                self._heartbeats.heard(worker, self._now)
            elif replica is not None and replica.state in (ReplicaState.MEMBER, ReplicaState.DONE):
                replica.state = ReplicaState.DONE
                replica.ended.add(worker)
                have_finished.add(worker)
            elif replica is not None and replica.state is ReplicaState.LEAVING:
                have_left.add(worker)
                replica.ended.update({worker} if report.has_ended else ())
                if replica.ended.issuperset(replica.workers):
                    del table.replicas[replica.number]
        table.active -= have_finished | have_left
        generations.missing -= have_finished
        generations.left_out -= have_left
        if self.is_formed:
            table.active &= generations.members
        return have_finished

    # Queries.

    @property
    def num_workers(self) -> int:
        """Workers that the run has when it has all the replicas that it wants."""
        return self.target * self.limits.workers_each

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
        replica = self._table.of(worker)
        return replica is not None and replica.state is ReplicaState.DONE and worker in replica.ended

    def why_left(self, worker: int) -> tuple[str, bool] | None:
        """Return why a worker leaves while the others go on, and whether because of a resize; None if it does not
        leave.
        """
        replica = self._table.of(worker)
        if replica is None or replica.state is not ReplicaState.LEAVING:
            return None
        return replica.why, not replica.must_leave

    # Reports of workers.

    def heard(self, worker: int, now: float) -> None:
        """A worker has sent something."""
        self._now = now
        self._heartbeats.heard(worker, now)

    def ready(self, worker: int, now: float, *, generation: int = AT_ONCE) -> list[Decision]:
        """A worker lacks the run's state and waits to be admitted. `generation` is the newest that it knows of."""
        self.heard(worker, now)
        replica = self._table.of(worker)
        if replica is None or generation < replica.since:
            return []
        if replica.state is ReplicaState.MEMBER and not self.view.planned and generation == self.generation:
            # It was presumed to have the state, because no other replica was left.
            replica.restart_admission(since=generation)
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
        self._transfer_failures.formed(generation, planned=self.view.planned)
        return self._plan() or (self._hurry() if self.left_out else [])

    def committed(self, worker: int, now: float) -> None:
        """A worker has committed a step of the newest generation."""
        self.heard(worker, now)
        replica = self._table.of(worker)
        if replica is None or worker not in self._table.active:
            return
        self._transfer_failures.committed()
        if not replica.is_proven:
            replica.is_proven = True
            self._restart_backoff.forgive()

    def stuck(self, worker: int, generation: int, now: float, *, peer: int | None = None) -> list[Decision]:
        """A transfer of a generation failed for a worker that knows of no newer one. `peer` is the other end, if known.

        Usually the loss of a worker is the cause, and is reported within moments. If not, `tick` makes the same members
        form again over new connections; the second time in a row it gives one of them up.
        """
        self.heard(worker, now)
        is_concerned = self.is_member(worker) or worker in self._table.active
        if is_concerned and not self.view.interrupts(generation):
            self._transfer_failures.report(worker, generation, peer, now)
        return []

    def over(self, worker: int, now: float) -> list[Decision]:
        """A worker takes part in nothing any more and sends nothing, though its program may run on for any time.

        A member is done with that; for any other worker the end of its process decides (`ended`).
        """
        self._now = now
        self._heartbeats.forget(worker)
        replica = self._table.of(worker)
        if replica is None or self._finish is not None:
            return []
        if replica.state is ReplicaState.LEAVING:
            return self._worker_left(worker)
        is_unsure = replica.is_presumed and worker in self._generations.missing
        if replica.state not in (ReplicaState.MEMBER, ReplicaState.DONE) or is_unsure:
            return []
        replica.ended.add(worker)
        return self._done(replica, worker)

    # Ends of workers.

    def ended(self, worker: int, now: float, *, has_saved: bool = False) -> list[Decision]:
        """A worker ended as planned: it left on request, or its program finished.

        `has_saved`: it left because all workers were told to finish, after all had saved together.
        """
        self._now = now
        replica = self._table.of(worker)
        if replica is None:
            return []
        if replica.is_presumed and worker in self._generations.missing and not has_saved:
            return self.lost([worker], now, reason=f"worker {worker} has left")
        self._heartbeats.forget(worker)
        replica.ended.add(worker)
        if replica.state is ReplicaState.LEAVING and not has_saved:
            return self._member_left(replica, worker)
        if replica.state in (ReplicaState.STARTING, ReplicaState.WAITING):
            # It had received the state, but the others had to go on without it; or its program takes no steps.
            ends = self._remove(replica, f"worker {worker} of replica {replica.number} has left")
            if not replica.is_proven:
                self._restart_backoff.failed(now)
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
            one for one in self._table.of_all(workers) if not one.must_leave and one.state is not ReplicaState.DONE
        ]
        if self._finish is not None or not asked:
            return []
        having = [one for one in asked if one.state is ReplicaState.LEAVING or self._table.has_state(one)]
        fewer = [
            one for one in asked if one.state is not ReplicaState.LEAVING
        ]  # those that leave anyway are already subtracted
        stay = self._num_present - len(fewer)
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
        self._restart_backoff.forgive()
        there = self._table.all_in(ReplicaState.STARTING, ReplicaState.WAITING, ReplicaState.MEMBER)
        there.sort(key=lambda replica: (self._table.has_state(replica), -replica.number))
        decisions: list[Decision] = []
        gone: set[int] = set()
        for replica in there[: max(0, len(there) - replicas)]:
            if self._table.has_state(replica):
                replica.state, replica.why = ReplicaState.LEAVING, f"resized to {_counted(replicas)}"
            else:
                gone.update(replica.workers)
                decisions += self._remove(replica, f"resized to {_counted(replicas)}", is_loss=False)
        return [*decisions, *(self._without(gone, f"resized to {replicas}") or self._plan()), *self._refill()]

    def grow(self, replicas: int, now: float) -> list[Decision]:
        """There is room for this many more replicas: use it as far as the plan allows."""
        self._now = now
        if not self._is_over:
            self._restart_backoff.forgive()
            self.target = max(self.target, min(self.limits.most, self.target + replicas))
        return self._refill()

    def tick(self, now: float, *, unheard: Collection[int] = (), load: float = 1.0) -> list[Decision]:
        """Let time pass, and handle what is overdue, one thing at a time.

        Workers in `unheard` are on hosts that are silent too; the coordinator gives them up with their host, or hears
        them again. `load`: how many processes want each core of the machine.
        """
        self._now, self._generations.load = now, load
        away_s = self._heartbeats.listen(now)
        form_by = self._generations.form_by
        if away_s and form_by is not None:
            form_by = self._generations.form_by = form_by + away_s
        silent = {worker: why for worker, why in self._heartbeats.silent(now).items() if worker not in unheard}
        if silent:
            return self._fence(silent)
        if form_by is not None and now > form_by:
            awaited = self._generations.missing.difference(unheard)
            late = {w for w in awaited if self._heartbeats.is_known_for(w, self.limits.forming_s, now)}
            if late:
                # They are heard, so they are alive: where no other worker blames them, the machine may just be busy.
                is_blamed = self._transfer_failures.blame_on(late) > 0
                if not is_blamed and self._generations.extend(now):
                    return []
                return self._retry_or_give_up(late, "in time")
        if self._transfer_failures.is_overdue(now, self.limits.stuck_s):
            return self._retry_or_give_up(set(), "or broke up without a known loss")
        short_since = self._generations.short_since
        is_short = short_since is not None and now - short_since > self.limits.patience_s
        if is_short and not self._is_over:
            few = f"{self.num_members} of at least {self.limits.least} replicas were left"
            return self.finish(TOO_FEW, f"{few} for {self.limits.patience_s:.0f} s")
        return self._refill()


def _counted(replicas: int) -> str:
    return f"{replicas} replica{'s' * (replicas != 1)}"


def _with_last_view(decisions: list[Decision]) -> list[Decision]:
    """Return the decisions with the newest generation alone, which replaces those before it."""
    views = [one for one in decisions if isinstance(one, MembershipView)]
    return [one for one in decisions if not isinstance(one, MembershipView) or one is views[-1]]
