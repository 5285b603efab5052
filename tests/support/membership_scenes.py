"""Scenes for tests of the membership: one that has begun, and what may be done with it in a line."""

from __future__ import annotations

from typing import TypeVar

from paceline.elastic.membership import Decision, EndWorker, GiveUp, Limits, Membership, StartReplica
from paceline.elastic.membership_messages import Finish, MembershipView

__all__ = ["form", "join", "made", "only", "quiet", "the", "ticked"]

D = TypeVar("D", MembershipView, StartReplica, EndWorker, Finish, GiveUp)


def made(replicas: int = 4, *, least: int = 1, most: int = 8, each: int = 1, formed: bool = True) -> Membership:
    """A membership whose generation 0 has formed, and has committed a step."""
    membership = Membership(Limits(least=least, most=most, workers_each=each), replicas=replicas, now=0.0)
    if formed:
        form(membership)
    return membership


def form(membership: Membership, *, besides: int | None = None, now: float = 0.0) -> list[Decision]:
    """All members of the newest generation join it; returns what the last one led to."""
    decisions: list[Decision] = []
    for worker in membership.view.members:
        if worker != besides:
            decisions += membership.formed(worker, membership.view.generation, now)
    return decisions


def only(decisions: list[Decision], kind: type[D]) -> list[D]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def the(decisions: list[Decision], kind: type[D]) -> D:
    found = only(decisions, kind)
    assert len(found) == 1, decisions
    return found[0]


def join(membership: Membership, *numbers: int) -> MembershipView:
    """Replacements come to their first step, and are taken in; returns the generation with all of them, formed."""
    for number in numbers:
        membership.ready(number, 0.0)
    while not membership.is_formed:
        form(membership)
    assert set(numbers) <= set(membership.view.members)
    return membership.view


def quiet(membership: Membership, *, until: float) -> list[Decision]:
    """Time passes in small steps, and all workers say that they are alive; returns all decisions."""
    decisions: list[Decision] = []
    now = membership._now
    while now < until:
        now = min(until, now + 0.5)
        for worker in membership.workers:
            membership.heard(worker, now)
        decisions += membership.tick(now)
    return decisions


def ticked(membership: Membership, *, until: float, silent: set[int]) -> list[Decision]:
    decisions: list[Decision] = []
    now = 0.0
    while now < until and not decisions:
        now += 0.5
        for worker in set(membership.workers) - silent:
            membership.heard(worker, now)
        decisions = membership.tick(now)
    return decisions
