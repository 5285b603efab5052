"""The replicas of a run, the state of each, and which workers are known to have the run's state."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from paceline.elastic.membership_messages import AT_ONCE

__all__ = ["ReplicaRecord", "ReplicaState", "ReplicaTable"]


class ReplicaState(enum.Enum):
    STARTING = "starting"  # on its way, or thrown back: it has to say that it has no state, and waits
    WAITING = "waiting"  # at its first step, and wants to be taken in
    MEMBER = "member"
    LEAVING = "leaving"  # a member that wants to go, or has to
    DONE = "done"  # its program has come to its end, and so have the others' soon


@dataclasses.dataclass(slots=True)
class ReplicaRecord:
    """What is known of one replica."""

    number: int
    workers: tuple[int, ...]
    state: ReplicaState
    is_proven: bool  # it has taken a step, or the run began with it
    must_leave: bool = False  # asked from outside: it will be gone soon
    why: str = ""  # it leaves, in a few words
    is_presumed: bool = False  # to have the state, since nobody is known to
    ready: set[int] = dataclasses.field(default_factory=set[int])  # workers of a starting one that have said so
    since: int = AT_ONCE  # what they said before they knew of this generation does not count
    ended: set[int] = dataclasses.field(default_factory=set[int])  # workers that have ended in good order

    def throw_back(self, since: int) -> None:
        """Make it report again that it has no state and waits."""
        self.state, self.since, self.is_presumed = ReplicaState.STARTING, since, False
        self.ready.clear()


class ReplicaTable:
    """Replicas by number; those that the run starts with are members and have the state."""

    def __init__(self, *, replicas: int, workers_each: int) -> None:
        self.each = workers_each
        self.replicas: dict[int, ReplicaRecord] = {}
        for number in range(replicas):
            self.add(number, ReplicaState.MEMBER, is_proven=True)
        self.active = {worker for replica in self.replicas.values() for worker in replica.workers}  # have the state

    def add(self, number: int, state: ReplicaState, *, is_proven: bool) -> ReplicaRecord:
        replica = ReplicaRecord(number, self.workers_of(number), state, is_proven)
        self.replicas[number] = replica
        return replica

    def workers_of(self, number: int) -> tuple[int, ...]:
        return tuple(range(number * self.each, (number + 1) * self.each))

    def of(self, worker: int) -> ReplicaRecord | None:
        """Return the replica of a worker, if present."""
        return self.replicas.get(worker // self.each)

    def of_all(self, workers: Iterable[int]) -> list[ReplicaRecord]:
        """Return the replicas of these workers that are present, by number."""
        numbers = {worker // self.each for worker in workers} & self.replicas.keys()
        return [self.replicas[number] for number in sorted(numbers)]

    def all_in(self, *states: ReplicaState) -> list[ReplicaRecord]:
        return [replica for replica in self.replicas.values() if replica.state in states]

    def has_state(self, replica: ReplicaRecord) -> bool:
        """Return whether all of a replica is known to have the run's state."""
        return self.active.issuperset(replica.workers)

    def pending(self) -> list[ReplicaRecord]:
        """Return the replicas being admitted that are not known to have the state."""
        return [replica for replica in self.all_in(ReplicaState.MEMBER) if not self.has_state(replica)]

    def wanted(self, *, joins: bool = True) -> frozenset[int]:
        """Return the replicas of the next planned generation; the state must not go with those that leave.

        `joins`: including those that lack it.
        """
        having = [replica for replica in self.all_in(ReplicaState.MEMBER) if self.has_state(replica)]
        having = having or [replica for replica in self.all_in(ReplicaState.LEAVING) if self.has_state(replica)]
        newcomers = [*self.pending(), *self.all_in(ReplicaState.WAITING)] if joins and having else []
        return frozenset(worker for replica in [*having, *newcomers] for worker in replica.workers)

    def free_numbers(self, count: int) -> list[int]:
        """Return the lowest unused numbers."""
        found: list[int] = []
        number = 0
        while len(found) < count:
            if number not in self.replicas:
                found.append(number)
            number += 1
        return found

    def count_halves_out(self) -> None:
        """Half a replica does not have the state; but after its program's end its workers may end one by one."""
        for replica in self.replicas.values():
            if replica.state is not ReplicaState.DONE and not self.has_state(replica):
                self.active.difference_update(replica.workers)

    def presume(self) -> None:
        """No remaining replica is known to have the state: presume it of those that may have got it and did not deny
        it.
        """
        for replica in self.replicas.values():
            is_unsure = replica.state is ReplicaState.STARTING and replica.since != AT_ONCE and not replica.ready
            if is_unsure or replica.state is ReplicaState.MEMBER:
                replica.state, replica.is_presumed = ReplicaState.MEMBER, True
                self.active.update(replica.workers)
