"""Which plans a number of workers could run, and how they rank: every layout, micro-batch and recompute, priced.

What rules forbid is left out. The rest is priced, which takes a quarter of a millisecond each, and ranked: what fits
first, then what may fit, then what does not, by the memory that it lacks. Replicas agree exactly, or as in the given
plan (others are in `lossy_plans`). Offload comes in only where a layout does not surely fit without it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from paceline.plan import AllReduce, Batch, Compute, Layout, Plan, Raw, Sync, Wire
from paceline.planner.bands import step_half_width
from paceline.planner.case import Case
from paceline.planner.cluster import Cluster
from paceline.planner.constants import Calibration
from paceline.planner.correction import UNCORRECTED, Correction
from paceline.planner.memory import VERDICTS, MemoryPrediction, Verdict, predict_memory, verdict
from paceline.planner.model_costs import ModelCosts
from paceline.planner.plan_case import case_of, why_not_there
from paceline.planner.predict import Prediction, Workload
from paceline.units import gigabytes_text

__all__ = [
    "PricedPlan",
    "candidates",
    "is_exact",
    "lack_text",
    "least_workers",
    "micro_batches",
    "price",
    "remedy",
    "search",
]

MOST_SHARD = 512  # workers that split one replica's state
SPREADS = {"none": 0.25, "memory none": 0.25}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PricedPlan:
    """A plan with what it is predicted to cost, and whether it fits. `estimated` and `estimated_bytes` are the cost
    model's own words, which `step` and `memory` correct by what was measured on the cluster. `half_width`: of the 80 %
    band of the step's seconds, of the logarithm.
    """

    plan: Plan
    case: Case
    step: Prediction
    memory: MemoryPrediction
    fits: Verdict
    estimated: Prediction
    estimated_bytes: float
    half_width: float

    @property
    def lacking_bytes(self) -> float:
        """What the device, or its share of the host, lacks of memory; 0 where both have enough."""
        cluster = self.case.cluster
        on_device = self.memory.peak - cluster.device.memory
        return max(0.0, on_device, self.memory.elsewhere - cluster.host_memory / self.case.on_host)

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
        half_width=step_half_width(case, calibration, correction),
    )


def is_exact(plan: Plan) -> bool:
    """Whether a plan's losses are those of one process, to rounding, whatever its layout."""
    return plan.wire.exact and plan.sync.exact_with_fewer


def candidates(plan: Plan, model: ModelCosts, *, workers: int, per_host: int) -> Iterator[Plan]:
    """Yield the plans that so many workers could run with this plan's batch and precision, and that no rule forbids,
    without offload: replicas agree by all-reduce, and as in this plan.

    Tensor parallel stays within a host and divides attention's heads; stages do not outnumber blocks; experts are
    spread where the model has routed ones.
    """
    resident = dataclasses.replace(plan.compute, offload="none", offload_path=None)
    plan = dataclasses.replace(plan, compute=resident)
    yield from _layouts_of(plan, model, workers=workers, per_host=per_host)
    if not (isinstance(plan.sync, AllReduce) and plan.sync.op == "mean" and isinstance(plan.wire, Raw)):
        exact = dataclasses.replace(plan, sync=AllReduce(), wire=Raw())
        yield from _layouts_of(exact, model, workers=workers, per_host=per_host)


def _layouts_of(plan: Plan, model: ModelCosts, *, workers: int, per_host: int) -> Iterator[Plan]:
    for tensor in _tensor_sizes(model, workers, per_host):
        for stages in _divisors(workers // tensor):
            if stages > model.count:
                continue
            data = workers // (tensor * stages)
            for layout in _with_experts(_layouts(tensor, stages, data), model):
                for micro in micro_batches(plan.batch, data, least=stages):
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


def micro_batches(batch: Batch, data: int, *, least: int) -> list[int]:
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
    recompute, schedules, and where none of these surely fits, offload. Plans of `without` are left out.
    """

    def priced(plans: Iterable[Plan]) -> list[PricedPlan]:
        return [
            price(one, model, cluster, calibration, workers=workers, correction=correct(one))
            for one in plans
            if one not in without and not why_not_there(one, cluster)
        ]

    per_host = cluster.devices_per_host
    best = _best_of_layouts(priced(candidates(plan, model, workers=workers, per_host=per_host)))
    lean = [one.plan for one in best if one.fits != "fits"]
    offloaded = priced(other for one in lean for other in _offloaded(one, workers=workers))
    return _best_of_layouts([*best, *offloaded]) if offloaded else best


def _best_of_layouts(found: Iterable[PricedPlan]) -> list[PricedPlan]:
    best: dict[tuple[Layout, Sync, Wire] | Layout, PricedPlan] = {}
    for one in sorted(found, key=_rank):
        cuts = dataclasses.replace(one.plan.layout, schedule="1f1b", sequence=False)
        alone = one.case.axes.replicas == 1  # has nobody to agree with
        best.setdefault(cuts if alone else (cuts, one.plan.sync, one.plan.wire), one)
    return list(best.values())


def _offloaded(plan: Plan, *, workers: int) -> Iterator[Plan]:
    """The plan with its optimizer's state on the host, and with all of it, in its own and the smallest micro-batches,
    with and without recompute.
    """
    for offload in ("optimizer", "all"):
        for micro in dict.fromkeys((plan.batch.resolved_micro, 1)):
            for recompute in ("none", "blocks"):
                compute = dataclasses.replace(plan.compute, offload=offload, recompute=recompute)
                batch = dataclasses.replace(plan.batch, micro=micro)
                yield from _allowed(plan, plan.layout, batch, compute, workers)


def lack_text(one: PricedPlan) -> str:
    """Say what of the device's memory a plan lacks and what takes most of it, or what of the host's."""
    if one.memory.peak <= one.case.cluster.device.memory:
        needed, there = one.memory.elsewhere * one.case.on_host, one.case.cluster.host_memory
        return f"needs {gigabytes_text(needed)} GB of each host's memory, of {gigabytes_text(there)} GB"
    parts = sorted(one.memory.parts.items(), key=lambda part: -part[1])[:2]
    said = ", ".join(f"{name} {gigabytes_text(value)} GB" for name, value in parts)
    return f"lacks {gigabytes_text(one.lacking_bytes)} GB: {said}"


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
            if one.batch.micro == 1 and one.compute.recompute == "blocks" and not why_not_there(one, enough)
        ]
        best = min((one for one in found if one.fits == "fits"), key=_rank, default=None)
        if best is not None:
            return best
    return None


def remedy(plan: Plan, model: ModelCosts, cluster: Cluster, calibration: Calibration, *, workers: int) -> str:
    """Say in words which plan surely fits with this batch and precision: of so many workers, or of as few as can be;
    and beside these one that offloads, where only that fits these workers.
    """
    fitting = [one for one in search(plan, model, cluster, calibration, workers=workers) if one.fits == "fits"]
    resident = next((one for one in fitting if one.plan.compute.offload == "none"), None)
    if resident is not None:
        return _memory_text(resident)
    least = least_workers(plan, model, cluster, calibration)
    memory = gigabytes_text(cluster.device.memory)
    said: list[str] = []
    if least is not None:
        count = _workers_text(least.case.axes.workers)
        said.append(f"it needs at least {count} of {memory} GB: {_memory_text(least)}")
    if fitting:
        said.append(f"on {_workers_text(workers)} {_memory_text(fitting[0])}")
    return ", or ".join(said) or (
        f"none with devices of {memory} GB and this batch: a smaller model, or devices of more memory"
    )


def _memory_text(one: PricedPlan) -> str:
    elsewhere = f" and {gigabytes_text(one.memory.elsewhere)} GB of the host's" if one.memory.elsewhere else ""
    return f"{gigabytes_text(one.memory.peak)} GB{elsewhere} with {one.plan}"


def _workers_text(count: int) -> str:
    return f"{count} {'worker' if count == 1 else 'workers'}"


def _rank(one: PricedPlan) -> tuple[float, ...]:
    order = VERDICTS.index(one.fits)
    cost = one.lacking_bytes if one.fits == "does not fit" else one.step.step_s
    return (order, round(math.log(max(1e-9, cost)), 3), len(str(one.plan)))
