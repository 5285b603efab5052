"""The replicas of a run, the state of each, and which workers are known to have the run's state."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.elastic.membership_messages import AT_ONCE

__all__ = ["ReplicaRecord", "ReplicaState", "ReplicaTable"]


class ReplicaState(enum.Enum):
    STARTING = "starting"  # it is being started, or must report again that it lacks the state
    WAITING = "waiting"  # at its first step, ready to be admitted
    MEMBER = "member"
    LEAVING = "leaving"  # a member that leaves, by request or of its own
    DONE = "done"  # its program has finished, and the others' will soon


@dataclasses.dataclass(slots=True)
class ReplicaRecord:
    """What is known of one replica."""

    number: int
    workers: tuple[int, ...]
    state: ReplicaState
    is_proven: bool  # it has taken a step, or the run began with it
    must_leave: bool = False  # asked from outside: it will end soon
    why: str = ""  # the reason why it leaves, in a few words
    is_presumed: bool = False  # presumed to have the state, because no replica is known to have it
    ready: set[int] = dataclasses.field(default_factory=set[int])  # workers of a starting replica that reported "ready"
    since: int = AT_ONCE  # reports from before they knew of this generation do not count
    ended: set[int] = dataclasses.field(default_factory=set[int])  # workers that have ended normally

    def restart_admission(self, since: int) -> None:
        """Make it report again that it has no state and waits."""
        self.state, self.since, self.is_presumed = ReplicaState.STARTING, since, False
        self.ready.clear()

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "state": self.state.value, "ready": sorted(self.ready), "ended": sorted(self.ended)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaRecord:
        """Read what `to_json` returned; raise LookupError, TypeError or ValueError if it is something else."""
        return cls(
            number=int(data["number"]),
            workers=tuple(map(int, data["workers"])),
            state=ReplicaState(data["state"]),
            is_proven=bool(data["is_proven"]),
            must_leave=bool(data["must_leave"]),
            why=str(data["why"]),
            is_presumed=bool(data["is_presumed"]),
            ready=set(map(int, data["ready"])),
            since=int(data["since"]),
            ended=set(map(int, data["ended"])),
        )


class ReplicaTable:
    """Replicas by number; those that the run starts with are members and have the state."""

    def __init__(self, *, replicas: int, workers_each: int) -> None:
        self.each = workers_each
        self.replicas: dict[int, ReplicaRecord] = {}
        for number in range(replicas):
            self.add(number, ReplicaState.MEMBER, is_proven=True)
        self.active = {worker for replica in self.replicas.values() for worker in replica.workers}  # have the state

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        replicas = [replica.to_json() for replica in self.replicas.values()]
        return {"workers_each": self.each, "replicas": replicas, "active": sorted(self.active)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaTable:
        """Read what `to_json` returned; raise LookupError, TypeError or ValueError if it is something else."""
        table = cls(replicas=0, workers_each=int(data["workers_each"]))
        for one in map(ReplicaRecord.from_json, data["replicas"]):
            if one.workers != table.workers_of(one.number):
                raise ValueError(f"replica {one.number} cannot have the workers {one.workers}")
            table.replicas[one.number] = one
        table.active = set(map(int, data["active"]))
        return table

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

    def drop_incomplete_replicas(self) -> None:
        """Incomplete replicas lack the state; but when a program has finished, its workers may end one by one."""
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
