"""torch's GradScaler in the plain loop: losses are judged and reported unscaled, and all workers skip the same steps.

A scaler multiplies each loss before its backward. Guards, reports and closures want the loss of one process, so what
`scaler.scale` was given is kept until the micro-batch's backward.

Gradients of a pass that is not taken are removed on all workers. A scaler that finds none at all raises an error, and
one that is to lower its scale must see that they were not finite. So it is shown infinite ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["ScaledLosses", "scaled_losses"]

FSDP = "torch.distributed.fsdp.sharded_grad_scaler"
SHARDED = (
    "ShardedGradScaler asks torch's default process group whether gradients are finite, and workers here have none. "
    "Use torch.amp.GradScaler: all workers skip the same steps with it, under every layout"
)
OWN = (
    "Compute(precision='fp16') scales losses itself, and a GradScaler would scale them a second time. Leave the scaler "
    "out: return the loss as it is, or write worker.backward(loss), and then optim.step(). Or keep it, with "
    "torch.autocast and precision='fp32'"
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Scaled:
    """One loss that a scaler has multiplied."""

    given: Tensor  # without a graph
    scaled: Tensor
    scaler: torch.amp.GradScaler  # its scale stays until the pass is over; to read it waits for a device


class ScaledLosses:
    """What the scalers of this process have multiplied since the micro-batch began."""

    def __init__(self) -> None:
        self.has_scaler = False  # whether an enabled one was used within a pass
        self.is_refused = False  # the plan scales losses
        self._is_open = False
        self._found: list[_Scaled] = []
        self._is_installed = False

    def install(self, *, is_refused: bool) -> None:
        """Have torch's scalers tell of what they multiply, from now on; or refuse to, where the plan does it."""
        self.is_refused = is_refused
        if self._is_installed:
            return
        self._is_installed = True
        self._tell_of(torch.amp.GradScaler)
        former = torch.amp.GradScaler.__init_subclass__

        def of_subclass(cls: type, **fields: Any) -> None:
            former(**fields)
            self._tell_of(cls)

        setattr(torch.amp.GradScaler, "__init_subclass__", classmethod(of_subclass))  # noqa: B010  # as below

    def _tell_of(self, kind: type) -> None:
        """Have a class of scalers tell, and all that are derived from it."""
        for derived in kind.__subclasses__():
            self._tell_of(derived)
        scale: Any = vars(kind).get("scale")
        if scale is None:
            return  # that of the class it is derived from

        @functools.wraps(scale)
        def noted(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            if self._is_open and scaler.is_enabled():
                if self.is_refused:
                    raise RuntimeError(OWN)
                if type(scaler).__module__ == FSDP:
                    raise RuntimeError(SHARDED)
                self.has_scaler = True
                if isinstance(outputs, Tensor):
                    self._found.append(_Scaled(outputs.detach().clone(), scaled, scaler))
            return scaled

        setattr(kind, "scale", noted)  # noqa: B010  # the stub has it as a method

    def open(self) -> None:
        """A micro-batch begins, or a pass."""
        self._found.clear()
        self._is_open = True

    def close(self) -> None:
        """The pass is over."""
        self._found.clear()
        self._is_open = False

    def unscaled(self, value: Tensor) -> Tensor:
        """Return a loss of this micro-batch as it was before a scaler multiplied it, without a graph.

        Of a loss that was computed from a scaled one, that scale is taken out.
        """
        found = next((one for one in self._found if one.scaled is value), None)
        if found is not None:
            return found.given
        scales = {one.scaler.get_scale() for one in self._found}
        return value.detach() / scales.pop() if len(scales) == 1 else value.detach()

    def unscaled_norm(self, norm: float | None) -> float | None:
        """Return the norm that the pass's gradients would have without a scaler; None where it is not finite, or not
        known: of several scalers, or where this worker has run no micro-batch."""
        if norm is None or not math.isfinite(norm) or not self.has_scaler:
            return norm if norm is not None and math.isfinite(norm) else None
        scales = {one.scaler.get_scale() for one in self._found}
        return norm / scales.pop() if len(scales) == 1 else None

    def refuse_in_stepper(self) -> None:
        """Raise RuntimeError where a loss was multiplied: a stepper takes its steps without the scaler."""
        if self._found:
            raise RuntimeError(
                f"GradScaler.scale() multiplied the loss by {self._found[0].scaler.get_scale():g} within "
                "worker.stepper(), whose optimizers step without the scaler: gradients would stay that large. Return "
                "the loss unscaled. Or write a plain loop: worker.backward(scaler.scale(loss)), then "
                "scaler.step(optim) and scaler.update()"
            )


scaled_losses = ScaledLosses()
