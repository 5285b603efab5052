"""What each unit costs, to cut a model evenly: by its floating-point operations, or by the time that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.parallel.stages.cut import Cut, Route, closed_places, route
from paceline.parallel.stages.record import record
from paceline.parallel.stages.replay import Part, Replayer
from paceline.parallel.stages.structure import tensors_in
from paceline.parallel.stages.tape import Tape
from paceline.parallel.units import Unit

__all__ = ["measured_costs", "operation_costs"]


def operation_costs(
    model: nn.Module, forward: Callable[[Any], Any], micro: Any, *, units: Sequence[Unit], device: torch.device
) -> list[float]:
    """Return the floating-point operations of each unit's forward, in the order of first calls, without weights.

    Matrix products and convolutions count, as in torch's own counter; a backward takes twice as many, so the shares are
    the same. What root-level code does with a unit's values (a loss, logits of tied weights) counts as that unit's.
    """
    with FlopCounterMode(display=False) as counter:
        tape = record(model, forward, micro, units=units, device=device, meter=lambda: float(counter.get_total_flops()))
    return tape.costs()


def measured_costs(
    forward: Callable[[Any], Any],
    micro: Any,
    *,
    units: Sequence[Unit],
    tape: Tape,
    device: torch.device,
    times: int = 3,
) -> list[float]:
    """Return the seconds of each unit's forward and backward: the least of `times` runs of the whole model.

    The model has to be there as a whole. Gradients that its parameters have stay as they are; buffers, such as the
    statistics of batch norm, move as in any forward. Root-level code counts with the unit before it.
    """
    stages = _smallest_stages(tape)
    way = route(tape, Cut(stages=stages, parameters={}, buffers={}))
    parameters = [parameter for unit in units for parameter in unit.module.parameters()]
    former = [parameter.grad for parameter in parameters]
    best = [float("inf")] * len(stages)
    try:
        for _ in range(times):
            seconds = _walk(forward, micro, units, tape, way, device)
            best = [min(one, other) for one, other in zip(best, seconds, strict=True)]
    finally:
        for parameter, gradient in zip(parameters, former, strict=True):
            parameter.grad = gradient
    return [cost / len(names) for names, cost in zip(stages, best, strict=True) for _ in names]


def _smallest_stages(tape: Tape) -> tuple[tuple[str, ...], ...]:
    """Every unit for itself, but for those that must be together."""
    closed = closed_places(tape)
    stages: list[list[str]] = []
    for index, name in enumerate(tape.units):
        if index in closed:
            stages[-1].append(name)
        else:
            stages.append([name])
    return tuple(map(tuple, stages))


def _walk(
    forward: Callable[[Any], Any], micro: Any, units: Sequence[Unit], tape: Tape, way: Route, device: torch.device
) -> list[float]:
    """Forward and backward through all stages, one after the other; the seconds of each."""
    seconds, arrived = [], dict[int, Tensor]()
    parts: list[tuple[dict[int, Tensor], Part]] = []
    replayer = Replayer(units, device=device)
    for stage in range(len(way.crossing) + 1):
        received = {n: t.detach().requires_grad_(tape.values[n].has_gradient) for n, t in arrived.items()}
        begin = _now(device)
        part = replayer.replay(forward, micro, tape=tape, route=way, stage=stage, received=received)
        seconds.append(_now(device) - begin)
        parts.append((received, part))
        arrived = part.values
    roots = [tensor for tensor in tensors_in(parts[-1][1].result) if tensor.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    for stage in reversed(range(len(parts))):
        begin = _now(device)
        torch.autograd.backward(roots, gradients)
        seconds[stage] += _now(device) - begin
        if stage:
            pairs = [(n, parts[stage][0][n].grad) for n in way.with_gradient[stage - 1]]
            back = [(parts[stage - 1][1].values[n], grad) for n, grad in pairs if grad is not None]
            roots, gradients = [root for root, _ in back], [grad for _, grad in back]
    return seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
