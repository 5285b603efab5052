"""How a change of an elastic run's membership is made: the generations and decisions that a loss, a departure or a
newcomer leads to. The reports that cause changes come in through `paceline.elastic.membership`.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.elastic.failure_backoff import RestartBackoff, TransferFailures
from paceline.elastic.generations import Generations
from paceline.elastic.heartbeats import Heartbeats
from paceline.elastic.membership_messages import (
    PREEMPTED,
    Decision,
    EndWorker,
    Finish,
    GiveUp,
    Limits,
    MembershipView,
    StartReplica,
)
from paceline.elastic.replica_table import ReplicaRecord, ReplicaState, ReplicaTable

__all__ = ["MembershipBase"]


class MembershipBase:
    """The state of the membership, and the steps of a change. Methods return the decisions to carry out, in order."""

    def __init__(self, limits: Limits, *, replicas: int, now: float) -> None:
        """All `replicas` that a run begins with are members of generation 0."""
        self.limits = limits
        self.target = replicas
        self._table = ReplicaTable(replicas=replicas, workers_each=limits.workers_each)
        self._generations = Generations(self._table, limits)
        self._now = now
        self._heartbeats = Heartbeats(limits)
        for worker in self.view.members:
            self._heartbeats.expect(worker, now)
        self._transfer_failures, self._restart_backoff = TransferFailures(), RestartBackoff()
        self._finish: Finish | None = None
        self._is_over = False  # no worker is admitted any more

    @property
    def view(self) -> MembershipView:
        """The newest generation."""
        return self._generations.view

    @property
    def generation(self) -> int:
        return self._generations.number

    @property
    def is_formed(self) -> bool:
        """Whether all members of the newest generation have joined it."""
        return not self._generations.missing

    @property
    def left_out(self) -> frozenset[int]:
        """Workers outside the newest generation that must know of it, because it replaces what they were told."""
        return self._generations.left_out

    @property
    def num_members(self) -> int:
        """Replicas that take steps, or will with the next generation."""
        return len(self._table.all_in(ReplicaState.MEMBER))

    def finish(self, exit_code: int, reason: str) -> list[Decision]:
        """Make all workers save and leave; announced once."""
        if self._finish is not None:
            return []
        self._finish = Finish(exit_code=exit_code, reason=reason)
        ends, gone = self._reject_newcomers(reason)
        return [*ends, *self._without(gone, reason), self._finish]

    def _plan(self) -> list[Decision]:
        """Make a generation with all that wait and without all that leave, between two steps, once the newest one is
        formed.
        """
        if self._is_over or not self.is_formed:
            return []  # `formed` looks again
        if not self._table.wanted():
            return self._interrupt(set(), "those that had it have left")
        planned = self._generations.planned(self._now)
        return [] if planned is None else [planned]

    def _without(self, gone: set[int], reason: str) -> list[Decision]:
        """Return what the newest generation needs once these workers are gone."""
        if not gone.isdisjoint(self._table.active):
            return self._interrupt(gone, reason)
        if gone.isdisjoint(self._generations.members):
            return []
        planned = self._generations.without_newcomers(reason, self._now)
        return self._interrupt(gone, reason) if planned is None else [planned]

    def _interrupt(self, gone: set[int], reason: str) -> list[Decision]:
        """Go on at once with the members that stay; without any, give up the run."""
        view = self._generations.at_once(gone, reason, self._now)
        if view is None:
            self._is_over = True
            return [GiveUp(reason=f"no replica is left that has the run's state ({reason})")]
        self._transfer_failures.forget(
            view.generation
        )  # only here: until a planned one forms, stuck workers stay stuck
        return [view, *self._preempted()]

    def _preempted(self) -> list[Decision]:
        """Save now if only replicas that were asked to leave have the state."""
        having = [replica for replica in self._table.replicas.values() if self._table.has_state(replica)]
        if not having or any(not replica.must_leave for replica in having):
            return []
        return self.finish(PREEMPTED, "all workers that have the state were asked to leave")

    def _member_left(self, replica: ReplicaRecord, worker: int) -> list[Decision]:
        """A worker that was to leave has left, perhaps the last one of its replica."""
        if replica.ended.issuperset(replica.workers):
            del self._table.replicas[replica.number]
        return self._worker_left(worker)

    def _worker_left(self, worker: int) -> list[Decision]:
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
        is_anybody_left = bool(self._table.active - self.left_out - over)
        return self._interrupt(set(over), f"worker {min(over)} has ended") if is_anybody_left else []

    def _done(self, replica: ReplicaRecord, worker: int) -> list[Decision]:
        """A member's program has finished: so will the others', and no worker can join them."""
        replica.state = ReplicaState.DONE
        ends, gone = self._reject_newcomers("the run is at its end")
        gone.add(worker)
        generations = self._generations
        is_needed = worker in generations.missing or not generations.members.isdisjoint(gone - {worker})
        self._table.active.discard(worker)
        generations.missing -= gone
        if is_needed and self._table.active:  # the others wait for a member that does not come
            ends += self._interrupt(gone, f"worker {worker} has ended")
        return ends

    def _reject_newcomers(self, reason: str) -> tuple[list[Decision], set[int]]:
        """Admit no more workers; return the decisions that end newcomers, and all their workers."""
        self._is_over = True
        ends: list[Decision] = []
        gone: set[int] = set()
        for replica in self._table.all_in(ReplicaState.STARTING, ReplicaState.WAITING, ReplicaState.MEMBER):
            if replica.state is not ReplicaState.MEMBER or not self._table.has_state(replica):
                ends += self._remove(replica, reason, is_loss=False)
                gone.update(replica.workers)
        return ends, gone

    def _remove(
        self, replica: ReplicaRecord, reason: str, *, besides: Iterable[int] = (), is_loss: bool = True
    ) -> list[Decision]:
        """Forget a replica and end its workers, except those that have ended."""
        del self._table.replicas[replica.number]
        for worker in replica.workers:
            self._heartbeats.forget(worker)
        over = replica.ended.union(besides)
        ended = [worker for worker in replica.workers if worker not in over]
        return [EndWorker(worker=worker, reason=reason, is_loss=is_loss) for worker in ended]

    @property
    def _num_present(self) -> int:
        """Replicas that stay or are being started."""
        return len(self._table.all_in(ReplicaState.MEMBER, ReplicaState.STARTING, ReplicaState.WAITING))

    def _refill(self) -> list[Decision]:
        """Start what is missing for the target."""
        if self._is_over or not self._restart_backoff.is_over(self._now):
            return []
        decisions: list[Decision] = []
        for number in self._table.free_numbers(self.target - self._num_present):
            replica = self._table.add(number, ReplicaState.STARTING, is_proven=False)
            for worker in replica.workers:
                self._heartbeats.expect(worker, self._now)
            decisions.append(StartReplica(replica=number, workers=replica.workers))
        return decisions

    def _fence(self, workers: dict[int, str]) -> list[Decision]:
        """Give workers up and kill them where they can be reached, because they must not return."""
        ends: list[Decision] = [
            EndWorker(worker=worker, reason=reason, silent_s=self._heartbeats.silence(worker, self._now))
            for worker, reason in workers.items()
        ]
        return ends + self.lost(workers, self._now, reason=next(iter(workers.values())))

    def _retry_or_give_up(self, late: set[int], how: str) -> list[Decision]:
        """Members that are alive cannot form: retry over new connections, then give up as few as possible.

        A newcomer is given up before a replica that has the state, and one replica at a time. Two workers that cannot
        reach each other delay all others too, and all but one of them may go on.
        """
        table, failures = self._table, self._transfer_failures
        pending = table.pending() if not self.is_formed else []
        suspects = table.of_all(late)
        reason = f"generation {self.generation} did not form {how}"
        if len(suspects) == 1:
            faulty = suspects[0]
        elif failures.is_first_attempt(joining=bool(pending)):
            return self._interrupt(set(), f"{reason}: once more")
        else:
            suspects = pending or suspects or table.of_all(self._generations.members | table.active)
            faulty = max(suspects, key=lambda replica: (failures.blame_on(replica.workers), replica.number))
        workers = [worker for worker in faulty.workers if worker not in faulty.ended]
        return self._fence({worker: f"{reason}: worker {worker} could not be reached by others" for worker in workers})

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
        for replica in self._table.of_all(known):
            first = min(known.intersection(replica.workers))
            ends += self._remove(replica, f"replica {replica.number} has lost worker {first}", besides=known)
            gone.update(replica.workers)
            failed = failed or not replica.is_proven
        if failed and room is None:  # with `room`, slots were lost too, which says nothing about replacements
            self._restart_backoff.failed(now)
        if room is not None:
            self.target = min(self.target, self._num_present + room)
        return [*ends, *self._without(gone, reason), *self._refill()]

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers that are present, in any state."""
        return tuple(
            worker
            for replica in self._table.replicas.values()
            for worker in replica.workers
            if worker not in replica.ended
        )
