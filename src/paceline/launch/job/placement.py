"""Places worker ranks on hosts, as mpirun's and Horovod's host slots do: pure data, no processes.

A host has as many *slots* as its share of the workers that the job began with. A resize may ask for more workers than
there are slots; then the hosts run more than their share, as evenly as possible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.plan.command_plan import CommandPlan
from paceline.plan.job import Assignment, Job
from paceline.schedule import micro_batches

__all__ = ["HostSlots", "assign", "assignment_template", "ranks_by_host", "slots_per_host", "worker_dir"]


def ranks_by_host(workers: int, slots: Sequence[int | None]) -> tuple[range, ...]:
    """Return the ranks of each host, contiguous: as many as its slots; those without a number get an even share of the
    others, the first of them one more.

    Raise ValueError if a host would have no worker, or the numbers do not make up the workers.
    """
    left, even = workers - sum(each or 0 for each in slots), slots.count(None)
    if not slots or left < even or (left and not even):
        raise ValueError(
            f"{workers} workers cannot be placed on {len(slots)} hosts: each host needs at least one"
            if even or not slots
            else f"the {len(slots)} hosts have {workers - left} slots for {workers} workers: the numbers must be equal"
        )
    shares = iter(micro_batches.split_evenly(left, even) if even else ())
    found, first = list[range](), 0
    for each in slots:
        count = each if each is not None else len(next(shares))
        found.append(range(first, first + count))
        first += count
    return tuple(found)


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
    plan: CommandPlan | None = None,
    given: Sequence[str] = (),
    begins_at: int | None = None,
    micro: int | None = None,
) -> Assignment:
    """Return the assignment of all workers of one host, without their ranks; `job.workers` must be known."""
    if job.workers is None:
        raise ValueError("job.workers is None: it must be known before workers are placed on hosts")
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
        plan=plan or CommandPlan(),
        given=tuple(given),
        begins_at=begins_at,
        micro=micro,
    )


def assign(template: Assignment, ranks: Sequence[int]) -> tuple[Assignment, ...]:
    """Return the assignment of each worker of one host: `template` with its own rank."""
    return tuple(
        dataclasses.replace(
            template,
            rank=worker_rank,
            local_rank=local_rank,
            worker_dir=str(worker_dir(Path(template.run_dir), template.attempt, worker_rank)),
        )
        for local_rank, worker_rank in enumerate(ranks)
    )


def slots_per_host(job: Job) -> int:
    """Return the slots of a host that joins later: the usual share of the workers that the job began with."""
    return max(1, (job.workers or 0) // job.hosts)


def worker_dir(run_dir: Path, attempt: int, worker_rank: int) -> Path:
    """Return the directory of a worker's logs, events and error.json."""
    return run_dir / f"attempt_{attempt}" / f"worker_{worker_rank}"


class HostSlots:
    """Knows which worker is on which host, and where there are free slots: hosts by index, workers by rank."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._host_of: dict[int, int] = {}  # of running workers, and the last host of lost ones
        self._running: set[int] = set()
        self._quiet: frozenset[int] = frozenset()  # silent hosts at the last `place`

    def open(self, host_index: int, slots: int, workers: Collection[int] = ()) -> None:
        """Add a host with these workers."""
        self._slots[host_index] = slots
        self._host_of.update(dict.fromkeys(workers, host_index))
        self._running.update(workers)

    def close(self, host_index: int) -> None:
        """Remove a lost host and the places of its workers."""
        self._slots.pop(host_index, None)
        self._running -= self.workers_on(host_index)
        self._host_of = {worker: host for worker, host in self._host_of.items() if host != host_index}

    def shut(self, host_index: int) -> None:
        """Start no more workers on a host: its workers stay, and their successors are placed elsewhere."""
        self._slots.pop(host_index, None)
        for worker in [worker for worker, host in self._host_of.items() if host == host_index]:
            if worker not in self._running:
                del self._host_of[worker]

    def limit(self, host_index: int, slots: int, *, workers_each: int) -> frozenset[int]:
        """Give a host that can start workers another number of slots; return the workers of the replicas that are then
        too many on it, those with the highest numbers.
        """
        if host_index in self._slots:
            self._slots[host_index] = slots
        staying, excess = set(self.workers_on(host_index)), set[int]()
        while len(staying) > slots:
            last = max(staying) // workers_each
            replica = {worker for worker in staying if worker // workers_each == last}
            staying -= replica
            excess |= replica
        return frozenset(excess)

    @property
    def open_hosts(self) -> tuple[int, ...]:
        """The hosts that can start workers, by index."""
        return tuple(sorted(self._slots))

    def place(self, workers: Sequence[int], *, quiet: Collection[int] = ()) -> None:
        """Place the workers of a replica: together on one host if one has room for all, else each by itself.

        They return to the host of their predecessors if possible, else go where most slots are free. If no host can
        start workers, they get no place. `quiet` hosts, which may be lost, are used only if no other has a free slot.
        """
        self._quiet = frozenset(quiet)
        if not self._slots:
            return
        before = [self._host_of[worker] for worker in workers if self._host_of.get(worker) in self._slots]
        for host_index in (*dict.fromkeys(before), self._emptiest()):
            if self._open_slots(host_index) >= len(workers):
                for worker in workers:
                    self._take(worker, host_index)
                return
        for worker in workers:
            if not self._return(worker):
                self._take(worker, self._emptiest())

    def lose(self, worker: int) -> None:
        """A worker was lost; its successor returns to the same host if that can start workers."""
        self._running.discard(worker)
        if self._host_of.get(worker) not in self._slots:
            self._host_of.pop(worker, None)

    def leave(self, worker: int) -> None:
        """A worker has left for good; the next worker with its rank is placed anew."""
        self._running.discard(worker)
        self._host_of.pop(worker, None)

    def host_of(self, worker: int) -> int | None:
        """Return the host on which a worker is or was; None if it has no place."""
        return self._host_of.get(worker)

    def workers_on(self, host_index: int) -> frozenset[int]:
        """Return the workers that run on a host."""
        return frozenset(worker for worker in self._running if self._host_of[worker] == host_index)

    def room(self, workers_each: int, *, without: Collection[int] = ()) -> int:
        """Return how many more replicas have free slots, each on one host, once the workers `without` have ended."""
        free = (self._free(index) + len(self.workers_on(index).intersection(without)) for index in self._slots)
        return sum(max(0, slots) // workers_each for slots in free)

    def _return(self, worker: int) -> bool:
        """Place a worker where its predecessor was, unless that slot was taken and other slots are free."""
        before = self._host_of.get(worker)
        if (
            before is None
            or before not in self._slots
            or self._open_slots(before) < min(1, self._open_slots(self._emptiest()))
        ):
            return False
        self._take(worker, before)
        return True

    def _take(self, worker: int, host_index: int) -> None:
        self._host_of[worker] = host_index
        self._running.add(worker)

    def _free(self, host_index: int) -> int:
        return self._slots[host_index] - len(self.workers_on(host_index))

    def _open_slots(self, host_index: int) -> int:
        """Return the free slots of a host; a quiet host has none."""
        free = self._free(host_index)
        return min(0, free) if host_index in self._quiet else free

    def _emptiest(self) -> int:
        """Return the host with most free slots; the first of equal ones."""
        return max(self._slots, key=lambda index: (self._open_slots(index), self._free(index), -index))
