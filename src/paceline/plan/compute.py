"""Compute says how a worker does its arithmetic, and what it keeps in memory for it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from paceline.config import check_fields
from paceline.errors import PlanError
from paceline.plan.part import PlanPart

__all__ = ["Compute"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Compute(PlanPart):
    """How a worker computes: `precision`, what to `recompute` in backward, what to `offload`, and whether to `compile`.

    precision "bf16" computes forward and backward in bf16 and keeps weights and optimizer in fp32. "fp64" keeps
    everything in fp64: slow, the reference that parity compares with.

    recompute (activation checkpointing; Chen et al. 2016) "blocks" keeps only the inputs of the model's repeated
    blocks. "selective" also keeps what is costly to compute in them (matrix products, convolutions, attention,
    collectives), and computes the cheap rest again.

    offload "optimizer" keeps the optimizer's state outside of the device's memory. "all" also keeps parameters and
    gradients there, and moves one unit at a time to the device. They lie in the host's memory. With `offload_path`
    optimizer state lies in unnamed, memory-mapped files in that directory on each worker's host (best a fast local
    disk). On the CPU only a path helps, since the host's memory is the device's. Nothing moves between workers.

    Raises PlanError for a relative `offload_path`, or one without `offload`.

    Example::

        compute = paceline.Compute(precision="bf16", recompute="selective")
        assert str(paceline.Plan(compute=compute)) == "compute(precision=bf16,recompute=selective)"
    """

    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    recompute: Literal["none", "blocks", "selective"] = "none"
    offload: Literal["none", "optimizer", "all"] = "none"
    offload_path: str | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.offload_path is None:
            return
        if not self.offload_path.startswith(("/", "~")):
            raise PlanError(
                f"Compute.offload_path is {self.offload_path!r}; it must begin with / (or ~), so that all workers mean "
                "the same place: name a directory on a fast local disk, or leave it out."
            )
        if self.offload == "none":
            raise PlanError(
                f"Compute.offload_path is {self.offload_path!r}, but offload='none' keeps nothing there: use "
                "Compute(offload='optimizer', offload_path=...), or leave it out."
            )
