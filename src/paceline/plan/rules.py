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


AXES = ("shard", "stages", "context", "tensor")  # of a replica, as fields of Layout


def _layout_does_not_fit(facts: Facts) -> bool:
    return facts.workers is not None and not facts.plan.layout.takes(facts.workers)


def _layout_says(facts: Facts) -> str:
    layout = facts.plan.layout
    cut = [(axis, size) for axis in AXES if (size := getattr(layout, axis)) > 1]
    replicas, each = layout.replicas, "".join(f" x {name} {size}" for name, size in cut)
    if isinstance(replicas, tuple):
        count = _count(facts.workers, "worker")
        return f"Layout needs {replicas[0]} to {replicas[1]} replicas{each} but the job has {count}."
    if replicas is None:
        why = " x ".join(name for name, _ in cut)
        return f"Layout needs a multiple of {layout.workers_each} workers ({why}) but the job has {facts.workers}."
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
    cut = [axis for axis in AXES if getattr(layout, axis) > 1]
    if len(cut) > 1:
        return f"Use workers={needed}, or other sizes whose product is {workers}."
    axis = cut[0]
    size = max(one for one in range(1, each + 1) if workers % one == 0)
    other = f"replicas={workers // size}, {axis}={size}" if size > 1 else f"replicas={workers}"
    return f"Use workers={needed}, or Layout({other})."


def _cut_is_elastic(facts: Facts) -> bool:
    return facts.plan.layout.is_elastic and facts.plan.layout.workers_each > 1


def _cut_is_compiled(facts: Facts) -> bool:
    return facts.plan.layout.tensor > 1 and facts.plan.compute.compile


def _micro_exceeds_size(facts: Facts) -> bool:
    return facts.plan.batch.resolved_micro > facts.plan.batch.size


def _micro_says(facts: Facts) -> str:
    batch = facts.plan.batch
    return f"Batch(size={batch.size}, micro={batch.micro}) wants micro-batches larger than the whole batch."


def _micro_fix(facts: Facts) -> str:
    batch = facts.plan.batch
    return f"Use micro={batch.size} or less, or size={batch.micro} or more."


def _workers_would_idle(facts: Facts) -> bool:
    shares = _num_shares(facts)
    return shares is not None and not _micro_exceeds_size(facts) and facts.plan.batch.num_micro < shares


def _num_shares(facts: Facts) -> int | None:
    """Into how many shares a step's micro-batches are dealt: workers that only together run one count as one."""
    return None if facts.workers is None else facts.workers // _each_share(facts)


def _each_share(facts: Facts) -> int:
    """How many workers run the same micro-batches."""
    layout = facts.plan.layout
    return layout.stages * layout.context * layout.tensor


def _idle_says(facts: Facts) -> str:
    batch, shares, each = facts.plan.batch, _num_shares(facts) or 0, _each_share(facts)
    axis = next((axis for axis in ("tensor", "context") if getattr(facts.plan.layout, axis) > 1), "stages")
    who = f"{shares} workers" if each == 1 else f"{shares} groups of {each} workers ({axis})"
    return (
        f"A batch of {_count(batch.size, 'sample')} in micro-batches of {batch.resolved_micro} makes "
        f"{_count(batch.num_micro, 'micro-batch')} a step, but the job has {who}: "
        f"{shares - batch.num_micro} of them would have nothing to do in every step."
    )


def _idle_fix(facts: Facts) -> str:
    batch, shares = facts.plan.batch, _num_shares(facts) or 0
    fewer = f"workers={batch.num_micro * _each_share(facts)} or fewer"
    if batch.size < shares:  # even micro=1 does not give everyone something to do
        return f"Use {fewer}, or Batch(size={shares}, micro=1) or larger."
    # The largest micro with ceil(size / micro) >= shares: micro < size / (shares - 1).
    micro = -(-batch.size // (shares - 1)) - 1
    return f"Use micro={micro}, or {fewer}."


def _reference_is_rounded(facts: Facts) -> bool:
    return facts.plan.compute.precision == "fp64" and isinstance(facts.plan.wire, Cast)


def _context_is_mixed(facts: Facts) -> bool:
    layout = facts.plan.layout
    return layout.context > 1 and layout.workers_each > layout.context


def _context_is_changed(facts: Facts) -> bool:
    compute = facts.plan.compute
    return facts.plan.layout.context > 1 and (compute.compile or compute.offload == "all")


def _has_stages(facts: Facts) -> bool:
    return facts.plan.layout.stages > 1


def _streams(facts: Facts) -> bool:
    return facts.plan.compute.offload == "all"


def _count(number: int | None, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


RULES = (
    Rule(name="layout-fits-workers", broken_when=_layout_does_not_fit, says=_layout_says, fix=_layout_fix),
    Rule(
        name="cut-replicas-stay",
        broken_when=_cut_is_elastic,
        says=lambda facts: (
            f"{facts.plan.layout!r} lets replicas of several workers come and go, which is not built yet: replicas of "
            "one worker can."
        ),
        fix=lambda facts: "Use replicas=n in place of the pair, or leave shard, stages, context and tensor out.",
    ),
    Rule(
        name="cut-layers-are-not-compiled",
        broken_when=_cut_is_compiled,
        says=lambda facts: (
            f"Compute(compile=True) with Layout(tensor={facts.plan.layout.tensor}): the compiler does not see through "
            "layers that are cut."
        ),
        fix=lambda facts: "Use compile=False, or tensor=1.",
    ),
    Rule(
        name="stages-are-cut-alone",
        broken_when=lambda facts: _has_stages(facts) and facts.plan.layout.shard * facts.plan.layout.tensor > 1,
        says=lambda facts: (
            f"Layout(stages={facts.plan.layout.stages}) with shard={facts.plan.layout.shard}, "
            f"tensor={facts.plan.layout.tensor}: a stage is not split further yet."
        ),
        fix=lambda facts: (
            "Use replicas=n in place of shard and tensor, beside stages; or "
            f"stages={facts.plan.layout.workers_each} alone."
        ),
    ),
    Rule(
        name="sequences-are-shared-alone",
        broken_when=_context_is_mixed,
        says=lambda facts: (
            f"{facts.plan.layout!r}: workers that share sequences (context) hold the whole model; to split it as well "
            "is not built yet."
        ),
        fix=lambda facts: "Use replicas=n beside context, or context=1.",
    ),
    Rule(
        name="shared-sequences-are-run-as-written",
        broken_when=_context_is_changed,
        says=lambda facts: (
            f"Layout(context={facts.plan.layout.context}) with {facts.plan.compute!r}: the compiler, and parameters "
            "that come unit by unit, do not go with slices of sequences yet."
        ),
        fix=lambda facts: "Use compile=False and offload='none' or 'optimizer', or context=1.",
    ),
    Rule(
        name="stages-are-not-compiled",
        broken_when=lambda facts: _has_stages(facts) and facts.plan.compute.compile,
        says=lambda facts: (
            f"Compute(compile=True) with Layout(stages={facts.plan.layout.stages}): the compiler does not see through "
            "calls that another stage answers."
        ),
        fix=lambda facts: "Use compile=False, or stages=1.",
    ),
    Rule(
        name="stages-stay-on-the-device",
        broken_when=lambda facts: _has_stages(facts) and facts.plan.compute.offload != "none",
        says=lambda facts: (
            f"Compute(offload={facts.plan.compute.offload!r}) with Layout(stages={facts.plan.layout.stages}): the "
            "state of a stage is not moved to the host yet."
        ),
        fix=lambda facts: f"Use offload='none', or shard={facts.plan.layout.stages} in place of stages.",
    ),
    Rule(
        name="streaming-replicas-stay",
        broken_when=lambda facts: _streams(facts) and facts.plan.layout.is_elastic,
        says=lambda facts: (
            f"Compute(offload='all') brings parameters to the device unit by unit, and {facts.plan.layout!r} lets "
            "replicas come and go, which does not work together yet."
        ),
        fix=lambda facts: "Use offload='optimizer', or replicas=n in place of the pair.",
    ),
    Rule(
        name="streaming-keeps-nothing-gathered",
        broken_when=lambda facts: _streams(facts) and facts.plan.layout.zero != 3,
        says=lambda facts: (
            f"Compute(offload='all') brings parameters to the device unit by unit, and Layout(zero="
            f"{facts.plan.layout.zero}) keeps all of them there during a step."
        ),
        fix=lambda facts: "Use zero=3, or offload='optimizer'.",
    ),
    Rule(
        name="streaming-layers-are-whole",
        broken_when=lambda facts: _streams(facts) and facts.plan.layout.tensor > 1,
        says=lambda facts: (
            f"Compute(offload='all') with Layout(tensor={facts.plan.layout.tensor}): layers that are cut are not "
            "brought to the device unit by unit yet."
        ),
        fix=lambda facts: f"Use offload='optimizer', or shard={facts.plan.layout.tensor} in place of tensor.",
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
