"""What each worker of a replica holds of a model, by formula: parameters, gradients, and the optimizer's state.

Activations come on top. The formulas are those of `paceline.plan.layout`: P, G and O bytes over s workers that split
rows, U bytes of the largest unit. Beside experts that are spread, those who split rows of all else are more workers.
What is offloaded is not in the device's memory, but for what a step brings there.
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
from paceline.parallel.fully_sharded.sharded_model import units_of
from paceline.parallel.meta.meta_device import USER_ERRORS
from paceline.parallel.offload.optimizer_state import brought_bytes
from paceline.parallel.tensor.layers import cut_dims, kind_of
from paceline.parallel.tensor.split_shapes import num_held
from paceline.plan import Layout, Plan
from paceline.schedule.pipeline import build

__all__ = ["MemoryEstimate", "estimate_memory"]

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one worker; `stage` is None where all workers of a replica hold as much."""

    stage: int | None
    parameters: int  # between steps
    gradients: int
    optimizer: int | None  # None: its state is known after the first step only
    elsewhere: int | None  # of all these, what is offloaded: in the host's memory, or in files
    peak: int | None  # the most in a step where it computes, without activations


def estimate_memory(
    model: nn.Module, look: ModelCheck, plan: Plan, optimizers: Sequence[Optimizer]
) -> list[MemoryEstimate]:
    """Return what the workers of a replica hold, those with the most where rows do not divide."""
    return [
        _on_worker(model, look, plan, optimizers, stage=stage)
        for stage in (range(plan.layout.stages) if look.stages is not None else (None,))
    ]


def _on_worker(
    model: nn.Module, look: ModelCheck, plan: Plan, optimizers: Sequence[Optimizer], *, stage: int | None
) -> MemoryEstimate:
    layout, offload = plan.layout, plan.compute.offload
    here = _names_here(model, look, layout, stage)
    named = {name: parameter for name, parameter in model.named_parameters() if name in here}
    gathered = {id(one): shape for one, shape in _cut_shapes(model, look, layout, named)}
    of_experts = {id(one) for routed in look.experts or () for one in routed.module.parameters()}
    both = layout.shard * layout.experts if layout.shard > 1 else 1
    rows = {number: _rows(shape, layout.shard if number in of_experts else both) for number, shape in gathered.items()}
    whole = sum(_bytes(one, gathered[id(one)]) for one in named.values())
    gradients_whole = sum(_bytes(one, gathered[id(one)]) for one in named.values() if one.requires_grad)
    parameters = sum(_bytes(one, rows[id(one)]) for one in named.values())
    gradients = sum(_bytes(one, rows[id(one)]) for one in named.values() if one.requires_grad)
    states = _state_bytes(optimizers, rows)
    optimizer = None if states is None else sum(num_bytes for num_bytes, _ in states)
    is_gathered = layout.shard > 1 or offload == "all"
    in_step = 0
    if is_gathered:
        in_step = _gathered_in_step(model, look, layout, gathered, named, whole=whole, gradients=gradients_whole)
    resting = gradients if not is_gathered or layout.zero > 1 else 0  # of zero=1 they are in what is gathered
    elsewhere, peak = 0, None if optimizer is None else parameters + optimizer + resting + in_step
    if offload == "optimizer":
        elsewhere = optimizer
        peak = None if states is None else parameters + resting + in_step + max((one for _, one in states), default=0)
    elif offload == "all":
        elsewhere, peak = None if optimizer is None else parameters + gradients + optimizer, in_step
    return MemoryEstimate(
        stage=stage, parameters=parameters, gradients=gradients, optimizer=optimizer, elsewhere=elsewhere, peak=peak
    )


def _names_here(model: nn.Module, look: ModelCheck, layout: Layout, stage: int | None) -> set[str]:
    """The names of the parameters that a worker of this number among its replica's stages has."""
    elsewhere = _experts_elsewhere(look, layout)
    here = {name for name, one in model.named_parameters() if id(one) not in elsewhere}
    if look.stages is None or stage is None:
        return here
    own = build(
        layout.schedule, num_workers=layout.stages, num_micro=1, stages_per_worker=layout.stages_per_worker
    ).stages_of(stage)
    return {name for name in here if set(look.stages.cut.parameters[name]) & set(own)}


def _experts_elsewhere(look: ModelCheck, layout: Layout) -> set[int]:
    """The ids of parameters of listed experts that the first worker has not."""
    lists = [members for one in look.experts or () for _, members in one.members()]
    others = [member for members in lists for member in members[len(members) // layout.experts :]]
    return {id(parameter) for member in others for parameter in member.parameters()}


def _cut_shapes(
    model: nn.Module, look: ModelCheck, layout: Layout, named: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Shape]]:
    """Each parameter here, with its shape on the first worker of those that cut layers."""
    shapes = {id(one): tuple(one.shape) for one in model.parameters()}
    modules = dict(model.named_modules())
    for layer in look.tensor.layers if look.tensor is not None else ():
        module = modules[layer.name]
        if (kind := kind_of(module)) is not None:
            for one, dim, sections in cut_dims(module, kind, layer):
                held = num_held(sections, size=layout.tensor, index=0)
                shapes[id(one)] = (*one.shape[:dim], held, *one.shape[dim + 1 :])
    for routed in look.experts or ():
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
    look: ModelCheck,
    layout: Layout,
    shapes: Mapping[int, Shape],
    named: Mapping[str, Tensor],
    *,
    whole: int,
    gradients: int,
) -> int:
    """Bytes that are gathered in a step beside what is held all the time."""
    if layout.zero == 1:
        return whole + gradients
    here = {id(one) for one in named.values()}
    units: list[dict[int, Tensor]] = [{id(p): p for p in one.module.parameters()} for one in look.experts or ()]
    apart = {number for unit in units for number in unit}
    for _, block in units_of(model, look.units):
        units.append({id(one): one for one in block.parameters() if id(one) not in apart})
    units = [{number: one for number, one in unit.items() if number in here} for unit in units]
    in_units = {number for unit in units for number in unit}
    units.append({id(one): one for one in named.values() if id(one) not in in_units})
    largest = max(sum(_bytes(one, shapes[number]) for number, one in unit.items()) for unit in units)
    return whole + 2 * largest if layout.zero == 2 else 3 * largest


def _state_bytes(optimizers: Sequence[Optimizer], shapes: Mapping[int, Shape]) -> list[tuple[int, int]] | None:
    """Return the state that optimizers make for each parameter of these shapes, as (bytes, bytes that a step brings at
    a time where it is offloaded); None where that cannot be seen before.

    A twin of each takes a step on parameters without data.
    """
    found: list[tuple[int, int]] = []
    for optimizer in optimizers:
        twin: Any = object.__new__(type(optimizer))
        vars(twin).update({key: value for key, value in vars(optimizer).items() if key != "step"})  # a scheduler's
        vars(twin).update({key: OrderedDict() for key in vars(optimizer) if key.endswith("_hooks")})
        twin.state, twin.param_groups = defaultdict(dict), []
        for group in optimizer.param_groups:
            ghosts = [_meta_parameter(one, shapes[id(one)]) for one in group["params"] if id(one) in shapes]
            twin.param_groups.append({**group, "params": ghosts})
        try:
            twin.step()
        except USER_ERRORS:
            return None
        for parameter, state in twin.state.items():
            num_bytes = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
            found.append((num_bytes, brought_bytes(optimizer, parameter, num_bytes)))
    return found


def _meta_parameter(parameter: Tensor, shape: Shape) -> nn.Parameter:
    ghost = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)
    ghost.grad = torch.empty_like(ghost) if parameter.requires_grad else None
    return ghost


def _bytes(parameter: Tensor, shape: Shape) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel * parameter.element_size()
