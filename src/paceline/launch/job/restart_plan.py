"""Plans how all workers restart after a loss from snapshots in the hosts' memory: data and pure functions.

Each remaining host reports its valid snapshots: those of its own workers, and copies of another host's. The workers can
restart from a step if the state of every worker after that step is on some host. Ranks stay on their host if it
remains; the others are placed where there is room, and the snapshots that their new host lacks are sent to it.

The coordinator makes the `RestartPlan` and sends it to every host.
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
    """One valid snapshot in a host's memory."""

    worker: int  # the worker that wrote it
    step: int
    is_for_all: bool = False  # all workers have the same state
    is_copy: bool = False  # replicated from another host


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RemainingHost:
    """A host on which workers can restart."""

    index: int
    slots: int  # workers that it has room for
    workers: tuple[int, ...]  # that were on it before the loss
    snapshots: tuple[StoredSnapshot, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`; the key of the snapshots is `stock`."""
        data = dataclasses.asdict(self)
        return {**data, "stock": data.pop("snapshots")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RemainingHost:
        """Read what `to_json` returned; raise KeyError or TypeError if it is something else."""
        snapshots = tuple(StoredSnapshot(**snapshot) for snapshot in data["stock"])
        return cls(index=data["index"], slots=data["slots"], workers=tuple(data["workers"]), snapshots=snapshots)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotTransfer:
    """A snapshot that a host has to fetch before its workers start."""

    worker: int  # the worker that wrote the snapshot
    source: int  # index of the host that has it
    to: int  # index of the host that needs it


def newest_step(snapshots: Iterable[StoredSnapshot], num_workers: int, *, workers_each: int | None) -> int | None:
    """Return the newest step from which `num_workers` workers can restart; None if there is none.

    `workers_each` is the size of an elastic replica; workers at the same place of each replica have the same state.
    None: each worker has a state of its own.
    """
    kept = list(snapshots)
    places = [
        frozenset(one.step for one in kept if one.is_for_all or _is_at_place(one.worker, place, workers_each))
        for place in range(workers_each or num_workers)
    ]
    return common_step(places)


def workers_that_fit(hosts: Iterable[RemainingHost], *, most: int, workers_each: int | None) -> int:
    """Return how many workers have room on these hosts: whole replicas, at most as many as the run began with."""
    slots = sum(host.slots for host in hosts)
    return min(most, slots // (workers_each or most) * (workers_each or most))


def reassign_ranks(
    hosts: Sequence[RemainingHost], workers: int, *, workers_each: int | None
) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each host, by host index.

    Ranks stay on their host; the others are placed where there is room, each replica together if possible.
    """
    slots = HostSlots()
    taken: set[int] = set()
    for host in hosts:
        stay = [worker for worker in host.workers if worker < workers and worker not in taken][: host.slots]
        slots.open(host.index, host.slots, stay)
        taken.update(stay)
    unplaced = [worker for worker in range(workers) if worker not in taken]
    while unplaced:
        if workers_each is None:  # neighboring ranks stay together
            free = max(host.slots - len(slots.workers_on(host.index)) for host in hosts)
            together = unplaced[: max(1, free)]
        else:
            together = [worker for worker in unplaced if worker // workers_each == unplaced[0] // workers_each]
        slots.place(together)
        unplaced = unplaced[len(together) :]
    return {host.index: tuple(sorted(slots.workers_on(host.index))) for host in hosts}


def snapshot_transfers(
    hosts: Sequence[RemainingHost], ranks: Mapping[int, Collection[int]], step: int, *, workers_each: int | None
) -> tuple[SnapshotTransfer, ...]:
    """Return the transfers after which every worker finds its state after `step` on its own host."""
    found: list[SnapshotTransfer] = []
    for host in hosts:
        for worker in ranks[host.index]:
            if any(_has_state_of(one, worker, step, workers_each) for one in host.snapshots):
                continue
            found_at = [
                (other, one)
                for other in hosts
                for one in other.snapshots
                if _has_state_of(one, worker, step, workers_each)
            ]
            # Prefer the snapshot that the worker itself wrote.
            source, kept = min(found_at, key=lambda at: at[1].worker != worker)
            snapshot_transfer = SnapshotTransfer(worker=kept.worker, source=source.index, to=host.index)
            if snapshot_transfer not in found:
                found.append(snapshot_transfer)
    return tuple(found)


def ranks_restored_from_neighbors(
    hosts: Sequence[RemainingHost], ranks: Mapping[int, Collection[int]], step: int, *, workers_each: int | None
) -> tuple[int, ...]:
    """Return the workers that restart from a neighbor host's copy, because their own host lacks their state."""
    found: list[int] = []
    for host in hosts:
        own = [one for one in host.snapshots if not one.is_copy]
        found += [
            worker
            for worker in ranks[host.index]
            if not any(_has_state_of(one, worker, step, workers_each) for one in own)
        ]
    return tuple(sorted(found))


def _is_at_place(worker: int, place: int, workers_each: int | None) -> bool:
    return worker == place if workers_each is None else (worker - place) % workers_each == 0


def _has_state_of(one: StoredSnapshot, worker: int, step: int, workers_each: int | None) -> bool:
    return one.step == step and (one.is_for_all or _is_at_place(one.worker, worker, workers_each))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestartPlan:
    """How all workers restart in the next attempt."""

    restarted: Restarted
    ranks: Mapping[int, tuple[int, ...]]  # of each host, by host index
    slots: Mapping[int, int]  # workers that each host has room for, by host index
    most: int  # workers with which the run began
    transfers: tuple[SnapshotTransfer, ...] = ()  # snapshots that are sent to another host first
    workers_each: int | None = None  # workers of each elastic replica; None: the number of replicas is fixed
    least: int = 1  # fewest elastic replicas
    keeps: bool = True  # workers keep snapshots in memory from the start, as before
    micro: int | None = None  # samples of a micro-batch, since the memory was too little for the plan's

    @property
    def workers(self) -> int:
        """The number of workers that restart."""
        return sum(map(len, self.ranks.values()))

    @property
    def num_hosts(self) -> int:
        """The number of hosts with workers; other hosts may only have free slots."""
        return sum(1 for ranks in self.ranks.values() if ranks)

    @property
    def begins_at(self) -> int | None:
        """The step whose state is in memory; None: the workers restart from disk or from the beginning."""
        return self.restarted.step if self.restarted.source == "memory" else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        ranks = [[index, list(ranks)] for index, ranks in self.ranks.items()]
        data = dataclasses.asdict(self)
        return {**data, "ranks": ranks, "slots": list(self.slots.items()), "errands": data.pop("transfers")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RestartPlan:
        """Read what `to_json` returned; raise TypeError or KeyError if it is something else."""
        return cls(
            restarted=Restarted(**data["restarted"]),
            ranks={int(index): tuple(map(int, ranks)) for index, ranks in data["ranks"]},
            slots={int(index): int(slots) for index, slots in data["slots"]},
            most=int(data["most"]),
            transfers=tuple(SnapshotTransfer(**one) for one in data["errands"]),
            workers_each=data["workers_each"],
            least=int(data["least"]),
            keeps=bool(data["keeps"]),
            micro=None if data["micro"] is None else int(data["micro"]),
        )
