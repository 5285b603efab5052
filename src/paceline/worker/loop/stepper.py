"""`step(batch)`: forward, backward, agree, commit, under every plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.parallel.check.optimizer_requirements import steps_by_closure
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.training_loop import TrainingLoop
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.step.grad_scaler import scaled_losses
from paceline.worker.step.step_outcome import StepOutcome
from paceline.worker.step.weight_penalty import Penalty, WeightPenalty

if TYPE_CHECKING:
    from paceline.worker.step.pipeline_stages import PipelinePass

__all__ = ["Stepper", "make_stepper", "pair_loss"]

T = TypeVar("T")

WRAPPED = (
    "an optimizer (torch.optim.Optimizer) that was prepared, or a list of them, comes second. An object around an "
    "optimizer that sets its rate works in a plain loop: for x, y in batch: worker.backward(loss), and then its "
    "step(). With a stepper a scheduler does the same (torch.optim.lr_scheduler.LambdaLR)"
)


class Stepper:
    """Made by `worker.stepper`; call it with each batch. All workers must call it, with the batch they were given.

    Returns the loss of the whole global batch as a 0-d float64 tensor, equal on all workers. If gradients are not
    finite on any worker, or the plan's guard sees a spike, no worker takes the step, and an event reports it. After a
    call `grad_norm` holds the global norm of the gradients before clipping, 0-d and equal on all workers.
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
        clip_value: float | None = None,
        pipelined: PipelinePass | None = None,
        penalty: WeightPenalty | None = None,
    ) -> None:
        """`pipelined`: how micro-batches go through the model's stages, under pipeline parallelism. `penalty`: on the
        weights, added to the loss."""
        self.grad_norm: Tensor | None = None
        self._loop, self._device = loop, device
        self._optimizers = tuple(optimizers)
        self._gradients = gradients
        self._loss_of = loss_of
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._pipelined, self._penalty = pipelined, penalty
        gradients.serve(self._optimizers)

    def __call__(self, batch: StepBatch) -> Tensor:
        if not isinstance(batch, StepBatch):
            raise TypeError(f"step() takes an item of worker.batches(...), not a {type(batch).__name__}")
        with self._loop.stepping():
            outcome = self._loop.run_pass(
                batch, self._gradients, self._loss_of, is_finite=self._judge, pipelined=self._pipelined
            )
            self._take(outcome)
        self._loop.commit(batch, by=self)
        return torch.tensor(outcome.loss, dtype=torch.float64, device=self._device)

    def run_more(self, batch: StepBatch) -> None:
        """Take a step more, of this replica alone, on a part of a batch that a lost replica should have run."""
        with self._loop.stepping():
            outcome = self._loop.extra_pass(
                batch, self._gradients, self._loss_of, is_finite=self._judge, pipelined=self._pipelined
            )
            self._take(outcome)

    def _take(self, outcome: StepOutcome) -> None:
        if not outcome.is_taken:
            if outcome.next_loss_scale is not None:  # as is expected in fp16, also in the first step
                for optimizer in self._optimizers:
                    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # schedulers look for what torch sets and does not declare
            return
        if self._clip_norm is not None and self.grad_norm is not None:
            self._gradients.clip(self._clip_norm, self.grad_norm)
        if self._clip_value is not None:
            self._gradients.clip_values(self._clip_value)
        self._gradients.apply(self._optimizers)

    def _judge(self) -> bool:
        """Add the penalty's gradients, and return whether all gradients are finite."""
        if self._penalty is not None:
            self._loop.executor.penalty, gradients = self._penalty.compute()
            self._gradients.add(gradients)
        return self._measure_norm()

    def _measure_norm(self) -> bool:
        """The global norm is finite where all gradients are: no second look at them, unless it has overflowed."""
        self.grad_norm = self._gradients.norm()
        if bool(torch.isfinite(self.grad_norm)):
            return True
        self.grad_norm = self._gradients.norm(torch.float64)
        return bool(torch.isfinite(self.grad_norm)) or (self._clip_norm is None and self._gradients.is_finite())


def make_stepper(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    loss: Callable[[Any, Any], Any] | None,
    *,
    forward: Callable[[Any, Any], Any] | None,
    clip_norm: float | None,
    clip_value: float | None,
    penalty: Penalty | None,
    loop: TrainingLoop,
    prepared_models: PreparedModels,
    prepared_optimizers: Collection[Optimizer],
    device: torch.device,
) -> Stepper:
    """Check what `worker.stepper` was given, and make the stepper. ValueError where something was not prepared."""
    models = _listed(model, nn.Module, "a model (torch.nn.Module), or a list of them, comes first.")
    optimizers = _listed(optimizer, Optimizer, WRAPPED)
    for one in models:
        if one not in prepared_models:
            raise ValueError(
                f"worker.stepper() got a {type(one).__name__} that was not prepared: model = worker.prepare(model)"
            )
    for one in optimizers:
        if one not in prepared_optimizers:
            raise ValueError(
                f"worker.stepper() got {type(one).__name__} that was not prepared: optim = worker.prepare(optim)"
            )
        if isinstance(one, torch.optim.LBFGS) or steps_by_closure(one):
            raise ValueError(
                f"{type(one).__name__} evaluates the loss several times per step, by a closure, and cannot be used "
                "with a stepper; use a first-order optimizer, or a plain loop with optim.step(closure)"
            )
    if (loss is None) == (forward is None):
        raise ValueError("worker.stepper() needs either loss=fn(output, target) or forward=fn(model, micro)")
    if clip_norm is not None and clip_norm <= 0:
        raise ValueError(f"clip_norm is {clip_norm}; it must be more than 0, or None for no clipping")
    if clip_value is not None and (clip_value <= 0 or clip_norm is not None):
        raise ValueError(
            f"clip_value is {clip_value}, clip_norm is {clip_norm}: clip_value must be more than 0, or None for no "
            "clipping, and gradients are clipped by their norm or by value, not by both"
        )
    if forward is not None:
        loss_of = _bound(forward, model)
    elif len(models) > 1:
        raise ValueError("a stepper over several models needs forward=fn(models, micro)")
    else:
        loss_of = pair_loss(models[0], cast("Callable[[Any, Any], Any]", loss))
    loss_of = _without_scaler(loss_of)
    gradients = prepared_models.reducers.sum_over(models)
    for one in optimizers:
        foreign = sum(not gradients.has(p) for group in one.param_groups for p in group["params"])
        if foreign:
            raise ValueError(
                f"{type(one).__name__} holds {foreign} parameters that are not of this stepper's models: "
                "their gradients "
                "would not be averaged. Give the stepper all models: worker.stepper([a, b], optim, forward=...)"
            )
    return Stepper(
        loop,
        device=device,
        optimizers=optimizers,
        gradients=gradients,
        loss_of=loss_of,
        clip_norm=clip_norm,
        clip_value=clip_value,
        pipelined=prepared_models.pipelined(models, loss_of),
        penalty=None if penalty is None else prepared_models.penalty(models, penalty),
    )


def _listed(given: Any, kind: type[T], remedy: str) -> list[T]:
    """One thing of a kind, or several; raises TypeError for others."""
    found: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, kind) else [given]
    wrong = [one for one in found if not isinstance(one, kind)]
    if wrong or not found:
        raise TypeError(f"worker.stepper() got a {type(wrong[0] if wrong else given).__name__}: {remedy}")
    return found


def _bound(forward: Callable[[Any, Any], Any], model: Any) -> Callable[[Any], Any]:
    return lambda micro: forward(model, micro)


def _without_scaler(loss_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(micro: Any) -> Any:
        loss = loss_of(micro)
        scaled_losses.refuse_in_stepper()
        return loss

    return checked


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
