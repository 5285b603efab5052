"""Estimate what each worker of a replica holds of a model: parameters, gradients, and the optimizer's state.

Activations come on top. The formulas are those of `paceline.plan.layout`: P, G and O bytes over s workers that split
rows, U bytes of the largest unit. With distributed experts, everything else is split over more workers. Offloaded state
does not count as the device's memory, except for what a step brings there.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.sharded_tensors import rows_of
from paceline.parallel.check.model_check import ModelCheck
from paceline.parallel.check.optimizer_requirements import BY_NUMBER, parameters_needed_whole
from paceline.parallel.fully_sharded.sharded_units import units_of
from paceline.parallel.meta.meta_device import USER_ERRORS
from paceline.parallel.offload.optimizer_state import brought_bytes
from paceline.parallel.tensor.layers import kind_of, split_dims
from paceline.parallel.tensor.split_shapes import num_held
from paceline.plan import Layout, Plan
from paceline.schedule.pipeline import build

__all__ = ["MemoryEstimate", "estimate_memory", "optimizer_bytes_each", "share_stepped_whole"]

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one worker; `stage` is None where all workers of a replica hold the same amount."""

    stage: int | None
    parameters: int  # between steps
    gradients: int
    optimizer: int | None  # None: known only after the first step
    elsewhere: int | None  # the offloaded part of all these: in the host's memory, or in files
    peak: int | None  # the most in a step on the computing device, without activations


def estimate_memory(
    model: nn.Module, checked: ModelCheck, plan: Plan, optimizers: Sequence[Optimizer]
) -> list[MemoryEstimate]:
    """Return what the workers of a replica hold; where rows do not divide, the worker with the most."""
    return [
        _on_worker(model, checked, plan, optimizers, stage=stage)
        for stage in (range(plan.layout.stages) if checked.stages is not None else (None,))
    ]


def optimizer_bytes_each(model: nn.Module, optimizers: Sequence[Optimizer]) -> float | None:
    """Return the bytes of optimizer state of a trained parameter, on average, where all of it is kept as it is made;
    None where they are not known before."""
    trained = [one for one in model.parameters() if one.requires_grad]
    own = {id(one) for one in trained}
    known = [one for one in optimizers if any(id(p) in own for group in one.param_groups for p in group["params"])]
    states = _state_bytes(known, {id(one): tuple(one.shape) for one in model.parameters()})
    if not known or not trained or states is None:
        return None
    return sum(num_bytes for num_bytes, _ in states) / sum(one.numel() for one in trained)


def share_stepped_whole(model: nn.Module, optimizers: Sequence[Optimizer]) -> float:
    """Return the share of the model's trained parameters that optimizers look at as wholes, where a worker could not
    step a part of one by itself."""
    trained = {id(one): one.numel() for one in model.parameters() if one.requires_grad}
    found = 0
    for optimizer in optimizers if trained else ():
        held = [one for group in optimizer.param_groups for one in group["params"] if id(one) in trained]
        if held and type(optimizer) not in BY_NUMBER:
            found += sum(trained[id(one)] for one in parameters_needed_whole(optimizer, held))
    return found / max(1, sum(trained.values()))


def _on_worker(
    model: nn.Module, checked: ModelCheck, plan: Plan, optimizers: Sequence[Optimizer], *, stage: int | None
) -> MemoryEstimate:
    layout, offload = plan.layout, plan.compute.offload
    here = _names_here(model, checked, layout, stage)
    named = {name: parameter for name, parameter in model.named_parameters() if name in here}
    gathered = {id(one): shape for one, shape in _split_shapes(model, checked, layout, named)}
    of_experts = {id(one) for routed in checked.experts or () for one in routed.module.parameters()}
    both = layout.shard * layout.experts if layout.shard > 1 else 1
    rows = {number: _rows(shape, layout.shard if number in of_experts else both) for number, shape in gathered.items()}
    whole = sum(_bytes(one, gathered[id(one)]) for one in named.values())
    gradients_whole = sum(_bytes(one, gathered[id(one)]) for one in named.values() if one.requires_grad)
    parameters = sum(_bytes(one, rows[id(one)]) for one in named.values())
    gradients = sum(_bytes(one, rows[id(one)]) for one in named.values() if one.requires_grad)
    states = _state_bytes(optimizers, rows, is_rounded=plan.compute.state == "bf16")
    optimizer = None if states is None else sum(num_bytes for num_bytes, _ in states)
    is_gathered = layout.shard > 1 or offload == "all"
    in_step = 0
    if is_gathered:
        in_step = _gathered_in_step(model, checked, layout, gathered, named, whole=whole, gradients=gradients_whole)
    resting = gradients if not is_gathered or layout.zero > 1 else 0  # for zero=1 they are part of what is gathered
    elsewhere, peak = 0, None if optimizer is None else parameters + optimizer + resting + in_step
    if offload == "optimizer":
        elsewhere = optimizer
        peak = None if states is None else parameters + resting + in_step + max((one for _, one in states), default=0)
    elif offload == "all":
        elsewhere, peak = None if optimizer is None else parameters + gradients + optimizer, in_step
    return MemoryEstimate(
        stage=stage, parameters=parameters, gradients=gradients, optimizer=optimizer, elsewhere=elsewhere, peak=peak
    )


def _names_here(model: nn.Module, checked: ModelCheck, layout: Layout, stage: int | None) -> set[str]:
    """Return the names of the parameters on the workers of one pipeline stage group."""
    elsewhere = _experts_elsewhere(checked, layout)
    here = {name for name, one in model.named_parameters() if id(one) not in elsewhere}
    if checked.stages is None or stage is None:
        return here
    own = build(
        layout.schedule, num_workers=layout.stages, num_micro=1, stages_per_worker=layout.stages_per_worker
    ).stages_of(stage)
    return {name for name in here if set(checked.stages.partition.parameters[name]) & set(own)}


def _experts_elsewhere(checked: ModelCheck, layout: Layout) -> set[int]:
    """Return the ids of parameters of listed experts that the first worker does not have."""
    lists = [members for one in checked.experts or () for _, members in one.members()]
    others = [member for members in lists for member in members[len(members) // layout.experts :]]
    return {id(parameter) for member in others for parameter in member.parameters()}


def _split_shapes(
    model: nn.Module, checked: ModelCheck, layout: Layout, named: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Shape]]:
    """Yield each local parameter with its shape on the first worker of its tensor parallel group."""
    shapes = {id(one): tuple(one.shape) for one in model.parameters()}
    modules = dict(model.named_modules())
    for layer in checked.tensor.layers if checked.tensor is not None else ():
        module = modules[layer.name]
        if (kind := kind_of(module)) is not None:
            for one, dim, sections in split_dims(module, kind, layer):
                held = num_held(sections, size=layout.tensor, index=0)
                shapes[id(one)] = (*one.shape[:dim], held, *one.shape[dim + 1 :])
    for routed in checked.experts or ():
        for key in routed.stacked:
            one = getattr(routed.module, key)
            shapes[id(one)] = (one.shape[0] // layout.experts, *one.shape[1:])
    return ((one, shapes[id(one)]) for one in named.values())


def _rows(shape: Shape, shard: int) -> Shape:
    if shard == 1 or not shape:
        return shape
    first, stop = rows_of(shape[0], index=0, size=shard)
    return (stop - first, *shape[1:])


def _gathered_in_step(
    model: nn.Module,
    checked: ModelCheck,
    layout: Layout,
    shapes: Mapping[int, Shape],
    named: Mapping[str, Tensor],
    *,
    whole: int,
    gradients: int,
) -> int:
    """Return the bytes that are gathered in a step, in addition to what is held all the time."""
    if layout.zero == 1:
        return whole + gradients
    here = {id(one) for one in named.values()}
    units: list[dict[int, Tensor]] = [{id(p): p for p in one.module.parameters()} for one in checked.experts or ()]
    apart = {number for unit in units for number in unit}
    for _, block in units_of(model, checked.units):
        units.append({id(one): one for one in block.parameters() if id(one) not in apart})
    units = [{number: one for number, one in unit.items() if number in here} for unit in units]
    in_units = {number for unit in units for number in unit}
    units.append({id(one): one for one in named.values() if id(one) not in in_units})
    largest = max(sum(_bytes(one, shapes[number]) for number, one in unit.items()) for unit in units)
    return whole + 2 * largest if layout.zero == 2 else 3 * largest


def _state_bytes(
    optimizers: Sequence[Optimizer], shapes: Mapping[int, Shape], *, is_rounded: bool = False
) -> list[tuple[int, int]] | None:
    """Return the optimizer state per parameter, as (bytes, bytes that a step brings in if it is offloaded).

    A copy of each optimizer takes a step on parameters without data. `is_rounded`: what is of the parameter's shape and
    in fp32 is kept in bf16. None where that fails, so nothing is known
    beforehand.
    """
    found: list[tuple[int, int]] = []
    for optimizer in optimizers:
        trial: Any = object.__new__(type(optimizer))
        vars(trial).update(
            {key: value for key, value in vars(optimizer).items() if key != "step"}
        )  # a scheduler's wrapper
        vars(trial).update({key: OrderedDict() for key in vars(optimizer) if key.endswith("_hooks")})
        trial.state, trial.param_groups = defaultdict(dict), []
        for group in optimizer.param_groups:
            placeholders = [_meta_parameter(one, shapes[id(one)]) for one in group["params"] if id(one) in shapes]
            trial.param_groups.append({**group, "params": placeholders})
        try:
            trial.step()
        except USER_ERRORS:
            return None
        for parameter, state in trial.state.items():
            kept = [value for value in state.values() if isinstance(value, Tensor)]
            num_bytes = sum(value.nbytes for value in kept)
            if is_rounded and parameter.dtype == torch.float32:
                alike = [one for one in kept if one.dtype == torch.float32 and one.shape == parameter.shape]
                num_bytes -= sum(one.nbytes // 2 for one in alike)
            found.append((num_bytes, brought_bytes(optimizer, parameter, num_bytes)))
    return found


def _meta_parameter(parameter: Tensor, shape: Shape) -> nn.Parameter:
    placeholder = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)
    placeholder.grad = torch.empty_like(placeholder) if parameter.requires_grad else None
    return placeholder


def _bytes(parameter: Tensor, shape: Shape) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel * parameter.element_size()
