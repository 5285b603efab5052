"""What is gathered together: a model's units, where their parameters are registered, and what cannot be sharded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from paceline.errors import PlanError, Reason
from paceline.parallel.class_name import class_name
from paceline.parallel.file_weights import is_code
from paceline.parallel.model_units import blocks_of
from paceline.parallel.part_dtype import later_dtype, later_dtypes

__all__ = [
    "Slot",
    "registered",
    "require_splittable",
    "slots_of",
    "stays_whole",
    "tie_again",
    "trained_types",
    "units_of",
]

# where a parameter is registered, and the sharded parameter that is registered there
Slot = tuple[nn.Module, str, Parameter]


def units_of(model: nn.Module, named: Sequence[str] = ()) -> list[tuple[str, nn.Module]]:
    """Return the modules that are gathered separately: the `named` ones, or else the repeated blocks.

    Modules that share parameters with anything outside of them are left out, and so are containers, which have no
    forward of their own.
    """
    found = [
        (name, block)
        for name, block in blocks_of(model, named)
        if not isinstance(block, (nn.ModuleList, nn.ModuleDict)) and block is not model
    ]
    shared = _shared_outside(model, [block for _, block in found])
    return [(name, block) for name, block in found if not any(id(p) in shared for p in block.parameters())]


def require_splittable(model: nn.Module, named: Sequence[str] = ()) -> None:
    """Raise one PlanError that names every parameter and module that `fully_shard` cannot shard, and the remedies."""
    found: list[Reason] = []

    def note(module: str, what: str, remedy: str) -> None:
        found.append(Reason(module=module, what=what, remedy=remedy))

    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        kind = class_name(model)
        note(kind, f"the model is a {kind}, which has no forward:", "put it into a module that has one.")
    blocks = blocks_of(model, named) if named else []
    shared = _shared_outside(model, [block for _, block in blocks])
    for name, block in blocks:
        held = [key for key, parameter in block.named_parameters() if id(parameter) in shared]
        if held:
            note(name, f"the unit {name} shares {held[0]} with what is outside of it:", "leave it out of units=.")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or stays_whole(parameter):
            continue  # the former are refused under any layout
        if parameter.dim() == 0:
            note(name, f"{name} is a single number without a dim:", "make it nn.Parameter(torch.ones(1)), of one dim.")
        elif not parameter.is_contiguous():
            note(name, f"{name} is not contiguous in memory (strides {parameter.stride()}):", "use .contiguous().")
        if parameter.is_complex() or not parameter.is_floating_point():
            note(
                name,
                f"{name} is of {_short(parameter.dtype)} and trained: only real floating numbers are split.",
                "Make it a buffer, or of real numbers: torch.view_as_real() of a complex one.",
            )
    is_converted = bool(later_dtypes(model))  # there model.float() changes nothing that is in 32 bits already
    how = "from_pretrained(..., dtype='fp32')" if is_converted else "model.float() before worker.prepare(model)"
    units = units_of(model, named)
    for name, unit in [*units, ("what is in no block", model)]:
        kinds = trained_types(slots_of(unit, inner=(one for _, one in units)))
        if len(kinds) > 1:
            note(
                name,
                f"{name} mixes {' and '.join(kinds)}, but its gradients travel as one:",
                f"give what is trained in it one type, for example {how}. What is frozen may have another one.",
            )
    if found:
        raise PlanError.listing(f"Layout(shard=...) cannot split {class_name(model)}", found)


def _shared_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the blocks' parameters that also belong to another block, or to no block."""
    inside = {module for block in blocks for module in block.modules()}
    found = {id(p) for module in model.modules() if module not in inside for p in module.parameters(recurse=False)}
    holders: dict[int, int] = {}
    for block in blocks:
        for parameter in block.parameters():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return found | {number for number, count in holders.items() if count > 1}


def registered(model: nn.Module) -> list[Slot]:
    """Return where a model's parameters are registered, once for each place."""
    return [
        (module, key, parameter)
        for module in model.modules()
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def tie_again(model: nn.Module, before: Sequence[Slot]) -> None:
    """Register the new parameters wherever else the model has the old ones: in modules of other stages."""
    changed = {id(old): new for module, key, old in before if (new := getattr(module, key)) is not old}
    for module, key, parameter in registered(model):
        if id(parameter) in changed:
            setattr(module, key, changed[id(parameter)])


def slots_of(unit: nn.Module, *, inner: Iterable[nn.Module]) -> list[Slot]:
    """Return where a unit's own parameters are registered, without those of the units within it."""
    others = set(itertools.chain.from_iterable(one.modules() for one in inner if one is not unit))
    modules = [one for one in unit.modules() if one not in others]
    return [
        (one, name, parameter)
        for one in modules
        for name, parameter in one.named_parameters(recurse=False)
        if not stays_whole(parameter)
    ]


def stays_whole(parameter: nn.Parameter) -> bool:
    """Whether every worker keeps all of a parameter: frozen codes of a quantised weight, which no one gathers as
    numbers, and whose scales the module has elsewhere."""
    is_number = parameter.is_floating_point() and not is_code(parameter)
    return not parameter.requires_grad and not is_number


def trained_types(slots: Iterable[Slot]) -> list[str]:
    """The types that parameters which are trained have, or will have."""
    return sorted({_short(later_dtype(parameter)) for _, _, parameter in slots if parameter.requires_grad})


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
