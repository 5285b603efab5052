"""How one generation of members follows another: which workers are in it, have joined it, or must know of it.

The first generation has all workers. A *planned* one admits newcomers and releases others between two steps. One made
*at once* goes on after a loss with the replicas that have the run's state. `paceline.elastic.membership` decides when a
change is needed and what follows from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.elastic.membership_messages import AT_ONCE, Limits, MembershipView
from paceline.elastic.replica_table import ReplicaRecord, ReplicaState, ReplicaTable

__all__ = ["Generations"]


class Generations:
    """The newest generation, and how the next one is made."""

    def __init__(self, table: ReplicaTable, limits: Limits) -> None:
        self._table, self._limits = table, limits
        everybody = tuple(sorted(table.active))
        self.view = MembershipView(generation=0, members=everybody, planned=False, holds=False, reason="the run begins")
        self.members = frozenset(everybody)
        self.missing = set(everybody)  # members that have not joined it yet
        self.left_out: frozenset[int] = frozenset()  # workers outside it that have to know of it
        self.short_since: float | None = None  # since when there are fewer members than the least
        self.load = 1.0  # of the machines: how many processes want each core
        self.num_extensions = 0  # of the deadline, for members that are heard
        self.form_by: float | None = None  # the deadline to join; none for generation 0, which waits for users' imports

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        return {"view": self.view.to_json(), "missing": sorted(self.missing), "left_out": sorted(self.left_out)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], table: ReplicaTable, limits: Limits, *, now: float) -> Generations:
        """Read what `to_json` returned; raise LookupError, TypeError or ValueError if it is something else."""
        generations = cls(table, limits)
        generations.view = view = MembershipView.from_json(data["view"])
        generations.members = frozenset(view.members)
        generations.missing = set(map(int, data["missing"]))
        generations.left_out = frozenset(map(int, data["left_out"]))
        generations.short_since = now if view.holds else None
        return generations

    @property
    def number(self) -> int:
        return self.view.generation

    def join(self, worker: int, now: float) -> bool:
        """A member has joined the newest generation with the run's state; return whether it was the last one."""
        self.missing.discard(worker)
        self._table.active.add(worker)
        if self.missing:
            self.begin(now)
            return False
        self._table.active &= self.members
        self.form_by, self.num_extensions = None, 0
        if not self.view.holds:
            self.short_since = None
        return True

    def begin(self, now: float) -> None:
        """A member has moved to a planned generation; until then it may wait for the end of a step for any time.

        From now on the others must follow within their time limit.
        """
        if self.form_by is None:
            self.form_by = now + self.forming_s

    @property
    def forming_s(self) -> float:
        """How long members may take to join; it grows with their number and with the load of the machine."""
        is_handing = bool(self._table.pending())
        return self._limits.joining_s(len(self.members), self.load, is_handing=is_handing)

    def extend(self, now: float) -> bool:
        """Give late members that are heard more time; return whether they get any."""
        self.num_extensions += 1
        if self._limits.program_s is not None or self.num_extensions > self._limits.most_extensions:
            return False
        self.form_by = now + self.forming_s
        return True

    def leave(self, worker: int, now: float) -> bool:
        """A worker that was left out has ended; return whether it had the run's state, which means that all members
        have agreed.
        """
        self.left_out -= {worker}
        if worker not in self._table.active:
            return False
        self._table.active.discard(worker)
        self.begin(now)
        return True

    def hurry(self) -> list[MembershipView]:
        """All members have agreed to a planned generation: none has to wait for its step any longer."""
        if not self.view.planned or self.view.after == AT_ONCE:
            return []
        self.view = dataclasses.replace(self.view, after=AT_ONCE)
        return [self.view]

    def planned(self, now: float) -> MembershipView | None:
        """Make the next generation, with all that wait and without all that leave; None if nothing changes or no member
        would be left.
        """
        wanted = self._table.wanted()
        joins, leaves = wanted - self.members, self.members - wanted
        if not wanted or not (joins or leaves):
            return None
        parts = [f"{_named(self._table.of_all(joins))} to join"] if joins else []
        parts += [f"{_named(self._table.of_all(leaves))} to leave"] if leaves else []
        return self._planned(wanted, ", ".join(parts), now, after=self.number)

    def without_newcomers(self, reason: str, now: float) -> MembershipView | None:
        """A newcomer was lost before it joined: the others go on until they are between two steps. None if there are no
        others.

        Some members may already be taking a step with it, and no newcomer can get the state within a step: newcomers
        join later.
        """
        wanted = self._table.wanted(joins=False)
        if not wanted:
            return None
        self._restart_admissions()
        return self._planned(wanted, reason, now, after=self.view.after)

    def at_once(self, gone: Iterable[int], reason: str, now: float) -> MembershipView | None:
        """Go on with all members that have the state and stay, or else with all that may have it. None if there are
        none.
        """
        table = self._table
        table.active.difference_update(gone)
        table.drop_incomplete_replicas()
        staying = table.active - self.left_out
        if staying:
            # The others may already have gone on without a worker that is left out, and only that worker may know it.
            table.active = staying
        else:
            table.presume()
        if not table.active:
            return None
        self._restart_admissions()
        view = self._follow(frozenset(table.active), reason, now, planned=False, after=AT_ONCE)
        self.form_by = now + self.forming_s
        return view

    def _restart_admissions(self) -> None:
        """Make newcomers that may or may not have got the state report first which of the two it is."""
        for replica in self._table.pending():
            replica.restart_admission(since=self.number + 1)

    def _planned(self, members: frozenset[int], reason: str, now: float, *, after: int) -> MembershipView:
        for replica in self._table.of_all(members):
            if replica.state is ReplicaState.WAITING:
                replica.state = ReplicaState.MEMBER
        self.form_by = None
        return self._follow(members, reason, now, planned=True, after=after)

    def _follow(self, members: frozenset[int], reason: str, now: float, *, planned: bool, after: int) -> MembershipView:
        told = self.members | self._table.active | self.left_out
        elsewhere = self._table.all_in(ReplicaState.LEAVING, ReplicaState.STARTING)
        self.left_out = frozenset(
            worker for replica in elsewhere for worker in replica.workers if worker in told and worker not in members
        )
        self.members, self.missing = members, set(members)
        holds = len(self._table.all_in(ReplicaState.MEMBER)) < self._limits.least
        if holds and self.short_since is None:
            self.short_since = now
        self.view = MembershipView(
            generation=self.number + 1,
            members=tuple(sorted(members)),
            planned=planned,
            holds=holds,
            reason=reason,
            after=after,
        )
        return self.view


def _named(replicas: list[ReplicaRecord]) -> str:
    """ "replica 3", or "replicas 3, 4" """
    shown = ", ".join(str(replica.number) for replica in replicas[:8])
    more = f" and {len(replicas) - 8} more" if len(replicas) > 8 else ""
    return f"replica{'s' if len(replicas) > 1 else ''} {shown}{more}"
