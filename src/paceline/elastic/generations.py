"""How one generation of members follows another: which workers are in it, have joined it, or must know of it.

The first generation has all workers. A *planned* one admits newcomers and releases others between two steps. One made
*at once* goes on after a loss with the replicas that have the run's state. `paceline.elastic.membership` decides when a
change is needed and what follows from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from paceline.elastic.decisions import Limits
from paceline.elastic.membership_messages import AT_ONCE, MembershipView
from paceline.elastic.replica_table import ReplicaRecord, ReplicaState, ReplicaTable

__all__ = ["Generations"]


class Generations:
    """The newest generation, and how the next one is made."""

    def __init__(self, roster: ReplicaTable, limits: Limits) -> None:
        self._roster, self._limits = roster, limits
        everybody = tuple(sorted(roster.active))
        self.form = MembershipView(generation=0, members=everybody, planned=False, holds=False, reason="the run begins")
        self.members = frozenset(everybody)
        self.missing = set(everybody)  # of them, have not joined it
        self.left_out: frozenset[int] = frozenset()  # are not in it, but have to know of it
        self.short_since: float | None = None  # there are fewer members than the least
        self.form_by: float | None = None  # generation 0 takes as long as the users' imports

    @property
    def number(self) -> int:
        return self.form.generation

    def join(self, worker: int, now: float) -> bool:
        """A member has joined the newest generation with the run's state; return whether it was the last one."""
        self.missing.discard(worker)
        self._roster.active.add(worker)
        if self.missing:
            self.begin(now)
            return False
        self._roster.active &= self.members
        self.form_by = None
        if not self.form.holds:
            self.short_since = None
        return True

    def begin(self, now: float) -> None:
        """A member has moved to a planned generation; until then it may wait for the end of a step for any time.

        From now on the others must follow within their time limit.
        """
        if self.form_by is None:
            self.form_by = now + (self._limits.handing_s if self._roster.pending() else self._limits.forming_s)

    def leave(self, worker: int, now: float) -> bool:
        """A worker that was left out has gone; return whether it had the run's state, so that all members
        have agreed.
        """
        self.left_out -= {worker}
        if worker not in self._roster.active:
            return False
        self._roster.active.discard(worker)
        self.begin(now)
        return True

    def hurry(self) -> list[MembershipView]:
        """All members have agreed to a planned generation: none has to wait for its step any longer."""
        if not self.form.planned or self.form.after == AT_ONCE:
            return []
        self.form = dataclasses.replace(self.form, after=AT_ONCE)
        return [self.form]

    def planned(self, now: float) -> MembershipView | None:
        """Make the next generation, with all that wait and without all that leave; None if nothing changes or no member
        would be left.
        """
        wanted = self._roster.wanted()
        joins, leaves = wanted - self.members, self.members - wanted
        if not wanted or not (joins or leaves):
            return None
        parts = [f"{_named(self._roster.of_all(joins))} to join"] if joins else []
        parts += [f"{_named(self._roster.of_all(leaves))} to leave"] if leaves else []
        return self._planned(wanted, ", ".join(parts), now, after=self.number)

    def without_newcomers(self, reason: str, now: float) -> MembershipView | None:
        """A newcomer was lost before it joined: the others go on until they are between two steps. None if there are no
        others.

        Some members may already be taking a step with it, and no newcomer can get the state within a step: newcomers
        join later.
        """
        wanted = self._roster.wanted(joins=False)
        if not wanted:
            return None
        self._throw_back_newcomers()
        return self._planned(wanted, reason, now, after=self.form.after)

    def at_once(self, gone: Iterable[int], reason: str, now: float) -> MembershipView | None:
        """Go on with all members that have the state and stay, or else with all that may have it. None if there are
        none.
        """
        roster = self._roster
        roster.active.difference_update(gone)
        roster.count_halves_out()
        staying = roster.active - self.left_out
        if staying:
            # Who is left out may have been left behind already: then it knows it, but nobody else may.
            roster.active = staying
        else:
            roster.presume()
        if not roster.active:
            return None
        self._throw_back_newcomers()
        self.form_by = now + self._limits.forming_s
        return self._follow(frozenset(roster.active), reason, now, planned=False, after=AT_ONCE)

    def _throw_back_newcomers(self) -> None:
        """Make newcomers that may or may not have got the state report first which of the two it is."""
        for replica in self._roster.pending():
            replica.throw_back(since=self.number + 1)

    def _planned(self, members: frozenset[int], reason: str, now: float, *, after: int) -> MembershipView:
        for replica in self._roster.of_all(members):
            if replica.state is ReplicaState.WAITING:
                replica.state = ReplicaState.MEMBER
        self.form_by = None
        return self._follow(members, reason, now, planned=True, after=after)

    def _follow(self, members: frozenset[int], reason: str, now: float, *, planned: bool, after: int) -> MembershipView:
        told = self.members | self._roster.active | self.left_out
        elsewhere = self._roster.all_in(ReplicaState.LEAVING, ReplicaState.STARTING)
        self.left_out = frozenset(
            worker for replica in elsewhere for worker in replica.workers if worker in told and worker not in members
        )
        self.members, self.missing = members, set(members)
        holds = len(self._roster.all_in(ReplicaState.MEMBER)) < self._limits.least
        if holds and self.short_since is None:
            self.short_since = now
        self.form = MembershipView(
            generation=self.number + 1,
            members=tuple(sorted(members)),
            planned=planned,
            holds=holds,
            reason=reason,
            after=after,
        )
        return self.form


def _named(replicas: list[ReplicaRecord]) -> str:
    """ "replica 3", or "replicas 3, 4" """
    shown = ", ".join(str(replica.number) for replica in replicas[:8])
    more = f" and {len(replicas) - 8} more" if len(replicas) > 8 else ""
    return f"replica{'s' if len(replicas) > 1 else ''} {shown}{more}"
