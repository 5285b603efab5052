"""What the hosts of a job have in memory, and who begins where with it: data and pure functions.

A host's stock is a list of snapshots that count, its own workers' and copies of another host's. A step is whole when
every place finds its part on some host. All begin again on the hosts that are left: whoever was on one of them stays
there; the others go where there is room, and what their new host lacks is sent to it.

How all begin again after a loss: what the head decides, and every host is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from paceline.comm.memory_checkpoint import common_step
from paceline.events import Restarted
from paceline.launch.job.placement import HostSlots

__all__ = [
    "RemainingHost",
    "RestartPlan",
    "SnapshotTransfer",
    "StoredSnapshot",
    "newest_step",
    "ranks_restored_from_neighbors",
    "reassign_ranks",
    "snapshot_transfers",
    "workers_that_fit",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredSnapshot:
    """One snapshot that counts."""

    worker: int  # whose it is
    step: int
    is_for_all: bool = False  # all workers have this state
    is_copy: bool = False  # kept for a worker of another host


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RemainingHost:
    """A host on which workers can begin again."""

    index: int
    slots: int  # workers that it has room for
    workers: tuple[int, ...]  # that were on it
    snapshots: tuple[StoredSnapshot, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data, from which `from_json` makes the host anew; the wire names the snapshots `stock`."""
        data = dataclasses.asdict(self)
        return {**data, "stock": data.pop("snapshots")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RemainingHost:
        """Read what `to_json` wrote; raise KeyError or TypeError where it is something else."""
        snapshots = tuple(StoredSnapshot(**snapshot) for snapshot in data["stock"])
        return cls(index=data["index"], slots=data["slots"], workers=tuple(data["workers"]), snapshots=snapshots)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotTransfer:
    """A snapshot that a host has to get before its workers begin."""

    worker: int  # whose snapshot
    source: int  # the host that has it
    to: int


def newest_step(snapshots: Iterable[StoredSnapshot], num_workers: int, *, workers_each: int | None) -> int | None:
    """Return the newest step with which so many workers can begin; None where there is none. `workers_each`: of
    replicas that come and go; None: each worker has a place of its own."""
    kept = list(snapshots)
    places = [
        frozenset(one.step for one in kept if one.is_for_all or _is_at(one.worker, place, workers_each))
        for place in range(workers_each or num_workers)
    ]
    return common_step(places)


def workers_that_fit(hosts: Iterable[RemainingHost], *, most: int, workers_each: int | None) -> int:
    """Return how many workers may begin on these hosts, at most as many as the run began with: whole replicas."""
    slots = sum(host.slots for host in hosts)
    return min(most, slots // (workers_each or most) * (workers_each or most))


def reassign_ranks(
    hosts: Sequence[RemainingHost], workers: int, *, workers_each: int | None
) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each host, by its index: who was on one stays there, the others go where there is room,
    those of a replica together where that can be."""
    slots = HostSlots()
    taken: set[int] = set()
    for host in hosts:
        stay = [worker for worker in host.workers if worker < workers and worker not in taken][: host.slots]
        slots.open(host.index, host.slots, stay)
        taken.update(stay)
    homeless = [worker for worker in range(workers) if worker not in taken]
    while homeless:
        if workers_each is None:  # neighbours stay neighbours
            free = max(host.slots - len(slots.workers_on(host.index)) for host in hosts)
            together = homeless[: max(1, free)]
        else:
            together = [worker for worker in homeless if worker // workers_each == homeless[0] // workers_each]
        slots.place(together)
        homeless = homeless[len(together) :]
    return {host.index: tuple(sorted(slots.workers_on(host.index))) for host in hosts}


def snapshot_transfers(
    hosts: Sequence[RemainingHost], ranks: Mapping[int, Collection[int]], step: int, *, workers_each: int | None
) -> tuple[SnapshotTransfer, ...]:
    """Return what has to be sent to whom, so that all workers find the state after `step` on their own hosts."""
    found: list[SnapshotTransfer] = []
    for host in hosts:
        for worker in ranks[host.index]:
            if any(_serves(one, worker, step, workers_each) for one in host.snapshots):
                continue
            found_at = [
                (other, one) for other in hosts for one in other.snapshots if _serves(one, worker, step, workers_each)
            ]
            source, kept = min(found_at, key=lambda at: at[1].worker != worker)  # best its own
            snapshot_transfer = SnapshotTransfer(worker=kept.worker, source=source.index, to=host.index)
            if snapshot_transfer not in found:
                found.append(snapshot_transfer)
    return tuple(found)


def ranks_restored_from_neighbors(
    hosts: Sequence[RemainingHost], ranks: Mapping[int, Collection[int]], step: int, *, workers_each: int | None
) -> tuple[int, ...]:
    """Return the workers whose own host's memory does not have their state any more: they begin with a neighbour's."""
    found: list[int] = []
    for host in hosts:
        own = [one for one in host.snapshots if not one.is_copy]
        found += [
            worker for worker in ranks[host.index] if not any(_serves(one, worker, step, workers_each) for one in own)
        ]
    return tuple(sorted(found))


def _is_at(worker: int, place: int, workers_each: int | None) -> bool:
    return worker == place if workers_each is None else (worker - place) % workers_each == 0


def _serves(one: StoredSnapshot, worker: int, step: int, workers_each: int | None) -> bool:
    return one.step == step and (one.is_for_all or _is_at(one.worker, worker, workers_each))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestartPlan:
    """The beginning of the next attempt."""

    restarted: Restarted
    ranks: Mapping[int, tuple[int, ...]]  # of each host, by its index
    slots: Mapping[int, int]  # for how many workers each has room
    most: int  # workers with which the run began
    transfers: tuple[SnapshotTransfer, ...] = ()  # snapshots that go to another host first
    workers_each: int | None = None  # of replicas that come and go; None: their number is fixed
    least: int = 1  # of such replicas
    keeps: bool = True  # what all do is in memory from the beginning, as it was before

    @property
    def workers(self) -> int:
        """How many begin."""
        return sum(map(len, self.ranks.values()))

    @property
    def num_hosts(self) -> int:
        """On how many hosts they are; others may have room only."""
        return sum(1 for ranks in self.ranks.values() if ranks)

    @property
    def begins_at(self) -> int | None:
        """The step whose state is in memory; None: the workers find it elsewhere, or begin anew."""
        return self.restarted.step if self.restarted.source == "memory" else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data, from which `from_json` makes the plan anew."""
        ranks = [[index, list(ranks)] for index, ranks in self.ranks.items()]
        data = dataclasses.asdict(self)
        return {**data, "ranks": ranks, "slots": list(self.slots.items()), "errands": data.pop("transfers")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RestartPlan:
        """Read it back; raises TypeError or KeyError where it is not one."""
        return cls(
            restarted=Restarted(**data["restarted"]),
            ranks={int(index): tuple(map(int, ranks)) for index, ranks in data["ranks"]},
            slots={int(index): int(slots) for index, slots in data["slots"]},
            most=int(data["most"]),
            transfers=tuple(SnapshotTransfer(**one) for one in data["errands"]),
            workers_each=data["workers_each"],
            least=int(data["least"]),
            keeps=bool(data["keeps"]),
        )
