"""Which ways to agree keep the losses of one process, and what the others change: those are offered apart.

A plan that is faster and learns otherwise is no better plan, so it never ranks above an exact one. The menu goes from
gentle to coarse, by the held-out losses in docs/explanation/compression.md; a coarser way is named only where it saves
clearly more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from paceline.plan import (
    AllReduce,
    Cast,
    Gossip,
    Int8,
    LocalSGD,
    Nesterov,
    OneBit,
    ParameterServer,
    Plan,
    PowerSGD,
    Raw,
    Sync,
    TopK,
    Wire,
)
from paceline.planner.search import PricedPlan

__all__ = ["CLEARLY", "MENU", "LossyPlan", "lossy_plans", "what_changes"]

MENU: tuple[tuple[Sync, Wire], ...] = (
    (AllReduce(), Cast(dtype="bf16")),
    (AllReduce(), Int8()),
    (Gossip(), Raw()),
    (LocalSGD(every=8), Raw()),
    (LocalSGD(every=64, outer=Nesterov()), Raw()),
    (ParameterServer(staleness=None), Raw()),
    (AllReduce(), PowerSGD()),
    (AllReduce(), OneBit()),
    (AllReduce(), TopK(ratio=0.01)),
)
CLEARLY = 0.95  # of the step before it in the menu, and of the exact one: closer ones are not worth another loss


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossyPlan:
    """A plan that is faster than every exact one, and what it changes, in half a sentence."""

    priced: PricedPlan
    changes: str


def what_changes(plan: Plan) -> str:
    """Say how a plan's losses come to differ from those of one process; "" where they do not."""
    said = [one for one in (_of_sync(plan.sync), _of_wire(plan.wire)) if one]
    return "; ".join(said)


def _of_sync(sync: Sync) -> str:
    match sync:
        case AllReduce(op="adasum"):
            return "gradients are combined by Adasum"
        case LocalSGD(every=every, outer=outer):
            means = "replicas average only every" if outer is None else "DiLoCo: replicas agree only every"
            return f"{means} {every} steps"
        case Gossip(peers=peers):
            return f"replicas mix weights with {'two neighbors' if peers == 'ring' else 'one partner'} only"
        case ParameterServer(staleness=None):
            return "updates are computed on older weights"
        case ParameterServer(staleness=staleness) if staleness:
            return f"updates are computed on weights up to {staleness} updates old"
        case ParameterServer(drop=drop) if drop:
            return f"the samples of the slowest {drop} are left out"
        case _:
            return ""


def _of_wire(wire: Wire) -> str:
    match wire:
        case Cast(dtype=dtype):
            return f"gradients are rounded to {dtype}"
        case Int8():
            return "gradients are rounded to 8 bits"
        case OneBit():
            return "of gradients only the signs are sent, the rest later"
        case PowerSGD(rank=rank):
            return f"of gradients a part of rank {rank} is sent, the rest later"
        case TopK(ratio=ratio):
            return f"of gradients the largest {100 * ratio:.3g} % are sent, the rest later"
        case Raw() | _:
            return ""


def _fitting(plan: Plan, reprice: Callable[[Plan], PricedPlan | None]) -> PricedPlan | None:
    """The plan's price where it surely fits, with recompute if only that does: copies and feedback take memory."""
    lean = dataclasses.replace(plan, compute=dataclasses.replace(plan.compute, recompute="blocks"))
    for one in map(reprice, dict.fromkeys((plan, lean))):
        if one is not None and one.fits == "fits":
            return one
    return None


def lossy_plans(exact: Sequence[PricedPlan], reprice: Callable[[Plan], PricedPlan | None]) -> list[LossyPlan]:
    """Return, of the best exact plan of each layout with every way of the menu, those that surely fit and are clearly
    faster than all exact ones: one of each way, each faster than the gentler ones before it.

    `reprice(plan)`: its price, or None where it breaks a rule or does not run there.
    """
    fitting = [one for one in exact if one.fits == "fits"]
    limit = min((one.step.step_s for one in fitting), default=float("inf"))
    found: list[LossyPlan] = []
    for sync, wire in MENU:
        plans = (dataclasses.replace(one.plan, sync=sync, wire=wire) for one in fitting if one.case.axes.replicas > 1)
        priced = [one for plan in plans if (one := _fitting(plan, reprice)) is not None]
        best = min(priced, key=lambda one: (round(one.step.step_s, 9), len(str(one.plan))), default=None)
        if best is not None and best.step.step_s < CLEARLY * limit:
            limit = best.step.step_s
            found.append(LossyPlan(priced=best, changes=what_changes(best.plan)))
    return found
