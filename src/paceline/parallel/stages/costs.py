"""What each unit costs, to cut a model evenly: its floating-point operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.parallel.stages.record import record
from paceline.parallel.units import Unit

__all__ = ["operation_costs"]


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
