"""A plan of Paceline as a case of the cost model."""

from __future__ import annotations

import math

from paceline.errors import PlanError
from paceline.plan import ParameterServer, Plan
from paceline.planner.axes import Axes
from paceline.planner.case import Case, Recompute
from paceline.planner.cluster import Cluster
from paceline.planner.model_costs import ModelCosts
from paceline.planner.software import paceline

__all__ = ["case_of", "why_not_there"]

RECOMPUTE: dict[str, Recompute] = {"none": "none", "blocks": "full", "selective": "selective"}


def case_of(plan: Plan, model: ModelCosts, cluster: Cluster, *, workers: int) -> Case:
    """Return what a step of this plan is on so many workers of a cluster.

    Each data-parallel worker runs its share of the batch's micro-batches, the largest one where they do not divide; a
    replica that pushes updates of its own runs all of them. Raises PlanError for what the cost model does not know
    (fp64), for what does not run on such devices, and for more workers than the cluster has devices.
    """
    if plan.compute.precision == "fp64":
        raise PlanError("The cost model has no rates for precision=fp64: predict with fp32, bf16, fp16 or fp8.")
    if workers > cluster.devices:
        raise PlanError(f"The plan is for {workers} workers, and the cluster has {cluster.devices} devices.")
    why = why_not_there(plan, cluster)
    if why:
        raise PlanError(why)
    axes, batch = Axes.of(plan.layout, workers), plan.batch
    takes_whole_batches = isinstance(plan.sync, ParameterServer) and plan.sync.staleness != 0
    return Case(
        model=model,
        cluster=cluster,
        axes=axes,
        micro_batch=min(batch.resolved_micro, batch.size),
        micro_batches=max(1, math.ceil(batch.num_micro / (1 if takes_whole_batches else axes.data))),
        software=paceline(compiles=plan.compute.compile),
        precision=plan.compute.precision,
        recompute=RECOMPUTE[plan.compute.recompute],
        sync=plan.sync,
        wire=plan.wire,
        offload=plan.compute.offload,
        on_disk=plan.compute.offload_path is not None,
        state=plan.compute.state,
    )


def why_not_there(plan: Plan, cluster: Cluster) -> str:
    """Say why a plan does not run on such devices; "" where it does."""
    if isinstance(plan.sync, ParameterServer) and not cluster.device.is_synchronous:
        return (
            f"ParameterServer(...) is built for the CPU so far, not for {cluster.device.name}: predict with "
            "sync=AllReduce(), or on a cluster of CPUs."
        )
    if plan.compute.precision == "fp8" and (plan.compute.fp8_emulate or "fp8" not in cluster.device.peak):
        what = "emulated FP8" if plan.compute.fp8_emulate else f"FP8 on {cluster.device.name}"
        return f"Compute(precision='fp8'): there is no published rate for {what}. Predict with precision='bf16'."
    offload = plan.compute.offload
    gains = offload == "none" or (offload == "optimizer" and plan.compute.offload_path is not None)
    if cluster.device.is_synchronous and not gains:
        return (
            f"Compute(offload={offload!r}) keeps state in the host's memory, and {cluster.device.name} computes there: "
            "nothing would be gained. Use Compute(offload='optimizer', offload_path=...), or offload='none'."
        )
    return ""
