"""What of a foreign checkpoint fits the models and optimizers that a script prepares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.compat.imports.foreign import ForeignCheckpoint, ForeignOptimizer, StoredTensor
from paceline.compat.imports.naming import Naming
from paceline.errors import PlanError

__all__ = ["Fit", "OptimizerFit", "fit_checkpoint", "fit_optimizer"]

# Options that say how an optimizer computes, and not what: the script's own count.
OWN_OPTIONS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable", "maximize"})


@dataclasses.dataclass(kw_only=True, slots=True)
class Fit:
    """The model's tensors, by the names of its own state dict, and what stands against them."""

    taken: dict[str, StoredTensor] = dataclasses.field(default_factory=dict[str, StoredTensor])
    ties: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # name -> the taken one that it is tied to
    converted: dict[str, torch.dtype] = dataclasses.field(default_factory=dict[str, torch.dtype])  # -> the model's type
    missing: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict[str, tuple[int, ...]])
    unexpected: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict[str, tuple[int, ...]])
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = dataclasses.field(
        default_factory=dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    )  # in the file, in the model

    @property
    def is_whole(self) -> bool:
        """Whether each tensor of the model is there, in its shape."""
        return not self.missing and not self.shapes

    def read(self, name: str) -> Tensor:
        """Read a taken tensor, of the model's type, contiguous."""
        tensor = self.taken[name].read().detach()
        return tensor.to(self.converted.get(name, tensor.dtype)).contiguous()


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerFit:
    """An optimizer's state, by the names of the model's parameters."""

    groups: list[dict[str, Any]]  # the options, with "params": full names
    tensors: dict[str, dict[str, StoredTensor]]  # parameter -> entry -> tensor
    values: dict[str, dict[str, Any]]  # what of the state is no tensor
    without: list[str]  # parameters of which there is no state


def fit_checkpoint(found: ForeignCheckpoint, model: nn.Module, naming: Naming) -> Fit:
    """Compare the tensors with a model's state dict, one by one."""
    own = {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
    there = naming.apply_all(found.tensors, own)
    fit = Fit(unexpected={name: one.shape for name, one in there.items() if name not in own})
    tied = _tied(model)
    for name, target in own.items():
        one = there.get(name)
        if one is None:
            partner = next((other for other in tied.get(name, ()) if other in there), None)
            if partner is None:
                fit.missing[name] = tuple(target.shape)
            else:
                fit.ties[name] = partner
        elif one.shape != tuple(target.shape):
            fit.shapes[name] = one.shape, tuple(target.shape)
        else:
            fit.taken[name] = one
            if one.dtype != target.dtype:
                if one.dtype.is_floating_point != target.dtype.is_floating_point:
                    raise PlanError(
                        f"{name} is of {one.dtype} in {found.source}, and of {target.dtype} in the script's model: "
                        "they do not hold the same kind of numbers."
                    )
                fit.converted[name] = target.dtype
    return fit


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """The other names of each tensor that a model has under several."""
    names: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, one in named(remove_duplicate=False):
            names.setdefault(id(one), []).append(name)
    return {name: [one for one in group if one != name] for group in names.values() for name in group if len(group) > 1}


def fit_optimizer(
    found: ForeignOptimizer, optimizer: Optimizer, models: Mapping[str, nn.Module], naming: Naming
) -> OptimizerFit:
    """Give an optimizer's state to the parameters of the script's own. PlanError, with names, where it does not fit.

    State by numbers is given by the order in which the script's optimizer holds its parameters, group by group.
    """
    full = {id(one): f"{prefix}.{name}" for prefix, model in models.items() for name, one in model.named_parameters()}
    held = [list(group["params"]) for group in optimizer.param_groups]
    unknown = [one for group in held for one in group if id(one) not in full]
    if unknown:
        raise PlanError(
            f"The script's {type(optimizer).__name__} holds {len(unknown)} parameters of no prepared model, so names "
            "for their state are not known. Prepare the model before the optimizer, or give --weights-only."
        )
    parameters = {full[id(one)]: one for group in held for one in group}
    states = _by_name(found, held, full, naming)
    tensors: dict[str, dict[str, StoredTensor]] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, entries in states.items():
        if name not in parameters:
            raise PlanError(f"The optimizer's state is of {name} too, which the script's optimizer does not hold.")
        for entry, value in entries.items():
            if not isinstance(value, StoredTensor):
                values.setdefault(name, {})[entry] = value
                continue
            _require_shape(name, entry, value, parameters[name])
            tensors.setdefault(name, {})[entry] = value
    groups = [
        {**_options(own, found, number), "params": [full[id(one)] for one in own["params"]]}
        for number, own in enumerate(optimizer.param_groups)
    ]
    without = [name for name in parameters if name not in states]
    return OptimizerFit(groups=groups, tensors=tensors, values=values, without=without)


def _by_name(
    found: ForeignOptimizer, held: Sequence[Sequence[Tensor]], full: Mapping[int, str], naming: Naming
) -> dict[str, Mapping[str, Any]]:
    if found.is_by_name:
        wanted = {name.partition(".")[2]: name for name in full.values()}
        return {
            wanted.get(new, new): state
            for key, state in found.states.items()
            for new in (naming.apply(str(key), wanted),)
        }
    numbers = None if found.groups is None else [list(group.get("params", ())) for group in found.groups]
    if numbers is None or [len(one) for one in numbers] != [len(one) for one in held]:
        there = "unknown groups" if numbers is None else f"groups of {', '.join(str(len(one)) for one in numbers)}"
        raise PlanError(
            f"The optimizer's state is of {there} parameters, and the script's optimizer holds groups of "
            f"{', '.join(str(len(one)) for one in held)}: which is whose cannot be told. Have the script make the "
            "same groups, or give --weights-only."
        )
    return {
        full[id(one)]: found.states[number]
        for group, own in zip(numbers, held, strict=True)
        for number, one in zip(group, own, strict=True)
        if number in found.states
    }


def _require_shape(name: str, entry: str, value: StoredTensor, parameter: Tensor) -> None:
    """Raise PlanError for state of another parameter: what is no single number has the parameter's shape, or a part of
    its dimensions, as factored moments have."""
    sizes = list(parameter.shape)
    is_part = all(size in (1, *sizes) for size in value.shape) and len(value.shape) <= len(sizes)
    if value.shape and tuple(value.shape) != (1,) and not is_part:
        raise PlanError(
            f"The optimizer's {entry} of {name} has the shape {list(value.shape)}, and the parameter {sizes}: the "
            "script's optimizer holds its parameters in another order. Have it hold the same ones in the same order, "
            "or give --weights-only."
        )


def _options(own: Mapping[str, Any], found: ForeignOptimizer, number: int) -> dict[str, Any]:
    """A group's options: the file's, where it has them, else the script's."""
    options = {name: value for name, value in own.items() if name not in ("params", "param_names")}
    there = found.groups[number] if found.groups is not None and number < len(found.groups) else {}
    return {**options, **{name: value for name, value in there.items() if name not in OWN_OPTIONS}}
