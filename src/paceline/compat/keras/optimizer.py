"""A Keras optimizer as a torch optimizer: `worker.prepare` takes it, and steppers step it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.compat.keras.update_rule import UpdateRule
from paceline.compat.keras.variables import HeldVariable
from paceline.errors import PlanError
from paceline.plan import ParameterServer, Plan

__all__ = ["KerasOptimizer", "torch_optimizer"]


class KerasOptimizer(Optimizer):
    """Steps as a Keras optimizer does, on the parameters of a prepared Keras model. See `update_rule`."""

    def __init__(self, rule: UpdateRule, parameters: list[Tensor]) -> None:
        rule.build(parameters)
        self.rule = rule
        super().__init__(parameters, rule.options())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step by the gradients that are there."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            here = [one for one in group["params"] if one.grad is not None]
            if here:
                self.rule.apply(here, group, self.state)
        return loss

    def take_over(self) -> None:
        """Have the Keras optimizer be what this one's state and options are, which may be those of a checkpoint."""
        [group] = self.param_groups
        self.rule.read(group)
        self.rule.attach(group["params"], self.state)

    def note_rate(self) -> None:
        """Put the Keras optimizer's learning rate, which a callback may have set, among the options."""
        for group in self.param_groups:
            self.rule.write(group)

    @torch.no_grad()
    def finish(self) -> None:
        """Give the model its final weights, where the optimizer averages them."""
        if self.rule.optimizer.use_ema:
            self.rule.finish([one for group in self.param_groups for one in group["params"]])


def torch_optimizer(optimizer: Any, model: Any) -> KerasOptimizer:
    """Return a torch optimizer that steps a prepared Keras model as the Keras `optimizer` does.

    For loops of your own: `optim = worker.prepare(torch_optimizer(keras.optimizers.AdamW(1e-3), model))`. Schedules,
    weight decay, clipping and averages are those of the Keras optimizer. Raises PlanError for an optimizer that scales
    losses by itself, and ValueError for a model that was not prepared.
    """
    if hasattr(optimizer, "inner_optimizer"):
        raise PlanError(
            f"{type(optimizer).__name__} scales losses, and leaves out steps, by this worker's own gradients "
            "(mixed_float16). Use the policy mixed_bfloat16, or float32 with --plan 'compute(precision=bf16)'."
        )
    variables = model.trainable_variables
    if not all(isinstance(one, HeldVariable) for one in variables):
        raise ValueError("torch_optimizer() got a model that was not prepared: model = worker.prepare(model)")
    parameters = [one.place.registered() for one in variables]
    return KerasOptimizer(
        UpdateRule(optimizer, {id(p): one for p, one in zip(parameters, variables, strict=True)}), parameters
    )


def require_possible_rule(optimizer: Any, model: Any, plan: Plan) -> None:
    """Raise PlanError where a Keras optimizer, or a constraint on weights, needs more than a worker of the plan has."""
    layout, name = plan.layout, type(optimizer).__name__
    if isinstance(plan.sync, ParameterServer):
        raise PlanError(
            f"a Keras optimizer under {plan.sync!r}: servers make steps of their own parts of the weights, for which "
            f"{name} was not built. Use sync=AllReduce(), or a torch optimizer in a loop of your own."
        )
    if plan.compute.offload != "none" and (optimizer.use_ema or optimizer.gradient_accumulation_steps):
        what = "use_ema" if optimizer.use_ema else "gradient_accumulation_steps"
        raise PlanError(
            f"{name}({what}=...) with Compute(offload={plan.compute.offload!r}): the optimizer passes over all its "
            "parameters at each step, and offloading has one of them here at a time. Leave out one of the two."
        )
    if layout.workers_each == 1:
        return
    for variable in model.trainable_variables:
        rule = variable.constraint
        if rule is not None and type(rule).__name__ not in ("NonNegative", "NonNeg"):
            raise PlanError(
                f"{variable.path} has the constraint {type(rule).__name__}, which looks at rows or columns as wholes, "
                f"and under {layout!r} each worker has a part of them. Use replicas, or NonNeg."
            )
