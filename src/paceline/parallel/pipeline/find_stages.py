"""Find how a whole model is partitioned into stages: `find_stages(model, layout, ...)`. Nothing is changed or
communicated.

To balance the stages, each unit's cost is its number of floating-point operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import PlanError, Reason
from paceline.parallel.model_units import ModelUnit, find_units
from paceline.parallel.pipeline.stage_partition import StagePartition, partition_units
from paceline.parallel.pipeline.tape import Tape
from paceline.parallel.pipeline.tape_recorder import record
from paceline.parallel.precision import computing
from paceline.parallel.sample_input import as_sample, guess_sample
from paceline.plan import Layout

__all__ = ["PipelinePlan", "find_stages", "record_costs"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """The units of a model, and which stage has which of them."""

    units: list[ModelUnit]
    partition: StagePartition
    tape: Tape  # of the sample


def find_stages(
    model: nn.Module,
    layout: Layout,
    *,
    sample: Any,
    named: Sequence[str] = (),
    starts: Sequence[str],
    precision: str,
    device: torch.device,
) -> PipelinePlan:
    """Return the stages of a whole model; all workers with the same model get the same stages.

    `named`: modules that are units, in place of those found automatically. `starts`: the units with which stages after
    the first begin; without it, stages have about equal costs. `sample`: a small input; if it is None, one is guessed,
    which runs the model once. Otherwise its weights may be on the meta device. Raises PlanError with every reason
    against a partition.
    """
    num_stages = layout.stages * layout.stages_per_worker
    units = find_units(model, named=named)
    if len(units) < num_stages:
        name = type(model).__name__
        shown, fewer = f"stages={layout.stages}", "stages"
        if layout.stages_per_worker > 1:
            shown, fewer = f"{shown}, stages_per_worker={layout.stages_per_worker}", "stages_per_worker, fewer stages"
        what = (
            f"{name} has {len(units)} modules that could be on a stage of their own, and Layout({shown}) makes "
            f"{num_stages} stages."
        )
        remedy = f"Use fewer {fewer}, or shard={layout.stages} in their place, which splits any model."
        raise PlanError(f"{what} {remedy}", reasons=[Reason(module=name, what=what, remedy=remedy)])
    # Not under autocast, which changes neither which unit uses what nor how much there is to do.
    with computing("fp64" if precision == "fp64" else "fp32", device):
        arguments = as_sample(sample) if sample is not None else guess_sample(model, size=layout.stages)
        micro = (arguments.args, dict(arguments.kwargs))

        def forward(micro: Any) -> Any:
            args, kwargs = micro
            return model(*args, **kwargs)

        tape = (
            record(model, forward, micro, units=units, device=device)
            if starts
            else record_costs(model, forward, micro, units=units, device=device)
        )
        costs = tape.costs()
    partition = partition_units(
        model, tape, units=units, num_stages=num_stages, costs=costs if sum(costs) > 0 else (), starts=starts
    )
    return PipelinePlan(units=units, partition=partition, tape=tape)


def record_costs(
    model: nn.Module, forward: Callable[[Any], Any], micro: Any, *, units: Sequence[ModelUnit], device: torch.device
) -> Tape:
    """Return a forward's tape whose costs are the floating-point operations of each unit's forward.

    Matrix products and convolutions count, as in torch's own counter. A backward takes twice as many, so the shares are
    the same. What root-level code does with a unit's values (a loss, logits of tied weights) counts as that unit's.
    """
    with FlopCounterMode(display=False) as counter:
        return record(model, forward, micro, units=units, device=device, meter=lambda: float(counter.get_total_flops()))
