"""The rules that hold between parts of a plan and its workers: one table, all of it checked at once.

A part checks its own fields when it is made; whatever needs two parts, or the number of workers, is a row here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from paceline.plan.batch import Batch
from paceline.plan.compute import Compute
from paceline.plan.guard import Guard
from paceline.plan.layout import Layout
from paceline.plan.sync import Gossip, LocalSGD, ParameterServer, Sync
from paceline.plan.wire import Cast, Raw, Wire

__all__ = ["RULES", "BrokenRule", "PlanFacts", "Rule", "broken_rules"]


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
    """`says` tells what is wrong with the values, `fix` what to do; both are asked only when `broken_when` is true."""

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


def broken_rules(facts: PlanFacts) -> tuple[BrokenRule, ...]:
    """Return every rule that is broken, in the table's order."""
    return tuple(
        BrokenRule(rule=rule.name, says=rule.says(facts), fix=rule.fix(facts))
        for rule in RULES
        if rule.broken_when(facts)
    )


AXES = ("shard", "experts", "stages", "context", "tensor")  # of a replica, as fields of Layout


def _layout_does_not_fit(facts: PlanFacts) -> bool:
    return facts.workers is not None and not facts.plan.layout.takes(facts.workers)


def _layout_says(facts: PlanFacts) -> str:
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


def _layout_fix(facts: PlanFacts) -> str:
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


def _cut_is_compiled(facts: PlanFacts) -> bool:
    return facts.plan.layout.tensor > 1 and facts.plan.compute.compile


def _micro_exceeds_size(facts: PlanFacts) -> bool:
    return facts.plan.batch.resolved_micro > facts.plan.batch.size


def _micro_says(facts: PlanFacts) -> str:
    batch = facts.plan.batch
    return f"Batch(size={batch.size}, micro={batch.micro}) wants micro-batches larger than the whole batch."


def _micro_fix(facts: PlanFacts) -> str:
    batch = facts.plan.batch
    return f"Use micro={batch.size} or less, or size={batch.micro} or more."


def _workers_would_idle(facts: PlanFacts) -> bool:
    shares = _num_shares(facts)
    if facts.plan.is_asynchronous and not facts.plan.has_backup_workers:  # each replica takes a whole batch
        return False
    return shares is not None and not _micro_exceeds_size(facts) and facts.plan.batch.num_micro < shares


def _num_shares(facts: PlanFacts) -> int | None:
    """Into how many shares a step's micro-batches are dealt: workers that only together run one count as one."""
    return None if facts.workers is None else facts.workers // _each_share(facts)


def _each_share(facts: PlanFacts) -> int:
    """How many workers run the same micro-batches."""
    layout = facts.plan.layout
    return layout.stages * layout.context * layout.tensor


def _idle_says(facts: PlanFacts) -> str:
    batch, shares, each = facts.plan.batch, _num_shares(facts) or 0, _each_share(facts)
    axis = next((axis for axis in ("tensor", "context") if getattr(facts.plan.layout, axis) > 1), "stages")
    who = f"{shares} workers" if each == 1 else f"{shares} groups of {each} workers ({axis})"
    return (
        f"A batch of {_count(batch.size, 'sample')} in micro-batches of {batch.resolved_micro} makes "
        f"{_count(batch.num_micro, 'micro-batch')} a step, but the job has {who}: "
        f"{shares - batch.num_micro} of them would have nothing to do in every step."
    )


def _idle_fix(facts: PlanFacts) -> str:
    batch, shares = facts.plan.batch, _num_shares(facts) or 0
    fewer = f"workers={batch.num_micro * _each_share(facts)} or fewer"
    if batch.size < shares:  # even micro=1 does not give everyone something to do
        return f"Use {fewer}, or Batch(size={shares}, micro=1) or larger."
    # The largest micro with ceil(size / micro) >= shares: micro < size / (shares - 1).
    micro = -(-batch.size // (shares - 1)) - 1
    return f"Use micro={micro}, or {fewer}."


def _reference_is_rounded(facts: PlanFacts) -> bool:
    return facts.plan.compute.precision == "fp64" and not facts.plan.wire.exact


def _slices_are_sent(facts: PlanFacts) -> bool:
    return facts.plan.layout.shard > 1 and not facts.plan.wire.elementwise


def _combines(facts: PlanFacts) -> bool:
    return getattr(facts.plan.sync, "op", "mean") == "adasum"


def _combined_are_coded(facts: PlanFacts) -> bool:
    wire = facts.plan.wire
    return _combines(facts) and (type(wire).__name__ not in ("Raw", "Cast") or wire.feedback)


def _combined_are_parts(facts: PlanFacts) -> bool:
    layout = facts.plan.layout
    return _combines(facts) and layout.workers_each > 1 and layout.workers_each in (layout.experts, layout.context)


def _tokens_are_cut_twice(facts: PlanFacts) -> bool:
    return facts.plan.layout.context > 1 and facts.plan.layout.sequence


def _context_is_changed(facts: PlanFacts) -> bool:
    compute = facts.plan.compute
    return facts.plan.layout.context > 1 and (compute.compile or compute.offload == "all")


def _experts_are_changed(facts: PlanFacts) -> bool:
    compute = facts.plan.compute
    return facts.plan.layout.experts > 1 and (compute.compile or compute.offload == "all")


def _has_stages(facts: PlanFacts) -> bool:
    return facts.plan.layout.stages > 1


def _streams(facts: PlanFacts) -> bool:
    return facts.plan.compute.offload == "all"


def _is_served(facts: PlanFacts) -> bool:
    return isinstance(facts.plan.sync, ParameterServer)


def _served_are_cut(facts: PlanFacts) -> bool:
    return _is_served(facts) and facts.plan.layout.workers_each > 1


def _backups_are_elastic(facts: PlanFacts) -> bool:
    return facts.plan.has_backup_workers and facts.plan.layout.is_elastic


def _all_are_backups(facts: PlanFacts) -> bool:
    replicas = _known_replicas(facts)
    return replicas is not None and 0 < _drop(facts) >= replicas


def _drop(facts: PlanFacts) -> int:
    return facts.plan.sync.drop if isinstance(facts.plan.sync, ParameterServer) else 0


def _turns_are_compared(facts: PlanFacts) -> bool:
    return facts.plan.is_asynchronous and facts.plan.guard.check_every > 0


def _bound_keeps_replicas_idle(facts: PlanFacts) -> bool:
    return _staleness(facts) > 0 and _num_replicas(facts) > _staleness(facts) + 1


def _staleness(facts: PlanFacts) -> int:
    return facts.plan.sync.staleness or 0 if isinstance(facts.plan.sync, ParameterServer) else 0


def _num_replicas(facts: PlanFacts) -> int:
    """The most that there may be, as far as it is known; 1 where it is not."""
    replicas = facts.plan.layout.replicas
    return replicas[1] if isinstance(replicas, tuple) else _known_replicas(facts) or 1


def _known_replicas(facts: PlanFacts) -> int | None:
    """Of those that are of one worker; None: it is not known yet."""
    replicas = facts.plan.layout.replicas
    return replicas if isinstance(replicas, int) else facts.workers


def _served_are_coded(facts: PlanFacts) -> bool:
    wire = facts.plan.wire
    return _is_served(facts) and not (isinstance(wire, Raw) or (isinstance(wire, Cast) and not wire.feedback))


def _served_go_back(facts: PlanFacts) -> bool:
    guard = facts.plan.guard
    return _is_served(facts) and (guard.on_spike == "rollback" or bool(guard.snapshot_every))


def _goes_back_alone(facts: PlanFacts) -> bool:
    return facts.plan.is_local and facts.plan.guard.on_spike == "rollback"


def _fragments_travel(facts: PlanFacts) -> bool:
    return isinstance(facts.plan.sync, LocalSGD) and facts.plan.sync.streams


def _shown(facts: PlanFacts) -> str:
    return str(getattr(facts.plan.sync, "staleness", None))


def _own_pace(facts: PlanFacts) -> str:
    return f"drop={_drop(facts)}" if facts.plan.has_backup_workers else f"staleness={_shown(facts)}"


def _count(number: int | None, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


RULES = (
    Rule(name="layout-fits-workers", broken_when=_layout_does_not_fit, says=_layout_says, fix=_layout_fix),
    Rule(
        name="cut-layers-are-not-compiled",
        broken_when=_cut_is_compiled,
        says=lambda facts: (
            f"Compute(compile=True) with Layout(tensor={facts.plan.layout.tensor}): the compiler does not see through "
            "tensor parallel layers."
        ),
        fix=lambda facts: "Use compile=False, or tensor=1.",
    ),
    Rule(
        name="tokens-are-shared-out-once",
        broken_when=_tokens_are_cut_twice,
        says=lambda facts: (
            f"Layout(context={facts.plan.layout.context}) with sequence=True: each worker has a slice of the tokens "
            "already, and would cut it once more between layers."
        ),
        fix=lambda facts: "Use sequence=False, or context=1.",
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
        name="spread-experts-are-run-as-written",
        broken_when=_experts_are_changed,
        says=lambda facts: (
            f"Layout(experts={facts.plan.layout.experts}) with {facts.plan.compute!r}: the compiler does not see "
            "through the exchange of tokens, and parameters of spread experts do not come to the device unit by unit."
        ),
        fix=lambda facts: "Use compile=False and offload='none' or 'optimizer', or experts=1.",
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
        broken_when=lambda facts: _has_stages(facts) and _streams(facts),
        says=lambda facts: (
            f"Compute(offload='all') with Layout(stages={facts.plan.layout.stages}): each micro-batch would bring all "
            "parameters of a stage to the device twice, one after the other, while the other stages wait."
        ),
        fix=lambda facts: (
            f"Use offload='optimizer', more stages, or shard={facts.plan.layout.stages} in place of stages."
        ),
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
            f"Compute(offload='all') with Layout(tensor={facts.plan.layout.tensor}): tensor parallel layers are not "
            "brought to the device unit by unit yet."
        ),
        fix=lambda facts: f"Use offload='optimizer', or shard={facts.plan.layout.tensor} in place of tensor.",
    ),
    Rule(
        name="replicas-go-back-together",
        broken_when=_goes_back_alone,
        says=lambda facts: (
            f"{facts.plan.sync!r} has each replica judge its own losses, and Guard(on_spike='rollback') would take one "
            "of them back to weights that the others have left."
        ),
        fix=lambda facts: "Use on_spike='skip' (the replica leaves out its step) or 'stop', or sync=AllReduce().",
    ),
    Rule(
        name="fragments-travel-between-replicas-that-stay",
        broken_when=lambda facts: _fragments_travel(facts) and facts.plan.layout.is_elastic,
        says=lambda facts: (
            f"{facts.plan.sync!r} has fragments of the weights under way while steps are taken, and with "
            f"{facts.plan.layout!r} a replica may be lost in between: there is no step at which all agree on all."
        ),
        fix=lambda facts: "Use fragments=1, overlap=0 and mixing=0, or replicas=n in place of the pair.",
    ),
    Rule(
        name="fragments-are-of-whole-layers",
        broken_when=lambda facts: (
            _fragments_travel(facts) and max(facts.plan.layout.tensor, facts.plan.layout.experts) > 1
        ),
        says=lambda facts: (
            f"{facts.plan.sync!r} divides parameters into fragments by their sizes, and with {facts.plan.layout!r} "
            "the workers of a replica have parts of different sizes."
        ),
        fix=lambda facts: "Use fragments=1, overlap=0 and mixing=0, or shard=n in place of tensor and experts.",
    ),
    Rule(
        name="gossip-sends-weights",
        broken_when=lambda facts: isinstance(facts.plan.sync, Gossip) and not isinstance(facts.plan.wire, Raw),
        says=lambda facts: (
            f"{facts.plan.sync!r} sends weights, and wire={facts.plan.wire!r} is for what may come later, or rounded."
        ),
        fix=lambda facts: "Use wire=Raw(), or sync=LocalSGD(every=n), which goes with every wire.",
    ),
    Rule(
        name="streaming-replicas-agree-in-each-step",
        broken_when=lambda facts: _streams(facts) and facts.plan.is_local,
        says=lambda facts: (
            f"Compute(offload='all') keeps parameters on the host, and {facts.plan.sync!r} needs those that all agreed "
            "on beside them, which does not work together yet."
        ),
        fix=lambda facts: "Use offload='optimizer', or sync=AllReduce().",
    ),
    Rule(name="micro-fits-size", broken_when=_micro_exceeds_size, says=_micro_says, fix=_micro_fix),
    Rule(name="work-for-every-worker", broken_when=_workers_would_idle, says=_idle_says, fix=_idle_fix),
    Rule(
        name="reference-travels-whole",
        broken_when=_reference_is_rounded,
        says=lambda facts: (
            f"Compute(precision='fp64') is the exact reference, but wire={facts.plan.wire!r} rounds or leaves out a "
            "part of each gradient."
        ),
        fix=lambda facts: "Use wire=Raw(), or precision='fp32'.",
    ),
    Rule(
        name="combined-gradients-are-not-coded",
        broken_when=_combined_are_coded,
        says=lambda facts: (
            f"AllReduce(op='adasum') with wire={facts.plan.wire!r}: what this wire does not send it sends later, but "
            "what is combined is no sum, to which one could add."
        ),
        fix=lambda facts: "Use wire=Raw() or Cast(dtype='bf16'), or op='mean'.",
    ),
    Rule(
        name="combined-gradients-are-whole-replicas",
        broken_when=_combined_are_parts,
        says=lambda facts: (
            f"AllReduce(op='adasum') with {facts.plan.layout!r}: there all workers of all replicas sum their gradients "
            "at once, and what one replica's are nobody knows."
        ),
        fix=lambda facts: "Use shard, tensor or stages, alone or beside these axes, or op='mean'.",
    ),
    Rule(
        name="served-replicas-are-whole",
        broken_when=_served_are_cut,
        says=lambda facts: (
            f"ParameterServer(...) with {facts.plan.layout!r}: servers hold whole parameters, and each worker of "
            "such a replica has a part of them, which it cannot push yet."
        ),
        fix=lambda facts: "Use sync=AllReduce(), or replicas of one worker.",
    ),
    Rule(
        name="turns-have-no-common-weights",
        broken_when=_turns_are_compared,
        says=lambda facts: (
            f"ParameterServer({_own_pace(facts)}) with Guard(check_every={facts.plan.guard.check_every}): "
            "replicas that do not wait for each other have different weights, so there is nothing to compare."
        ),
        fix=lambda facts: f"Use check_every=0, or {'drop' if facts.plan.has_backup_workers else 'staleness'}=0.",
    ),
    Rule(
        name="backups-are-of-those-who-began",
        broken_when=_backups_are_elastic,
        says=lambda facts: (
            f"ParameterServer(drop={_drop(facts)}) with {facts.plan.layout!r}: how many replicas a step may do without "
            "is counted from the replicas that began, so their number must be fixed."
        ),
        fix=lambda facts: "Use drop=0, or replicas=n in place of the pair.",
    ),
    Rule(
        name="somebody-is-no-backup",
        broken_when=_all_are_backups,
        says=lambda facts: (
            f"ParameterServer(drop={_drop(facts)}) with {_count(_num_replicas(facts), 'replica')}: nobody would be "
            "left whose gradients count."
        ),
        fix=lambda facts: f"Use drop={_num_replicas(facts) - 1} or less, or replicas={_drop(facts) + 1} or more.",
    ),
    Rule(
        name="a-bound-leaves-work-for-all",
        broken_when=_bound_keeps_replicas_idle,
        says=lambda facts: (
            f"ParameterServer(staleness={_shown(facts)}) with {_count(_num_replicas(facts), 'replica')}: when each has "
            f"a batch, the last update is {_num_replicas(facts) - 1} behind, so only {_staleness(facts) + 1} of them "
            "could ever work at a time."
        ),
        fix=lambda facts: f"Use staleness={_num_replicas(facts) - 1} or more, None, or 0.",
    ),
    Rule(
        name="servers-get-gradients-as-they-are",
        broken_when=_served_are_coded,
        says=lambda facts: (
            f"ParameterServer(...) with wire={facts.plan.wire!r}: servers add up gradients as they are or rounded, and "
            "know no other codec yet."
        ),
        fix=lambda facts: "Use wire=Raw() or Cast(dtype='bf16'), or sync=AllReduce().",
    ),
    Rule(
        name="served-state-is-elsewhere",
        broken_when=lambda facts: _is_served(facts) and facts.plan.compute.offload != "none",
        says=lambda facts: (
            f"ParameterServer(...) with Compute(offload={facts.plan.compute.offload!r}): the optimizer's state is on "
            "the servers already, so there is nothing to put elsewhere."
        ),
        fix=lambda facts: "Use offload='none'.",
    ),
    Rule(
        name="servers-do-not-go-back",
        broken_when=_served_go_back,
        says=lambda facts: (
            f"ParameterServer(...) with {facts.plan.guard!r}: snapshots are taken of what a worker has, and the "
            "optimizer's state is on the servers."
        ),
        fix=lambda facts: "Use on_spike='skip' or 'stop' without snapshot_every, or sync=AllReduce().",
    ),
    Rule(
        name="rows-travel-number-by-number",
        broken_when=_slices_are_sent,
        says=lambda facts: (
            f"wire={facts.plan.wire!r} looks at whole matrices, and under Layout(shard={facts.plan.layout.shard}) each "
            "worker has only some rows of each."
        ),
        fix=lambda facts: "Use a wire for single numbers (Cast, Int8, OneBit or TopK), or shard=1.",
    ),
)
