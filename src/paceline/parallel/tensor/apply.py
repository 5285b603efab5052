"""Cut a model's layers in place, as a plan says: each worker keeps its parts; the model stays the user's own object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.parallel.tensor.collectives import TensorCollectives
from paceline.parallel.tensor.dry_run import gather_inputs
from paceline.parallel.tensor.layers import Layer, cut_dims, install, kind_of
from paceline.parallel.tensor.op_rules import rule_of
from paceline.parallel.tensor.plan import ParameterCut, TensorPlan
from paceline.parallel.tensor.split_tensor import SplitTensor, TensorGroupOps, mapped, split_tensors_in, whole

__all__ = ["TensorParallelModel", "apply_plan", "split_layers"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelModel:
    """What the owner of the training loop must know of a model whose layers are cut."""

    team: TensorGroupOps
    parameters: dict[str, ParameterCut]  # by every name that a parameter has; those that are not here are whole
    summed: tuple[nn.Parameter, ...]  # whole, but each worker has only a part of their gradient: sum it over the group


def apply_plan(model: nn.Module, plan: TensorPlan, group: TensorCollectives) -> TensorParallelModel:
    """Cut `model` in place; all workers of `group` must call it, with equal weights and the same plan.

    Parameters stay the same objects with smaller data, so make optimizers afterwards. Gradients of parameters that are
    whole are equal on all workers; those of `summed` become so when their owner sums them.
    """
    if group.size != plan.size:
        raise PlanError(
            f"the plan is for {plan.size} workers, but the group has {group.size}; make it for {group.size}."
        )
    team = TensorGroupOps(group, rules=rule_of, sequence=plan.sequence)
    cuts = split_layers(model, plan.layers, team)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    summed = tuple(parameters[name] for name in plan.summed)
    team.owner_sums_gradients_of(summed)
    modules = dict(model.named_modules())
    for name in plan.gathered:
        gather_inputs(modules[name])
    _guard(model, team)

    def whole_outputs(module: nn.Module, args: Any, output: Any) -> Any:
        return mapped(output, lambda one: whole(one, team) if isinstance(one, SplitTensor) else one)

    model.register_forward_hook(whole_outputs)
    return TensorParallelModel(team=team, parameters=cuts, summed=summed)


def split_layers(model: nn.Module, layers: Sequence[Layer], team: TensorGroupOps) -> dict[str, ParameterCut]:
    """Replace the data of parameters by this worker's parts, and give layers their forwards; returns what was cut."""
    modules = dict(model.named_modules())
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    cuts: dict[str, ParameterCut] = {}
    for layer in layers:
        module = modules[layer.name]
        kind = kind_of(module)
        if kind is None:
            raise PlanError(
                f"{layer.name} is {type(module).__name__}, which cannot be cut; make the plan from this model"
            )
        for parameter, dim, sections in cut_dims(module, kind, layer):
            if names[id(parameter)][0] not in cuts:  # tied weights are cut once
                shape = tuple(parameter.shape)
                for name in names[id(parameter)]:
                    cuts[name] = ParameterCut(name=name, shape=shape, dim=dim, sections=sections, size=team.size)
                part = cuts[names[id(parameter)][0]].part(parameter.detach(), team.index)
                parameter.grad = None
                parameter.data = part.clone(memory_format=torch.contiguous_format)
        install(module, kind, layer, team)
        if kind == "attention":
            # An Encoder of torch looks at a layer's weights itself in evaluation, unless there are hooks.
            module.register_forward_pre_hook(_nothing)
    return cuts


def _nothing(module: nn.Module, args: Any) -> None:
    return None


def _guard(model: nn.Module, team: TensorGroupOps) -> None:
    """Where gradients are summed by their owner, each worker must have seen a part only: say so when that fails."""
    for name, module in model.named_modules():
        own = [key for key, one in module.named_parameters(recurse=False) if team.leaves(one)]
        if own and "forward" not in vars(module):

            def check(module: nn.Module, args: Any, kwargs: Any, name: str = name, key: str = own[0]) -> None:
                if torch.is_grad_enabled() and next(split_tensors_in((args, kwargs)), None) is None:
                    raise PlanError(
                        f"{name}.{key} is used on whole tensors here, and on parts in the run that the plan was made "
                        "from: its gradient would be counted twice. Make the plan from a sample that is used as in "
                        "training."
                    )

            module.register_forward_pre_hook(check, with_kwargs=True)
