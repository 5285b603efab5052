"""The vaults of this host, as long as the supervisor lives: from one start of the workers to the next.

They are its own workers', and copies of those of another host's, which lives on here when that host is lost.

Where replicas come and go, those at the same place of each hold the same state, and whoever has a number inherits the
vault of its predecessor. So a place can begin with what any worker at that place has kept, also one that was lost
since: what a slot that counts holds, all had committed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from paceline.comm.vault import Mark, Slot, Trip, Vault
from paceline.launch.stock import Kept, newest_step

__all__ = ["Vaults"]


class Vaults:
    """Makes and holds them; `close` gives the memory back."""

    def __init__(self) -> None:
        self.workers_each: int | None = None  # of replicas that come and go; None: each worker has a place of its own
        self._vaults: dict[int, Vault] = {}  # by worker
        self._copies: dict[int, Vault] = {}  # of other hosts' workers
        self._left: set[int] = set()  # workers that have left, and whose snapshots for all are still the newest
        self._travel = False  # what this host's workers keep is to go to another host

    def fds_for(self, worker: int, *, step: int | None) -> tuple[int, ...]:
        """What a worker is handed: its vault's two slots, and the one that holds the state after `step`.

        Empty where this system has no such memory. LookupError where nobody has that state.
        """
        if sys.platform != "linux":
            return ()
        self._left.discard(worker)  # it has a successor, which inherits
        if worker not in self._vaults:
            self._vaults[worker] = Vault.create(f"w{worker}")
            if self._travel:
                _note([self._vaults[worker]], Trip())
        fds = tuple(slot.fd for slot in self._vaults[worker].slots)
        return fds if step is None else (*fds, self._source(worker, step).fd)

    def newest(self, num_workers: int) -> int | None:
        """The newest step whose state so many workers of this host can begin with; None: there is none."""
        return newest_step(self.stock, num_workers, workers_each=self.workers_each)

    @property
    def stock(self) -> tuple[Kept, ...]:
        """All that counts here."""
        found: list[Kept] = []
        for vaults, is_copy in ((self._vaults, False), (self._copies, True)):
            for worker, vault in vaults.items():
                found += [_kept(worker, mark, is_copy=is_copy) for slot in vault.slots if (mark := slot.mark)]
        return tuple(found)

    def keep_only(self, step: int | None) -> None:
        """The workers begin again with this step (None: not from here): nothing else counts any more."""
        for vault in (*self._vaults.values(), *self._copies.values()):
            vault.keep_only(step)
        for worker in [worker for worker, vault in self._copies.items() if not vault.steps]:
            self._copies.pop(worker).close()

    def drop(self, worker: int) -> None:
        """A worker has left for good: what it has kept counts no more; if it wrote for all, once somebody else has a
        snapshot that is as new. Until then it may be the only state that there is."""
        self._left.add(worker)
        self.tidy()

    def tidy(self) -> None:
        """Give back what those who have left have kept, where it does not count any more."""
        for worker in sorted(self._left):
            if not self._is_needed(worker):
                self._left.discard(worker)
                for vaults in (self._vaults, self._copies):
                    if worker in vaults:
                        vaults.pop(worker).close()

    def _is_needed(self, worker: int) -> bool:
        """Whether a worker wrote for all, and nobody else has written anything as new since."""
        for_all = [one for one in self.stock if one.is_for_all]
        newest = max((one.step for one in for_all if one.worker == worker), default=None)
        others = (one.step for one in for_all if one.worker != worker and one.worker not in self._left)
        return newest is not None and newest > max(others, default=-1)

    def close(self) -> None:
        self._left.clear()
        for vaults in (self._vaults, self._copies):
            while vaults:
                vaults.popitem()[1].close()

    # What travels between hosts (`paceline.launch.carrying`).

    @property
    def own(self) -> tuple[int, ...]:
        """The workers that have vaults of their own here."""
        return tuple(sorted(self._vaults))

    def travel(self, travel: bool) -> None:
        """From now on workers wait until what they keep has arrived on another host, or do not."""
        self._travel = travel
        _note(self._vaults.values(), Trip() if travel else None)

    def newest_of(self, worker: int) -> Slot | None:
        """The newest snapshot of an own worker."""
        return self._vaults[worker].newest if worker in self._vaults else None

    def holding(self, worker: int, step: int) -> Slot | None:
        """A worker's state after a step, kept here by itself or for another host."""
        found = (vaults[worker].at(step) for vaults in (self._vaults, self._copies) if worker in vaults)
        return next((slot for slot in found if slot is not None), None)

    def room_for(self, worker: int) -> Slot:
        """The slot for a copy of another host's worker; OSError where there is no such memory."""
        if worker not in self._copies:
            self._copies[worker] = Vault.create(f"copy{worker}")
        return self._copies[worker].next

    def _alike(self, worker: int) -> Iterator[Vault]:
        """The vaults of all who are, or were, at a worker's place; its own first."""
        both = self._vaults, self._copies
        yield from (vaults[worker] for vaults in both if worker in vaults)
        if self.workers_each is not None:
            for other, vault in (item for vaults in both for item in vaults.items()):
                if other != worker and (other - worker) % self.workers_each == 0:
                    yield vault

    def _source(self, worker: int, step: int) -> Slot:
        for vault in self._alike(worker):
            if (slot := vault.at(step)) is not None:
                return slot
        for vault in (*self._vaults.values(), *self._copies.values()):
            slot = vault.at(step)
            if slot is not None and slot.mark is not None and slot.mark.is_for_all:
                return slot
        raise LookupError(f"no vault has the state of worker {worker} after step {step}")


def _note(vaults: Iterable[Vault], trip: Trip | None) -> None:
    for vault in vaults:
        for slot in vault.slots:
            slot.note(trip)


def _kept(worker: int, mark: Mark, *, is_copy: bool) -> Kept:
    return Kept(worker=worker, step=mark.step, is_for_all=mark.is_for_all, is_copy=is_copy)
