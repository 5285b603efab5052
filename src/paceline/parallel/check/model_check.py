"""Check a model for a plan: every axis of the layout reports its obstacles, and all of them are raised together.

`worker.prepare` checks before it splits, and splits as was found. `paceline plan --check` checks without any other
worker. The packages of the axes do the work; here they are called one after the other, on the same small input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import PlanError, Reason
from paceline.parallel.check.model_hints import ModelHints
from paceline.parallel.check.model_support import require_fit, require_open
from paceline.parallel.context.find_plan import find_plan as find_context
from paceline.parallel.context.plan import ContextPlan
from paceline.parallel.expert.find_experts import RoutedExperts, find_experts
from paceline.parallel.float8 import choose_linears
from paceline.parallel.fully_sharded.sharded_units import require_splittable
from paceline.parallel.meta.fake_weights import shapes_only
from paceline.parallel.meta.tensor_tree import map_tensors
from paceline.parallel.model_units import names_matching
from paceline.parallel.pipeline.find_stages import PipelinePlan, find_stages
from paceline.parallel.sample_input import SampleInput, as_sample, guess_sample
from paceline.parallel.stand_in_weights import stand_in_weights
from paceline.parallel.tensor.find_plan import find_plan as find_tensor
from paceline.parallel.tensor.find_plan import refuse_empty
from paceline.parallel.tensor.plan import TensorPlan
from paceline.plan import Plan

__all__ = ["ModelCheck", "check_model", "is_too_large_to_run"]

T = TypeVar("T")
NONE = ModelHints()
MOST_RUN = 1 << 34  # parameters of a model whose blocks are run with invented weights only to be checked


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelCheck:
    """The plans of all axes that work, and the errors of those that do not."""

    name: str  # of the model's class
    errors: tuple[PlanError, ...]  # one for each axis that refuses, with its reasons
    units: tuple[str, ...] = ()  # modules that the script names as units, in place of the repeated blocks
    sample: SampleInput | None = None  # the small input; None: none was needed, or found
    tensor: TensorPlan | None = None
    stages: PipelinePlan | None = None
    context: ContextPlan | None = None
    experts: tuple[RoutedExperts, ...] | None = None
    is_verified: bool = True  # False: the cuts follow from shapes alone, since the model is too large to run here

    @property
    def refusals(self) -> tuple[Reason, ...]:
        """Every reason once, with the module's name and the remedy."""
        return tuple(dict.fromkeys(reason for error in self.errors for reason in _reasons(self.name, error)))

    def error(self) -> PlanError | None:
        """Return one error with all refusals; None where there are none."""
        if len(self.errors) < 2:
            return self.errors[0] if self.errors else None
        return PlanError.listing(f"{self.name} cannot be trained by this plan", self.refusals)


def check_model(
    model: nn.Module,
    plan: Plan,
    *,
    device: torch.device,
    hints: ModelHints = NONE,
    finds_context: bool = True,
    fill: Callable[[nn.Module], contextlib.AbstractContextManager[None]] | None = None,
) -> ModelCheck:
    """Return what `plan` finds in a whole `model` on `device`, and leave the model as it was; needs no other worker.

    `hints`: what the script says about the model; without a sample in it, a small input is guessed. `finds_context`:
    whether to find a context parallel plan here, which is costly. `fill`: for a model on the meta device, a context
    manager that gives it weights to run with. With it, a model that is too large to run is checked by its shapes:
    tensor parallel and stages as usual but for the comparison of numbers, and context parallel, which is found by
    numbers, not at all. `is_verified` says so. Weights that have not come yet are not asked for: others stand there.
    """
    layout, name, errors = plan.layout, type(model).__name__, list[PlanError]()

    def ask(find: Callable[[], T]) -> T | None:
        try:
            return find()
        except PlanError as error:
            errors.append(error)
            return None

    def tensor() -> TensorPlan:
        own = "auto" if hints.cut is None else hints.cut
        found = find_tensor(
            model, size=layout.tensor, plan=own, sample=known, sequence=layout.sequence, verifies=not by_shapes
        )
        refuse_empty(found, model)
        return found

    def stages() -> PipelinePlan:
        precision = plan.compute.precision
        return find_stages(
            model, layout, sample=known, named=units, starts=hints.stages, precision=precision, device=device
        )

    def context() -> ContextPlan:  # it guesses its own sample, since tokens may be in the first dim
        tokenwise = (*hints.tokenwise, *(one.name for one in routed or ()))  # experts are verified separately
        return find_context(model, size=layout.context, sample=hints.sample, tokenwise=tokenwise, layers=layers)

    def experts() -> tuple[RoutedExperts, ...]:
        return tuple(find_experts(model, size=layout.experts, named=hints.experts))

    by_shapes = fill is not None and is_too_large_to_run(model)
    units = ask(lambda: names_matching(model, hints.units)) or ()
    ask(lambda: require_fit(model, plan, allows_meta=fill is not None))
    if ask(lambda: require_open(model, plan) or True) is None:
        return ModelCheck(name=name, errors=tuple(errors))
    if layout.shard > 1 or plan.compute.offload == "all":
        ask(lambda: require_splittable(model, units))
    if plan.compute.precision == "fp8":
        ask(lambda: choose_linears(model, plan.compute, units=units))
    routed = ask(experts) if layout.experts > 1 else None
    is_run = layout.tensor * layout.stages * layout.context > 1
    tensors = [*model.parameters(), *model.buffers()]
    if not is_run or any(is_lazy(one) or (one.is_meta and fill is None) for one in tensors):
        return ModelCheck(name=name, units=units, experts=routed, errors=tuple(errors))
    if by_shapes:
        fill, finds_context = shapes_only, False
    with fill(model) if fill is not None else stand_in_weights(model):
        size = math.lcm(layout.tensor, layout.stages, 2 * layout.context if layout.context > 1 else 1)
        given = None if hints.sample is None else as_sample(hints.sample)
        if given is not None and by_shapes:
            args, kwargs = map_tensors((given.args, dict(given.kwargs)), lambda one: one.to("meta"))
            given = SampleInput(args=args, kwargs=kwargs)
        known = given or ask(lambda: guess_sample(model, size=size))
        if known is None:
            return ModelCheck(name=name, units=units, experts=routed, errors=tuple(errors))
        layers = ask(tensor) if layout.tensor > 1 else None
        return ModelCheck(
            name=name,
            units=units,
            sample=known,
            tensor=layers,
            stages=ask(stages) if layout.stages > 1 else None,
            context=ask(context) if layout.context > 1 and finds_context else None,
            experts=routed,
            is_verified=not by_shapes,
            errors=tuple(errors),  # last: the axes have added to it
        )


def is_too_large_to_run(model: nn.Module) -> bool:
    """Whether running the model's blocks only to check it would take minutes, and more memory than a laptop has."""
    return sum(one.numel() for one in model.parameters()) > MOST_RUN


def _reasons(name: str, error: PlanError) -> tuple[Reason, ...]:
    return error.reasons or (Reason(module=name, what=str(error), remedy=""),)
