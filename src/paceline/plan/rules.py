"""What a rule between parts of a plan and its workers is, and the check of all rules at once.

A part checks its own fields when it is made. What needs two parts, or the number of workers, is a row of a table:
`paceline.plan.layout_rules`, `paceline.plan.sync_rules`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.plan.batch import Batch
from paceline.plan.compute import Compute
from paceline.plan.guard import Guard
from paceline.plan.layout import Layout
from paceline.plan.sync import Sync
from paceline.plan.wire import Wire

__all__ = ["BrokenRule", "PlanFacts", "Rule", "broken_rules", "count_text", "streams_parameters"]


class CheckedPlan(Protocol):
    """What rules look at of a `Plan`."""

    @property
    def layout(self) -> Layout: ...
    @property
    def sync(self) -> Sync: ...
    @property
    def wire(self) -> Wire: ...
    @property
    def batch(self) -> Batch: ...
    @property
    def compute(self) -> Compute: ...
    @property
    def guard(self) -> Guard: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def is_asynchronous(self) -> bool: ...
    @property
    def has_backup_workers(self) -> bool: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """What a rule may look at; `workers` is None when not known yet: rules that need it hold."""

    plan: CheckedPlan
    workers: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """`says` returns what is wrong with the values, `fix` the remedy; called only when `broken_when` is true."""

    name: str
    broken_when: Callable[[PlanFacts], bool]
    says: Callable[[PlanFacts], str]
    fix: Callable[[PlanFacts], str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRule:
    """A rule that a plan breaks, in words."""

    rule: str
    says: str
    fix: str

    def __str__(self) -> str:
        return f"{self.says} {self.fix}"


def broken_rules(facts: PlanFacts, rules: Sequence[Rule]) -> tuple[BrokenRule, ...]:
    """Return every rule that is broken, in the order of `rules`."""
    return tuple(
        BrokenRule(rule=rule.name, says=rule.says(facts), fix=rule.fix(facts))
        for rule in rules
        if rule.broken_when(facts)
    )


def streams_parameters(facts: PlanFacts) -> bool:
    """Whether parameters are on the host, and are brought to the device unit by unit."""
    return facts.plan.compute.offload == "all"


def count_text(number: int | None, noun: str) -> str:
    """Return a number and its noun: "1 worker", "3 batches"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
