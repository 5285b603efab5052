"""Which worker runs where: pure functions.

Which worker is on which host, and where there is room for more: counting, nothing else.

A host has as many *slots* as its share of the workers that the job began with. A resize may ask for more workers than
there are slots: then the hosts carry more than their share, as evenly as can be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.plan.job import Assignment, Job
from paceline.schedule import micro_batches

__all__ = ["HostSlots", "assign", "assignment_template", "ranks_by_host", "slots_per_host", "worker_dir"]


def ranks_by_host(workers: int, hosts: int) -> tuple[range, ...]:
    """The ranks of each host: contiguous, as even as can be, the first hosts one more where it does not divide.

    Raises ValueError where a host would stay without a worker.
    """
    if not 1 <= hosts <= workers:
        raise ValueError(f"{workers} workers cannot be dealt to {hosts} hosts: each host needs at least one")
    return micro_batches.deal(workers, hosts)


def assignment_template(
    job: Job,
    *,
    host: str,
    host_index: int,
    slots: int,
    address: str,
    run_dir: Path,
    attempt: int,
    command_started: float,
    plan: str | None = None,
    overrides: Sequence[str] = (),
    given: Sequence[str] = (),
    begins_at: int | None = None,
) -> Assignment:
    """What all workers of one host are told alike, but for their numbers; `job.workers` must be known."""
    if job.workers is None:
        raise ValueError("job.workers is None: it must be known before workers are dealt to hosts")
    return Assignment(
        rank=-1,
        workers=job.workers,
        local_rank=-1,
        local_workers=slots,
        host=host,
        host_index=host_index,
        hosts=job.hosts,
        address=address,
        run_dir=str(run_dir),
        attempt=attempt,
        worker_dir="",
        channel_fd=-1,
        command_started=command_started,
        job=job,
        plan=plan,
        overrides=tuple(overrides),
        given=tuple(given),
        begins_at=begins_at,
    )


def assign(alike: Assignment, ranks: Sequence[int]) -> tuple[Assignment, ...]:
    """What each worker of one host is told: `alike`, with its own numbers."""
    return tuple(
        dataclasses.replace(
            alike,
            rank=worker_rank,
            local_rank=local_rank,
            worker_dir=str(worker_dir(Path(alike.run_dir), alike.attempt, worker_rank)),
        )
        for local_rank, worker_rank in enumerate(ranks)
    )


def slots_per_host(job: Job) -> int:
    """How many workers a host has room for that comes later: its share of those that the job begins with."""
    return max(1, (job.workers or 0) // job.hosts)


def worker_dir(run_dir: Path, attempt: int, worker_rank: int) -> Path:
    """Where a worker's logs, events and error.json are."""
    return run_dir / f"attempt_{attempt}" / f"worker_{worker_rank}"


class HostSlots:
    """Hosts by their index, workers by their rank."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._place: dict[int, int] = {}  # of workers that are there, and the last one of those that were lost
        self._there: set[int] = set()
        self._quiet: frozenset[int] = frozenset()  # when somebody was last placed

    def open(self, host_index: int, slots: int, workers: Collection[int] = ()) -> None:
        """A host is there, with these workers."""
        self._slots[host_index] = slots
        self._place.update(dict.fromkeys(workers, host_index))
        self._there.update(workers)

    def close(self, host_index: int) -> None:
        """A host is gone, and nobody has a place on it any more."""
        self._slots.pop(host_index, None)
        self._there -= self.workers_on(host_index)
        self._place = {worker: place for worker, place in self._place.items() if place != host_index}

    def shut(self, host_index: int) -> None:
        """A host can start no more workers; those that are there stay, and successors of others go elsewhere."""
        self._slots.pop(host_index, None)
        for worker in [worker for worker, place in self._place.items() if place == host_index]:
            if worker not in self._there:
                del self._place[worker]

    def place(self, workers: Sequence[int], *, quiet: Collection[int] = ()) -> None:
        """Find places for the workers of a replica: together on one host where any has room for all of them, else each
        by itself; where their predecessors were, else where most slots are free. Where no host can start workers, they
        get no place. Hosts that are `quiet`, and may be lost, get nobody where another one has a free slot.
        """
        self._quiet = frozenset(quiet)
        if not self._slots:
            return
        before = [self._place[worker] for worker in workers if self._place.get(worker) in self._slots]
        for host_index in (*dict.fromkeys(before), self._emptiest()):
            if self._open_slots(host_index) >= len(workers):
                for worker in workers:
                    self._take(worker, host_index)
                return
        for worker in workers:
            if not self._return(worker):
                self._take(worker, self._emptiest())

    def lose(self, worker: int) -> None:
        """A worker is there no longer; a successor goes where it was, where that host can start any."""
        self._there.discard(worker)
        if self._place.get(worker) not in self._slots:
            self._place.pop(worker, None)

    def leave(self, worker: int) -> None:
        """A worker has left for good: whoever has its number next is placed anew."""
        self._there.discard(worker)
        self._place.pop(worker, None)

    def host_of(self, worker: int) -> int | None:
        """The host on which a worker is, or was; None where it has no place."""
        return self._place.get(worker)

    def workers_on(self, host_index: int) -> frozenset[int]:
        """The workers that are there."""
        return frozenset(worker for worker in self._there if self._place[worker] == host_index)

    def room(self, workers_each: int, *, without: Collection[int] = ()) -> int:
        """For how many more replicas there are free slots, each on one host, when those `without` are gone."""
        free = (self._free(index) + len(self.workers_on(index).intersection(without)) for index in self._slots)
        return sum(max(0, slots) // workers_each for slots in free)

    def _return(self, worker: int) -> bool:
        """Put a worker where its predecessor was, unless its slot was given to another one and there are free ones."""
        before = self._place.get(worker)
        if (
            before is None
            or before not in self._slots
            or self._open_slots(before) < min(1, self._open_slots(self._emptiest()))
        ):
            return False
        self._take(worker, before)
        return True

    def _take(self, worker: int, host_index: int) -> None:
        self._place[worker] = host_index
        self._there.add(worker)

    def _free(self, host_index: int) -> int:
        return self._slots[host_index] - len(self.workers_on(host_index))

    def _open_slots(self, host_index: int) -> int:
        """Free slots of a host; a quiet one has none."""
        free = self._free(host_index)
        return min(0, free) if host_index in self._quiet else free

    def _emptiest(self) -> int:
        """Where most slots are free; of equals the first host."""
        return max(self._slots, key=lambda index: (self._open_slots(index), self._free(index), -index))
