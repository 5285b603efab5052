"""`step(batch)`: forward, backward, agree, commit. The one contract that holds for every plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.training_loop import TrainingLoop
from paceline.worker.step.gradient_pass import StepOutcome

if TYPE_CHECKING:
    from paceline.worker.step.pipeline_stages import PipelinePass

__all__ = ["Stepper"]


class Stepper:
    """Made by `worker.loop.stepper`; call it with each batch. All workers must call it, with the batch they were given.

    Returns the loss of the whole global batch as a 0-d tensor, equal on all workers. When gradients are not finite on
    any worker, or the plan's guard sees a spike, no worker takes the step, which is told. After a call `grad_norm`
    holds the global norm before clipping, where clipping is on.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        *,
        device: torch.device,
        optimizers: Sequence[Optimizer],
        gradients: GradientReducer,
        loss_of: Callable[[Any], Any],
        clip_norm: float | None,
        pipelined: PipelinePass | None = None,
    ) -> None:
        """`pipelined`: how micro-batches go through the model's stages, where it is cut into such."""
        self.grad_norm: Tensor | None = None
        self._loop, self._device = loop, device
        self._optimizers = tuple(optimizers)
        self._gradients = gradients
        self._loss_of = loss_of
        self._clip_norm = clip_norm
        self._pipelined = pipelined
        gradients.serve(self._optimizers)

    def __call__(self, batch: StepBatch) -> Tensor:
        if not isinstance(batch, StepBatch):
            raise TypeError(f"step() takes an item of worker.batches(...), not a {type(batch).__name__}")
        with self._loop.stepping():
            outcome = self._loop.walk(
                batch, self._gradients, self._loss_of, is_finite=self._is_finite, pipelined=self._pipelined
            )
            self._take(outcome)
        self._loop.commit(batch, by=self)
        return torch.tensor(outcome.loss, dtype=torch.float64, device=self._device)

    def run_more(self, batch: StepBatch) -> None:
        """Take a step more, of this replica alone, on a part of a batch that is in no book."""
        outcome = self._loop.extra_pass(
            batch, self._gradients, self._loss_of, is_finite=self._is_finite, pipelined=self._pipelined
        )
        self._take(outcome)

    def _take(self, outcome: StepOutcome) -> None:
        if not outcome.is_taken:
            return
        if self._clip_norm is not None and self.grad_norm is not None:
            self._gradients.clip(self._clip_norm, self.grad_norm)
        self._gradients.apply(self._optimizers)

    @property
    def _is_finite(self) -> Callable[[], bool] | None:
        """How the summed gradients are judged; None: they are looked through."""
        return self._measure_norm if self._clip_norm is not None else None

    def _measure_norm(self) -> bool:
        """Clipping needs the global norm, which is finite where all gradients are: no second look at them, unless the
        norm itself has overflowed."""
        self.grad_norm = self._gradients.norm()
        if bool(torch.isfinite(self.grad_norm)):
            return True
        self.grad_norm = self._gradients.norm(torch.float64)
        return bool(torch.isfinite(self.grad_norm))


def pair_loss(model: nn.Module, loss: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """The loss of an (input, target) micro-batch."""

    def loss_of(micro: Any) -> Any:
        if not isinstance(micro, (tuple, list)) or len(micro) != 2:
            raise ValueError(
                f"loss(output, target) needs (input, target) batches, but the dataset gives a {_shape_of(micro)}. "
                "Use worker.stepper(model, optim, forward=fn), where fn(model, micro) returns the loss"
            )
        inputs, target = micro
        return loss(model(inputs), target)

    return loss_of


def _shape_of(value: Any) -> str:
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, (tuple, list, dict)) else name
