"""A plan of Paceline as a case of the cost model."""

from __future__ import annotations

import math

from paceline.errors import PlanError
from paceline.plan import AllReduce, Cast, Plan, Raw
from paceline.planner.axes import Axes
from paceline.planner.cluster import Cluster
from paceline.planner.model_costs import ModelCosts
from paceline.planner.predict import Case, Recompute
from paceline.planner.software import paceline

__all__ = ["case_of"]

RECOMPUTE: dict[str, Recompute] = {"none": "none", "blocks": "full", "selective": "selective"}


def case_of(plan: Plan, model: ModelCosts, cluster: Cluster, *, workers: int) -> Case:
    """Return what a step of this plan is on so many workers of a cluster.

    Each data-parallel worker runs its share of the batch's micro-batches, the largest one where they do not divide.
    Raises PlanError for a plan that the cost model does not know (fp64, any sync but all-reduce, any wire but raw and
    cast, offload), and for more workers than the cluster has devices.
    """
    if plan.compute.precision == "fp64":
        raise PlanError("The cost model has no rates for precision=fp64: predict with fp32 or bf16.")
    if not isinstance(plan.sync, AllReduce):
        raise PlanError(f"The cost model does not know sync={plan.sync}: predict with allreduce.")
    if not isinstance(plan.wire, (Raw, Cast)):
        raise PlanError(f"The cost model does not know wire={plan.wire}: predict with raw or cast.")
    if plan.compute.offload != "none":
        raise PlanError(f"The cost model does not know offload={plan.compute.offload}: predict with offload=none.")
    if workers > cluster.devices:
        raise PlanError(f"The plan is for {workers} workers, and the cluster has {cluster.devices} devices.")
    axes = Axes.of(plan.layout, workers)
    batch = plan.batch
    micro = min(batch.resolved_micro, batch.size)
    return Case(
        model=model,
        cluster=cluster,
        axes=axes,
        micro_batch=micro,
        micro_batches=max(1, math.ceil(batch.num_micro / axes.data)),
        software=paceline(compiles=plan.compute.compile),
        precision="bf16" if plan.compute.precision == "bf16" else "fp32",
        recompute=RECOMPUTE[plan.compute.recompute],
        wire_bytes=2.0 if isinstance(plan.wire, Cast) else 4.0,
    )
