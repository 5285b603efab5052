"""Which plans a number of workers could run, and how they rank: every layout, micro-batch and recompute, priced.

What rules forbid is left out. The rest is priced, which takes a tenth of a millisecond each, and ranked: what fits
first, then what may fit, then what does not, by the memory that it lacks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence

from paceline.plan import Batch, Compute, Layout, Plan
from paceline.planner.cluster import Cluster
from paceline.planner.constants import Calibration
from paceline.planner.correction import UNCORRECTED, Correction
from paceline.planner.memory import MemoryPrediction, Verdict, predict_memory, verdict
from paceline.planner.model_costs import ModelCosts
from paceline.planner.plan_case import case_of
from paceline.planner.predict import Case, Prediction, Workload
from paceline.units import gigabytes_text

__all__ = ["PricedPlan", "candidates", "least_workers", "price", "remedy", "search"]

ORDER: dict[Verdict, int] = {"fits": 0, "unsure": 1, "does not fit": 2}
MOST_SHARD = 512  # workers that split one replica's state
SPREADS = {"none": 0.25, "memory none": 0.25}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PricedPlan:
    """A plan with what it is predicted to cost, and whether it fits. `estimated` and `estimated_bytes` are the cost
    model's own words, which `step` and `memory` correct by what was measured on the cluster.
    """

    plan: Plan
    case: Case
    step: Prediction
    memory: MemoryPrediction
    fits: Verdict
    estimated: Prediction
    estimated_bytes: float

    @property
    def samples_per_s(self) -> float:
        return self.plan.batch.size / self.step.step_s


def price(
    plan: Plan,
    model: ModelCosts,
    cluster: Cluster,
    calibration: Calibration,
    *,
    workers: int,
    state: float | None = None,
    correction: Correction = UNCORRECTED,
) -> PricedPlan:
    """Predict one plan. `state`: bytes of weights, gradients and optimizer, where they are known exactly. `correction`:
    by what was measured on this cluster.
    """
    case = case_of(plan, model, cluster, workers=workers)
    uncorrected = predict_memory(case, state=state)
    memory = correction.of_memory(uncorrected)
    estimated = Workload(case).predict(calibration.constants)
    half_width = calibration.spreads.get("memory none", SPREADS["memory none"])
    return PricedPlan(
        plan=plan,
        case=case,
        step=correction.of_step(estimated),
        memory=memory,
        fits=verdict(case, memory, half_width=half_width),
        estimated=estimated,
        estimated_bytes=uncorrected.peak,
    )


def candidates(plan: Plan, model: ModelCosts, *, workers: int, per_host: int) -> Iterator[Plan]:
    """Yield the plans that so many workers could run with this plan's batch and precision, and that no rule forbids.

    Tensor parallel stays within a host and divides attention's heads; stages do not outnumber blocks; experts are
    spread where the model has routed ones.
    """
    for tensor in _tensor_sizes(model, workers, per_host):
        for stages in _divisors(workers // tensor):
            if stages > model.count:
                continue
            data = workers // (tensor * stages)
            for layout in _with_experts(_layouts(tensor, stages, data), model):
                for micro in _micro_batches(plan.batch, data, least=stages):
                    for recompute in ("none", "blocks"):
                        compute = dataclasses.replace(plan.compute, recompute=recompute)
                        batch = dataclasses.replace(plan.batch, micro=micro)
                        yield from _allowed(plan, layout, batch, compute, workers)


def _tensor_sizes(model: ModelCosts, workers: int, per_host: int) -> list[int]:
    """Sizes that the tensor layout takes: they divide the heads of queries, and those of keys and values, but for a
    single one, which every worker holds (`parallel/tensor/find_plan.py`)."""
    counts = [
        (one.attention.heads, one.attention.kv_heads if one.attention.kv_heads > 1 else one.attention.heads)
        for one in model.blocks
        if one.attention is not None
    ]
    legal = [n for n in _divisors(workers) if n <= per_host and all(h % n == 0 == kv % n for h, kv in counts)]
    return legal if counts else [1]


def _with_experts(layouts: Iterator[Layout], model: ModelCosts) -> Iterator[Layout]:
    """Each layout, and it with replicas among which routed experts are spread evenly."""
    routed = math.gcd(*(one.experts for one in model.blocks if one.experts > 1 and one.expert_parameters))
    for layout in layouts:
        yield layout
        for experts in _divisors(routed) if routed else ():
            if experts > 1 and isinstance(layout.replicas, int) and layout.replicas % experts == 0:
                yield dataclasses.replace(layout, replicas=layout.replicas // experts, experts=experts)


def _layouts(tensor: int, stages: int, data: int) -> Iterator[Layout]:
    """Layouts whose replicas, together with shards, make up `data`."""
    for sequence in (False, True) if tensor > 1 else (False,):
        for schedule in ("1f1b", "zero-bubble") if stages > 1 else ("1f1b",):
            for shard in [n for n in _divisors(data) if n in (1, data) or n == 8]:
                for zero in (3, 1) if 1 < shard <= MOST_SHARD else (3,):
                    yield Layout(
                        replicas=data // shard,
                        shard=shard,
                        zero=zero,
                        tensor=tensor,
                        sequence=sequence,
                        stages=stages,
                        schedule=schedule,
                    )


def _allowed(plan: Plan, layout: Layout, batch: Batch, compute: Compute, workers: int) -> Iterator[Plan]:
    made = dataclasses.replace(plan, layout=layout, batch=batch, compute=compute)
    if not made.check(workers=workers):
        yield made


def _micro_batches(batch: Batch, data: int, *, least: int) -> list[int]:
    """Powers of two that give every data-parallel worker as many micro-batches, and at least as many as stages."""
    share = batch.size // data
    if share < least or batch.size % data:
        return []
    return [1 << power for power in range(int(math.log2(share // least)) + 1) if share % (1 << power) == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def search(
    plan: Plan,
    model: ModelCosts,
    cluster: Cluster,
    calibration: Calibration,
    *,
    workers: int,
    correct: Callable[[Plan], Correction] = lambda _: UNCORRECTED,
    without: Collection[Plan] = (),
) -> Sequence[PricedPlan]:
    """Return the best candidate of each layout, the best first; the same each time. Of equal ones the simpler plan
    comes first.

    `correct`: by what was measured of plans like a given one. One layout has several candidates: its micro-batches,
    recompute, and schedules. Plans of `without` are left out.
    """
    found = sorted(
        (
            price(one, model, cluster, calibration, workers=workers, correction=correct(one))
            for one in candidates(plan, model, workers=workers, per_host=cluster.devices_per_host)
            if one not in without
        ),
        key=_rank,
    )
    best: dict[Layout, PricedPlan] = {}
    for one in found:
        best.setdefault(dataclasses.replace(one.plan.layout, schedule="1f1b", sequence=False), one)
    return list(best.values())


def least_workers(
    plan: Plan, model: ModelCosts, cluster: Cluster, calibration: Calibration, *, most: int = 4096
) -> PricedPlan | None:
    """Return a plan for as few of such devices as surely hold the model with this batch, or None up to `most` of them.

    Tried are 1 to 8 workers and powers of two, with micro-batches of one sample and recompute.
    """
    lean = dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, micro=1))
    for workers in [*range(1, 8), *(1 << power for power in range(3, most.bit_length()))]:
        enough = dataclasses.replace(cluster, hosts=math.ceil(workers / cluster.devices_per_host))
        found = [
            price(one, model, enough, calibration, workers=workers)
            for one in candidates(lean, model, workers=workers, per_host=cluster.devices_per_host)
            if one.batch.micro == 1 and one.compute.recompute == "blocks"
        ]
        best = min((one for one in found if one.fits == "fits"), key=_rank, default=None)
        if best is not None:
            return best
    return None


def remedy(plan: Plan, model: ModelCosts, cluster: Cluster, calibration: Calibration, *, workers: int) -> str:
    """Say in words which plan surely fits with this batch and precision: of so many workers, or of as few as can be."""
    for one in search(plan, model, cluster, calibration, workers=workers):
        if one.fits == "fits":
            return f"{gigabytes_text(one.memory.peak)} GB with {one.plan}"
    least = least_workers(plan, model, cluster, calibration)
    memory = gigabytes_text(cluster.device.memory)
    if least is None:
        return f"none with devices of {memory} GB and this batch: a smaller model, or devices of more memory"
    count = least.case.axes.workers
    return (
        f"it needs at least {count} {'worker' if count == 1 else 'workers'} of {memory} GB: "
        f"{gigabytes_text(least.memory.peak)} GB with {least.plan}"
    )


def _rank(one: PricedPlan) -> tuple[float, ...]:
    order = ORDER[one.fits]
    cost = one.memory.peak if one.fits == "does not fit" else one.step.step_s
    return (order, round(math.log(cost), 3), len(str(one.plan)))
