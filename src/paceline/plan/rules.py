"""The rules that hold between parts of a plan and its workers: one table, all of it checked at once.

A part checks its own fields when it is made; whatever needs two parts, or the number of workers, is a row here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.plan.wire import Cast

if TYPE_CHECKING:
    from paceline.plan.plan import Plan

__all__ = ["RULES", "Broken", "Facts", "Rule", "broken_rules"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a rule may look at; `workers` is None when not known yet: rules that need it hold."""

    plan: Plan
    workers: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """`says` tells what is wrong with the values, `fix` what to do; both are asked only when `broken_when` is true."""

    name: str
    broken_when: Callable[[Facts], bool]
    says: Callable[[Facts], str]
    fix: Callable[[Facts], str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A rule that a plan breaks, in words."""

    rule: str
    says: str
    fix: str

    def __str__(self) -> str:
        return f"{self.says} {self.fix}"


def broken_rules(facts: Facts) -> tuple[Broken, ...]:
    """Return every rule that is broken, in the table's order."""
    return tuple(
        Broken(rule=rule.name, says=rule.says(facts), fix=rule.fix(facts)) for rule in RULES if rule.broken_when(facts)
    )


def _layout_does_not_fit(facts: Facts) -> bool:
    return facts.workers is not None and not facts.plan.layout.takes(facts.workers)


def _layout_says(facts: Facts) -> str:
    layout = facts.plan.layout
    replicas, each = layout.replicas, f" x shard {layout.shard}" if layout.shard > 1 else ""
    if isinstance(replicas, tuple):
        count = _count(facts.workers, "worker")
        return f"Layout needs {replicas[0]} to {replicas[1]} replicas{each} but the job has {count}."
    if replicas is None:
        return f"Layout needs a multiple of {layout.shard} workers (shard) but the job has {facts.workers}."
    needed = _count(layout.workers, "worker")
    return f"Layout needs {needed} ({_count(replicas, 'replica')}{each}) but the job has {facts.workers}."


def _layout_fix(facts: Facts) -> str:
    layout, workers = facts.plan.layout, facts.workers or 0
    replicas, each = layout.replicas, layout.workers_each
    if isinstance(replicas, tuple):
        return f"Use workers={replicas[0] * each} to {replicas[1] * each}, or another range of replicas."
    needed = layout.workers or max(1, workers // each) * each
    if each == 1:
        return f"Use workers={needed}, or Layout(replicas={workers})."
    shard = max(one for one in range(1, each + 1) if workers % one == 0)
    other = f"replicas={workers // shard}, shard={shard}" if shard > 1 else f"replicas={workers}"
    return f"Use workers={needed}, or Layout({other})."


def _shard_is_elastic(facts: Facts) -> bool:
    return facts.plan.layout.is_elastic and facts.plan.layout.shard > 1


def _micro_exceeds_size(facts: Facts) -> bool:
    return facts.plan.batch.resolved_micro > facts.plan.batch.size


def _micro_says(facts: Facts) -> str:
    batch = facts.plan.batch
    return f"Batch(size={batch.size}, micro={batch.micro}) wants micro-batches larger than the whole batch."


def _micro_fix(facts: Facts) -> str:
    batch = facts.plan.batch
    return f"Use micro={batch.size} or less, or size={batch.micro} or more."


def _workers_would_idle(facts: Facts) -> bool:
    return facts.workers is not None and not _micro_exceeds_size(facts) and facts.plan.batch.num_micro < facts.workers


def _idle_says(facts: Facts) -> str:
    batch, workers = facts.plan.batch, facts.workers or 0
    return (
        f"A batch of {_count(batch.size, 'sample')} in micro-batches of {batch.resolved_micro} makes "
        f"{_count(batch.num_micro, 'micro-batch')} a step, but the job has {workers} workers: "
        f"{workers - batch.num_micro} of them would have nothing to do in every step."
    )


def _idle_fix(facts: Facts) -> str:
    batch, workers = facts.plan.batch, facts.workers or 0
    fewer = f"workers={batch.num_micro} or fewer"
    if batch.size < workers:  # even micro=1 does not give everyone something to do
        return f"Use {fewer}, or Batch(size={workers}, micro=1) or larger."
    # The largest micro with ceil(size / micro) >= workers: micro < size / (workers - 1).
    micro = -(-batch.size // (workers - 1)) - 1
    return f"Use micro={micro}, or {fewer}."


def _reference_is_rounded(facts: Facts) -> bool:
    return facts.plan.compute.precision == "fp64" and isinstance(facts.plan.wire, Cast)


def _count(number: int | None, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


RULES = (
    Rule(name="layout-fits-workers", broken_when=_layout_does_not_fit, says=_layout_says, fix=_layout_fix),
    Rule(
        name="shards-stay",
        broken_when=_shard_is_elastic,
        says=lambda facts: (
            f"{facts.plan.layout!r} lets sharded replicas come and go, which is not built yet: replicas of one worker "
            "can, and sharded ones stay."
        ),
        fix=lambda facts: f"Use Layout(replicas=n, shard={facts.plan.layout.shard}), or leave shard out.",
    ),
    Rule(name="micro-fits-size", broken_when=_micro_exceeds_size, says=_micro_says, fix=_micro_fix),
    Rule(name="work-for-every-worker", broken_when=_workers_would_idle, says=_idle_says, fix=_idle_fix),
    Rule(
        name="reference-travels-whole",
        broken_when=_reference_is_rounded,
        says=lambda facts: (
            f"Compute(precision='fp64') is the exact reference, but wire={facts.plan.wire!r} rounds to 16 bits."
        ),
        fix=lambda facts: "Use wire=Raw(), or precision='fp32'.",
    ),
)
