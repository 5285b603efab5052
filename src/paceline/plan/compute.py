"""Compute says how a worker does its arithmetic, and what it keeps in memory for it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from paceline.config import check_fields, non_defaults
from paceline.errors import PlanError
from paceline.plan.part import PlanPart

__all__ = ["Compute", "defaults_but_of"]

OPTIONS = {"loss_scale": "fp16", "fp8_": "fp8"}  # how names of options begin -> the precision that has them
MOST_SCALE = 2.0**64  # a loss times it is far from the end of fp32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Compute(PlanPart):
    """How a worker computes: `precision`, what to `recompute` in backward, what to `offload`, and whether to `compile`.

    precision "bf16" and "fp16" compute forward and backward in that type, and keep weights and optimizer in fp32.
    "fp64" keeps everything in fp64: slow, the reference that parity compares with.

    With "fp16" each loss is multiplied by a loss scale before its backward, and gradients are divided by it, because
    small gradients vanish in fp16 (Micikevicius et al. 2018, "Mixed precision training"). `loss_scale` is "dynamic",
    or a number that stays. A dynamic scale begins at `loss_scale_start`. A step whose gradients overflow on any worker
    is taken by none, and halves the scale, down to 1; after `loss_scale_window` steps without overflow it doubles.
    Before it is halved, `loss_scale_hysteresis` - 1 overflows since it was last doubled are only skipped.

    With "fp8" all is as with "bf16", but that linear layers multiply in 8 bits, by torchao (`pip install
    'paceline[fp8]'`; Micikevicius et al. 2022). `fp8_recipe` says what has a scale of its own, in torchao's words:
    "tensorwise" a whole tensor, "rowwise" each row or column, "rowwise_with_gw_hp" the same with gradients of weights
    in bf16. `fp8_layers` "blocks" converts the linear layers in the model's repeated blocks, or all but the last one
    where it has none; "all" also those outside of them, such as the head. Both sizes of a weight have to be multiples
    of 16. Adapters of peft stay in bf16, as do weights that are computed anew for each forward. `fp8_skip` leaves out
    layers by patterns of their names, as in "*.gate|layers.0.*". `fp8_emulate` rounds to 8 bits and multiplies in 32,
    on devices that have no FP8: slow, with the numbers of FP8.

    recompute (activation checkpointing; Chen et al. 2016) "blocks" keeps only the inputs of the model's repeated
    blocks. "selective" also keeps what is costly to compute in them (matrix products, convolutions, attention,
    collectives), and computes the cheap rest again.

    offload "optimizer" keeps the optimizer's state outside of the device's memory. "all" also keeps parameters and
    gradients there, and moves one unit at a time to the device. They lie in the host's memory. With `offload_path`
    optimizer state lies in unnamed, memory-mapped files in that directory on each worker's host (best a fast local
    disk). On the CPU only a path helps, since the host's memory is the device's. Nothing moves between workers.

    state "bf16" keeps the optimizer's state in half the memory: averages and momentum are rounded after each step,
    stochastically (Gupta et al. 2015). Which way a number is rounded depends on the seed, the step and its place only.

    Raises PlanError for a relative `offload_path`, or one without `offload`; for a loss scale without "fp16", or one
    that is no positive number; for options of a dynamic scale beside one that stays; and for options of FP8 without
    "fp8".

    Example::

        compute = paceline.Compute(precision="bf16", recompute="selective")
        assert str(paceline.Plan(compute=compute)) == "compute(precision=bf16,recompute=selective)"
    """

    precision: Literal["fp32", "bf16", "fp16", "fp8", "fp64"] = "fp32"
    recompute: Literal["none", "blocks", "selective"] = "none"
    offload: Literal["none", "optimizer", "all"] = "none"
    offload_path: str | None = None
    compile: bool = False
    state: Literal["fp32", "bf16"] = "fp32"
    loss_scale: Literal["dynamic"] | float = "dynamic"
    loss_scale_start: float = 65536.0
    loss_scale_window: int = 2000
    loss_scale_hysteresis: int = 1
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    fp8_layers: Literal["blocks", "all"] = "blocks"
    fp8_skip: str | None = None
    fp8_emulate: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_loss_scale()
        self._check_offload_path()
        self._check_state()
        self._check_fp8()

    def _check_fp8(self) -> None:
        given = {name: value for name, value in non_defaults(self).items() if name.startswith("fp8_")}
        for name, value in given.items() if self.precision != "fp8" else ():
            raise PlanError(
                f"Compute.{name} is {value!r}, but precision={self.precision!r} computes nothing in FP8: use "
                f"Compute(precision='fp8', {name}={value!r}), or leave it out."
            )

    def _check_state(self) -> None:
        if self.state == "bf16" and self.precision == "fp64":
            raise PlanError(
                "Compute.state is 'bf16', but precision='fp64' keeps everything in fp64: use state='fp32', or another "
                "precision."
            )
        if self.state == "bf16" and self.offload != "none":
            raise PlanError(
                f"Compute.state is 'bf16', but offload={self.offload!r} keeps the state outside of the device's memory "
                "as it is: use one of the two."
            )

    def _check_loss_scale(self) -> None:
        given = {name: value for name, value in non_defaults(self).items() if name.startswith("loss_scale")}
        for name, value in given.items():
            if self.precision != "fp16":
                raise PlanError(
                    f"Compute.{name} is {value!r}, but precision={self.precision!r} scales no losses: use "
                    f"Compute(precision='fp16', {name}={value!r}), or leave it out."
                )
            if self.loss_scale != "dynamic" and name != "loss_scale":
                raise PlanError(
                    f"Compute.{name} is {value!r}, but loss_scale={self.loss_scale!r} stays as it is: use "
                    "loss_scale='dynamic', or leave one of the two out."
                )
        for name in ("loss_scale_window", "loss_scale_hysteresis"):
            if getattr(self, name) < 1:
                raise PlanError(f"Compute.{name} is {getattr(self, name)}; it must be at least 1 step.")
        for name in ("loss_scale", "loss_scale_start"):
            value = getattr(self, name)
            if value != "dynamic" and not 1 <= value <= MOST_SCALE:
                raise PlanError(
                    f"Compute.{name} is {value!r}; it must be from 1 to {MOST_SCALE:g}, as powers of two are "
                    "(65536), by which nothing is rounded."
                )

    def _check_offload_path(self) -> None:
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


def defaults_but_of(precision: str) -> dict[str, Any]:
    """Return the values that options of other precisions have where a plan is given this one: their defaults."""
    others = tuple(start for start, owner in OPTIONS.items() if owner != precision)
    return {one.name: one.default for one in dataclasses.fields(Compute) if one.name.startswith(others)}
