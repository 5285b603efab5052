"""Split a model's layers in place as a `TensorPlan` says. Each worker keeps its parts; the model stays the user's own
object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.parallel.absent_tensors import bring
from paceline.parallel.file_weights import WeightFiles
from paceline.parallel.partial_parameter import HeldPart, mark_partial
from paceline.parallel.tensor.collectives import TensorCollectives
from paceline.parallel.tensor.dry_run import gather_inputs
from paceline.parallel.tensor.layers import Kind, Layer, install, kind_of, split_dims
from paceline.parallel.tensor.op_rules import rule_of
from paceline.parallel.tensor.plan import ParameterSplit, TensorPlan
from paceline.parallel.tensor.split_tensor import SplitTensor, TensorGroupOps, mapped, split_tensors_in, whole

__all__ = ["TensorParallelModel", "apply_plan", "split_layers", "watch_places"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelModel:
    """What the training loop must know of a model with split layers."""

    ops: TensorGroupOps
    # by every name that a parameter has; parameters that are missing here are whole
    parameters: dict[str, ParameterSplit]
    summed: tuple[nn.Parameter, ...]  # whole, but each worker has only a part of their gradient: sum it over the group


def apply_plan(model: nn.Module, plan: TensorPlan, group: TensorCollectives) -> TensorParallelModel:
    """Split `model` in place. All workers of `group` must call it, with equal weights and the same plan.

    Parameters stay the same objects with smaller data, so make optimizers afterwards. Gradients of whole parameters are
    equal on all workers; those of `summed` become equal when the caller sums them over the group.
    """
    if group.size != plan.size:
        raise PlanError(
            f"the plan is for {plan.size} workers, but the group has {group.size}; make it for {group.size}."
        )
    ops = TensorGroupOps(group, rules=rule_of, sequence=plan.sequence)
    splits = split_layers(model, plan.layers, ops)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    summed = tuple(parameters[name] for name in plan.summed)
    ops.owner_sums_gradients_of(summed)
    because = f"Layout(tensor={plan.size}) splits its layer"
    for name, split in splits.items():
        held = HeldPart(name=name, whole=split.shape, dim=split.dim, because=because, ranges=split.ranges(group.index))
        mark_partial(parameters[name], held)
    modules = dict(model.named_modules())
    for name in plan.gathered:
        gather_inputs(modules[name])
    _guard(model, ops)

    def whole_outputs(module: nn.Module, args: Any, output: Any) -> Any:
        return mapped(output, lambda one: whole(one, ops) if isinstance(one, SplitTensor) else one)

    model.register_forward_hook(whole_outputs)
    return TensorParallelModel(ops=ops, parameters=splits, summed=summed)


def split_layers(
    model: nn.Module, layers: Sequence[Layer], ops: TensorGroupOps, *, copies: bool = True
) -> dict[str, ParameterSplit]:
    """Replace the data of parameters by this worker's parts and give layers their new forwards; returns what was
    split. Parts that are not `copies` may lie in the whole parameter's memory.
    """
    modules = dict(model.named_modules())
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    splits: dict[str, ParameterSplit] = {}
    parts: dict[nn.Parameter, ParameterSplit] = {}
    kinds: list[Kind] = []
    for layer in layers:
        module = modules[layer.name]
        kind = kind_of(module)
        if kind is None:
            raise PlanError(
                f"{layer.name} is {type(module).__name__}, which cannot be split; make the plan from this model"
            )
        kinds.append(kind)
        for parameter, dim, sections in split_dims(module, kind, layer):
            if parameter not in parts:  # tied weights are split once
                shape = tuple(parameter.shape)
                for name in names[id(parameter)]:
                    splits[name] = ParameterSplit(name=name, shape=shape, dim=dim, sections=sections, size=ops.size)
                parts[parameter] = splits[names[id(parameter)][0]]
    if copies:
        bring(
            one.detach().narrow(split.dim, start, end - start)
            for one, split in parts.items()
            for start, end in split.ranges(ops.index)
        )
    files = WeightFiles(parts if copies else ())
    for parameter in files.in_order(parts, lambda one: _rows(one, parts[one], ops.index)):
        part = parts[parameter].part(parameter.detach(), ops.index)
        parameter.grad = None
        parameter.data = part.clone(memory_format=torch.contiguous_format) if copies else part
    for layer, kind in zip(layers, kinds, strict=True):
        module = modules[layer.name]
        install(module, kind, layer, ops)
        if kind == "attention":
            # torch's TransformerEncoder reads a layer's weights directly in evaluation, unless the layer has hooks.
            module.register_forward_pre_hook(_nothing)
    return splits


def _rows(parameter: nn.Parameter, split: ParameterSplit, index: int) -> Tensor:
    """What is read of a weight for a worker's part: its rows, if they lie together, or all of it."""
    ranges = split.ranges(index)
    if split.dim or len(ranges) != 1:
        return parameter.detach()
    ((start, end),) = ranges
    return parameter.detach()[start:end]


def watch_places(model: nn.Module, splits: Mapping[str, ParameterSplit]) -> None:
    """Refuse forwards with other tensors in the places of split parameters: their layers compute with parts."""
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], name) for name in splits]
    held = {name: getattr(module, key).held.name for module, key, name in places}  # tied ones have one name

    def check(module: nn.Module, args: Any) -> None:
        for owner, key, name in places:
            now = getattr(vars(owner)["_parameters"].get(key), "held", None)
            if now is None or now.name != held[name]:
                raise PlanError(
                    f"the model ran with another tensor, or none, in the place of {name}, of which its layer has a "
                    "part: weights tied, replaced or parametrized after worker.prepare(model). Change the model before "
                    "it, write new values (p.copy_(whole)), or use Layout(replicas=n)"
                )

    model.register_forward_pre_hook(check, prepend=True)


def _nothing(module: nn.Module, args: Any) -> None:
    return None


def _guard(model: nn.Module, ops: TensorGroupOps) -> None:
    """Check at each forward that parameters with partial gradients are used on split tensors only; raises PlanError if
    not."""
    for name, module in model.named_modules():
        own = [key for key, one in module.named_parameters(recurse=False) if ops.leaves(one)]
        if own and "forward" not in vars(module):

            def check(module: nn.Module, args: Any, kwargs: Any, name: str = name, key: str = own[0]) -> None:
                if torch.is_grad_enabled() and next(split_tensors_in((args, kwargs)), None) is None:
                    raise PlanError(
                        f"{name}.{key} is used on whole tensors here, and on parts in the run that the plan was made "
                        "from: its gradient would be counted twice. Make the plan from a sample that is used as in "
                        "training."
                    )

            module.register_forward_pre_hook(check, with_kwargs=True)
