"""How one generation of the members follows another: who is in it, who has joined it, who has to know of it.

The first one has everybody. One that is *planned* takes newcomers in and lets others go, between two steps; one *at
once* goes on after a loss with those who have the run's state. What leads to a change, and what follows from it, is
decided in `paceline.elastic.membership`.
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
        """A member has joined the newest generation, with the run's state; returns whether it was the last one."""
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
        """Somebody has gone over into a planned generation; before that it waits for a step, however long that takes.

        The others have to follow within their time from now on.
        """
        if self.form_by is None:
            self.form_by = now + (self._limits.handing_s if self._roster.pending() else self._limits.forming_s)

    def leave(self, worker: int, now: float) -> bool:
        """Who was left out has gone; returns whether it had the run's state, so that all have agreed to it."""
        self.left_out -= {worker}
        if worker not in self._roster.active:
            return False
        self._roster.active.discard(worker)
        self.begin(now)
        return True

    def hurry(self) -> list[MembershipView]:
        """All have agreed to a planned generation: nobody is to wait for its step any longer."""
        if not self.form.planned or self.form.after == AT_ONCE:
            return []
        self.form = dataclasses.replace(self.form, after=AT_ONCE)
        return [self.form]

    def planned(self, now: float) -> MembershipView | None:
        """The next one has all who wait, and none who leave; None where nobody does, or nobody would be left."""
        wanted = self._roster.wanted()
        joins, leaves = wanted - self.members, self.members - wanted
        if not wanted or not (joins or leaves):
            return None
        parts = [f"{_named(self._roster.of_all(joins))} to join"] if joins else []
        parts += [f"{_named(self._roster.of_all(leaves))} to leave"] if leaves else []
        return self._planned(wanted, ", ".join(parts), now, after=self.number)

    def without_newcomers(self, reason: str, now: float) -> MembershipView | None:
        """Who was only about to join is lost: the others go on until they are between two steps; None: there are none.

        Some may have been stepping with it already, and newcomers cannot be sent the state within a step: they join
        later.
        """
        wanted = self._roster.wanted(joins=False)
        if not wanted:
            return None
        self._throw_back_newcomers()
        return self._planned(wanted, reason, now, after=self.form.after)

    def at_once(self, gone: Iterable[int], reason: str, now: float) -> MembershipView | None:
        """Go on with all who have the state and stay; where there are none, with all who may have it. None: nobody."""
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
        """Who is being taken in, and is not known to have the state, has to say first which of the two it is."""
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
