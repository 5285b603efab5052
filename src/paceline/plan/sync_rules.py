"""Rules of how replicas agree: which layout, wire and guard each kind of `sync` works with."""

from __future__ import annotations

from paceline.plan.rules import PlanFacts, Rule, count_text, streams_parameters
from paceline.plan.sync import Gossip, LocalSGD, ParameterServer
from paceline.plan.wire import Cast, Raw

__all__ = ["SYNC_RULES"]


def _reference_is_rounded(facts: PlanFacts) -> bool:
    return facts.plan.compute.precision == "fp64" and not facts.plan.wire.exact


def _rows_are_coded_whole(facts: PlanFacts) -> bool:
    return facts.plan.layout.shard > 1 and not facts.plan.wire.elementwise


def _is_adasum(facts: PlanFacts) -> bool:
    return getattr(facts.plan.sync, "op", "mean") == "adasum"


def _adasum_is_coded(facts: PlanFacts) -> bool:
    wire = facts.plan.wire
    return _is_adasum(facts) and (type(wire).__name__ not in ("Raw", "Cast") or wire.feedback)


def _adasum_of_partial_replicas(facts: PlanFacts) -> bool:
    layout = facts.plan.layout
    return _is_adasum(facts) and layout.workers_each > 1 and layout.workers_each in (layout.experts, layout.context)


def _has_servers(facts: PlanFacts) -> bool:
    return isinstance(facts.plan.sync, ParameterServer)


def _served_replicas_are_split(facts: PlanFacts) -> bool:
    return _has_servers(facts) and facts.plan.layout.workers_each > 1


def _backup_workers_are_elastic(facts: PlanFacts) -> bool:
    return facts.plan.has_backup_workers and facts.plan.layout.is_elastic


def _all_are_backup_workers(facts: PlanFacts) -> bool:
    replicas = _known_replicas(facts)
    return replicas is not None and 0 < _drop(facts) >= replicas


def _drop(facts: PlanFacts) -> int:
    return facts.plan.sync.drop if isinstance(facts.plan.sync, ParameterServer) else 0


def _async_replicas_are_compared(facts: PlanFacts) -> bool:
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
    """Where each replica is one worker; None: not known yet."""
    replicas = facts.plan.layout.replicas
    return replicas if isinstance(replicas, int) else facts.workers


def _server_wire_is_coded(facts: PlanFacts) -> bool:
    wire = facts.plan.wire
    return _has_servers(facts) and not (isinstance(wire, Raw) or (isinstance(wire, Cast) and not wire.feedback))


def _server_would_roll_back(facts: PlanFacts) -> bool:
    guard = facts.plan.guard
    return _has_servers(facts) and (guard.on_spike == "rollback" or bool(guard.snapshot_every))


def _rolls_back_alone(facts: PlanFacts) -> bool:
    return facts.plan.is_local and facts.plan.guard.on_spike == "rollback"


def _fragments_travel(facts: PlanFacts) -> bool:
    return isinstance(facts.plan.sync, LocalSGD) and facts.plan.sync.streams


def _staleness_text(facts: PlanFacts) -> str:
    return str(getattr(facts.plan.sync, "staleness", None))


def _async_setting(facts: PlanFacts) -> str:
    return f"drop={_drop(facts)}" if facts.plan.has_backup_workers else f"staleness={_staleness_text(facts)}"


SYNC_RULES = (
    Rule(
        name="replicas-roll-back-together",
        broken_when=_rolls_back_alone,
        says=lambda facts: (
            f"{facts.plan.sync!r} has each replica judge its own losses, so Guard(on_spike='rollback') would return "
            "one of them to weights that the others no longer have."
        ),
        fix=lambda facts: "Use on_spike='skip' (the replica leaves out its step) or 'stop', or sync=AllReduce().",
    ),
    Rule(
        name="fragments-need-fixed-replicas",
        broken_when=lambda facts: _fragments_travel(facts) and facts.plan.layout.is_elastic,
        says=lambda facts: (
            f"{facts.plan.sync!r} sends fragments of the weights while steps are taken, and with "
            f"{facts.plan.layout!r} a replica may be lost in between: at no step do all replicas agree on all weights."
        ),
        fix=lambda facts: "Use fragments=1, overlap=0 and mixing=0, or replicas=n in place of the pair.",
    ),
    Rule(
        name="fragments-need-whole-layers",
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
        name="gossip-sends-plain-weights",
        broken_when=lambda facts: isinstance(facts.plan.sync, Gossip) and not isinstance(facts.plan.wire, Raw),
        says=lambda facts: (
            f"{facts.plan.sync!r} sends weights, and wire={facts.plan.wire!r} would round them, or delay a part."
        ),
        fix=lambda facts: "Use wire=Raw(), or sync=LocalSGD(every=n), which goes with every wire.",
    ),
    Rule(
        name="streaming-needs-synchronous-steps",
        broken_when=lambda facts: streams_parameters(facts) and facts.plan.is_local,
        says=lambda facts: (
            f"Compute(offload='all') keeps parameters on the host, and {facts.plan.sync!r} also needs the last ones "
            "that all replicas agreed on, which is not supported together yet."
        ),
        fix=lambda facts: "Use offload='optimizer', or sync=AllReduce().",
    ),
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
        name="adasum-is-not-coded",
        broken_when=_adasum_is_coded,
        says=lambda facts: (
            f"AllReduce(op='adasum') with wire={facts.plan.wire!r}: this wire sends later what it leaves out, but "
            "Adasum's result is no sum to which that could be added."
        ),
        fix=lambda facts: "Use wire=Raw() or Cast(dtype='bf16'), or op='mean'.",
    ),
    Rule(
        name="adasum-needs-whole-replicas",
        broken_when=_adasum_of_partial_replicas,
        says=lambda facts: (
            f"AllReduce(op='adasum') with {facts.plan.layout!r}: there all workers of all replicas sum their gradients "
            "at once, so the gradient of one replica is never known."
        ),
        fix=lambda facts: "Use shard, tensor or stages, alone or beside these axes, or op='mean'.",
    ),
    Rule(
        name="parameter-server-needs-whole-replicas",
        broken_when=_served_replicas_are_split,
        says=lambda facts: (
            f"ParameterServer(...) with {facts.plan.layout!r}: servers hold whole parameters, and each worker of "
            "such a replica has only a part, which it cannot push yet."
        ),
        fix=lambda facts: "Use sync=AllReduce(), or replicas of one worker.",
    ),
    Rule(
        name="async-replicas-have-no-common-weights",
        broken_when=_async_replicas_are_compared,
        says=lambda facts: (
            f"ParameterServer({_async_setting(facts)}) with Guard(check_every={facts.plan.guard.check_every}): "
            "replicas that do not wait for each other have different weights, so there is nothing to compare."
        ),
        fix=lambda facts: f"Use check_every=0, or {'drop' if facts.plan.has_backup_workers else 'staleness'}=0.",
    ),
    Rule(
        name="backup-workers-need-fixed-replicas",
        broken_when=_backup_workers_are_elastic,
        says=lambda facts: (
            f"ParameterServer(drop={_drop(facts)}) with {facts.plan.layout!r}: how many replicas a step may do without "
            "is counted from the replicas that began, so their number must be fixed."
        ),
        fix=lambda facts: "Use drop=0, or replicas=n in place of the pair.",
    ),
    Rule(
        name="not-all-are-backup-workers",
        broken_when=_all_are_backup_workers,
        says=lambda facts: (
            f"ParameterServer(drop={_drop(facts)}) with {count_text(_num_replicas(facts), 'replica')}: no replica "
            "would be left whose gradients count."
        ),
        fix=lambda facts: f"Use drop={_num_replicas(facts) - 1} or less, or replicas={_drop(facts) + 1} or more.",
    ),
    Rule(
        name="staleness-bound-leaves-work-for-all",
        broken_when=_bound_keeps_replicas_idle,
        says=lambda facts: (
            f"ParameterServer(staleness={_staleness_text(facts)}) with {count_text(_num_replicas(facts), 'replica')}: "
            f"when each has a batch, the last update is {_num_replicas(facts) - 1} behind, so only "
            f"{_staleness(facts) + 1} of them could ever work at a time."
        ),
        fix=lambda facts: f"Use staleness={_num_replicas(facts) - 1} or more, None, or 0.",
    ),
    Rule(
        name="parameter-server-sums-plain-gradients",
        broken_when=_server_wire_is_coded,
        says=lambda facts: (
            f"ParameterServer(...) with wire={facts.plan.wire!r}: servers add up gradients as they are or rounded, and "
            "know no other codec yet."
        ),
        fix=lambda facts: "Use wire=Raw() or Cast(dtype='bf16'), or sync=AllReduce().",
    ),
    Rule(
        name="parameter-server-holds-optimizer-state",
        broken_when=lambda facts: _has_servers(facts) and facts.plan.compute.offload != "none",
        says=lambda facts: (
            f"ParameterServer(...) with Compute(offload={facts.plan.compute.offload!r}): the optimizer's state is on "
            "the servers already, so there is nothing to offload."
        ),
        fix=lambda facts: "Use offload='none'.",
    ),
    Rule(
        name="parameter-server-rounds-no-state",
        broken_when=lambda facts: _has_servers(facts) and facts.plan.compute.state != "fp32",
        says=lambda facts: (
            f"ParameterServer(...) with Compute(state={facts.plan.compute.state!r}): optimizers run on the servers, "
            "which keep their state in fp32."
        ),
        fix=lambda facts: "Use state='fp32', or sync=AllReduce().",
    ),
    Rule(
        name="parameter-server-does-not-roll-back",
        broken_when=_server_would_roll_back,
        says=lambda facts: (
            f"ParameterServer(...) with {facts.plan.guard!r}: snapshots are taken of what a worker has, and the "
            "optimizer's state is on the servers."
        ),
        fix=lambda facts: "Use on_spike='skip' or 'stop' without snapshot_every, or sync=AllReduce().",
    ),
    Rule(
        name="sharded-rows-need-elementwise-wire",
        broken_when=_rows_are_coded_whole,
        says=lambda facts: (
            f"wire={facts.plan.wire!r} looks at whole matrices, and under Layout(shard={facts.plan.layout.shard}) each "
            "worker has only some rows of each."
        ),
        fix=lambda facts: "Use a wire for single numbers (Cast, Int8, OneBit or TopK), or shard=1.",
    ),
)
