"""What is priced: a script's largest model under its plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.errors import PlanError
from paceline.plan import ParameterServer, Plan
from paceline.planner.axes import Axes
from paceline.planner.cluster import Cluster
from paceline.planner.constants import Calibration, built_in
from paceline.planner.correction import Correction
from paceline.planner.lossy_plans import LossyPlan, lossy_plans
from paceline.planner.model_costs import ModelCosts
from paceline.planner.named_cluster import NamedCluster
from paceline.planner.plan_case import why_not_there
from paceline.planner.receipt import Receipt, correction_of, read_receipts
from paceline.planner.search import PricedPlan, price, search
from paceline.units import count_text

if TYPE_CHECKING:
    from paceline.worker.script_inspection import InspectionReport

__all__ = ["Subject"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model's costs with the plan and the workers of its script.

    `state`: bytes of weights, gradients and optimizer on the fullest worker, where they are known. `remarks`: what is
    left out, or was guessed. `is_data`: it was counted on the script's data. `receipts`: of the cluster.
    """

    name: str
    model: ModelCosts
    plan: Plan
    workers: int
    state: int | None
    is_data: bool
    remarks: tuple[str, ...]
    calibration: Calibration
    receipts: tuple[Receipt, ...] = ()

    @classmethod
    def of(cls, found: InspectionReport) -> Subject:
        """Return what a script's inspection found; PlanError if nothing of it was counted."""
        if not found.costs:
            name, why = next(iter(found.not_counted.items()), ("the script", "it prepares no model"))
            raise PlanError(
                f"What a step of {name} costs could not be counted: {why or 'its loop has no stepper, and no sample'}. "
                "It is counted without values, in the forward of worker.stepper(...) on the script's data, or else on "
                "worker.prepare(model, sample=...)."
            )
        name, model = max(found.costs.items(), key=lambda one: one[1].model_flops(one[1].sequence))
        others = dict.fromkeys(one for one in (*found.costs, *found.not_counted) if one != name)
        remarks: list[str] = []
        if name in found.not_counted:
            why = found.not_counted[name] or "the loop has no worker.stepper"
            remarks.append(f"counted on a small input or the sample, not on the script's data: {why}")
        if others:
            remarks.append(f"only this model is priced, the largest one; not {', '.join(others)}")
        return cls(
            name=name,
            model=model,
            plan=found.plan,
            workers=found.workers,
            state=max((one.peak or 0 for one in found.sizes.get(name, [])), default=0) or None,
            is_data=name not in found.not_counted,
            remarks=tuple(remarks),
            calibration=built_in(),
        )

    def lines(self) -> Iterator[str]:
        """The model in words."""
        trained = "" if self.model.trained == self.model.parameters else f" ({count_text(self.model.trained)} trained)"
        sizes = f"{count_text(self.model.parameters)} parameters{trained}"
        flops = count_text(int(self.model.model_flops(self.model.sequence)))
        blocks = f"{self.model.count} blocks" if self.model.rest is not None else "one unit"
        yield (f"model    {self.name}: {sizes}, {blocks}, {flops} operations a sample (forward and backward)")
        for remark in self.remarks:
            yield f"         {remark}"

    @property
    def axes(self) -> Axes:
        """How the script's plan uses its workers."""
        return Axes.of(self.plan.layout, self.workers)

    @property
    def signature(self) -> str:
        """What tells receipts of this model from others."""
        return f"{self.name}/{self.model.parameters}/{self.model.model_flops(self.model.sequence):.4g}"

    def corrected(self, where: NamedCluster) -> Subject:
        """Return the subject with what receipts of its cluster say."""
        if where.receipts is None:
            return self
        return dataclasses.replace(self, receipts=tuple(read_receipts(where.receipts)))

    def correction(self, plan: Plan, *, workers: int) -> Correction:
        """Return what receipts say about one plan."""
        return correction_of(self.receipts, self.signature, plan, workers=workers)

    def price(self, plan: Plan, cluster: Cluster, *, workers: int) -> PricedPlan:
        """Return what one plan costs; with the script's own cuts, its state is known exactly."""
        own = _cuts(plan) == _cuts(self.plan)
        state = self.state if own else None
        return price(
            plan,
            self.model,
            cluster,
            self.calibration,
            workers=workers,
            state=state,
            correction=self.correction(plan, workers=workers),
        )

    def best(self, plan: Plan, cluster: Cluster, *, workers: int, without: Collection[Plan] = ()) -> list[PricedPlan]:
        """Return the best plan of each layout with this plan's batch and precision, the fastest that fits first.

        Plans of `without` are left out.
        """
        return [
            self.price(plan, cluster, workers=workers) if one.plan == plan else one
            for one in search(
                plan,
                self.model,
                cluster,
                self.calibration,
                workers=workers,
                correct=functools.partial(self.correction, workers=workers),
                without=without,
            )
        ]

    def lossy(self, exact: Sequence[PricedPlan], cluster: Cluster, *, workers: int) -> list[LossyPlan]:
        """Return plans that are faster than all of these and have other losses than one process."""

        def reprice(plan: Plan) -> PricedPlan | None:
            if plan.check(workers=workers) or why_not_there(plan, cluster):
                return None
            return self.price(plan, cluster, workers=workers)

        return lossy_plans(exact, reprice)


def _cuts(plan: Plan) -> object:
    """What decides the bytes of weights, gradients and optimizer on a worker."""
    on_servers = isinstance(plan.sync, ParameterServer)
    return dataclasses.replace(plan.layout, replicas=1), plan.compute.precision, plan.compute.offload, on_servers
