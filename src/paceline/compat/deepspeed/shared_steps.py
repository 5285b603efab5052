"""The steps of one engine among several that a program trains in turn: a GAN, an actor and a critic.

Forwards and backwards of several engines are interleaved as the program likes, and a loss may go through models of
several of them. So they are torch's own here, and gradients add up in `.grad`, as in any program of torch. At the
engine's last `step()` of a step, what has added up is one gradient pass of the run, over the engine's own model: all
workers agree on it, clip it, and take the step of this engine's optimizer, or leave it out together.

    D.backward(a)  D.backward(b)  D.step()     a step of the run: D's gradients, D's optimizer
    G.backward(c)  G.step()                    the next one: G's

Each engine has a stream of batches of its own, of its own size. In fp16 each has a loss scale of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.sharded_tensors import local_part
from paceline.compat.deepspeed_files.batch_sizes import BatchSizes
from paceline.compat.foreign_steps import StepEnd, open_batches
from paceline.parallel.precision import computing, input_dtype
from paceline.worker.data.micro_batch_size import MicroBatchSize
from paceline.worker.data.step_batch import StepBatch, to_device
from paceline.worker.loop.stepper import Stepper
from paceline.worker.stateful_member import loop_of
from paceline.worker.step.loss_scale import LossScale
from paceline.worker.worker import Worker

__all__ = ["SharedSteps"]


class SharedSteps:
    """Takes the steps of one of several engines; what `ForeignSteps` is to a program's only one."""

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        batch: BatchSizes,
        *,
        name: str,
        scale: LossScale,
        beside: Sequence[nn.Module],
    ) -> None:
        """`batch`: of the engine's configuration. `name`: of its stream. `beside`: the models of all
        engines that share the run, with those that come later."""
        self._worker, self._model, self._beside, self._name = worker, model, beside, name
        # What a worker's forwards have added up comes as one micro-batch.
        whole = dataclasses.replace(worker.plan.batch, size=batch.train, micro=batch.micro * batch.accumulation)
        self._sizes, self._count = MicroBatchSize(whole), batch.accumulation
        self._scale, self._precision = scale, worker.plan.compute.precision
        self._executor = loop_of(worker).executor
        self._batches: Iterator[StepBatch] | None = None
        self._batch: StepBatch | None = None
        self._stepper: Stepper | None = None
        self._losses: list[Tensor] = []  # of the step's micro-batches
        self._loss: Tensor | None = None  # of the present one: all that were given to `backward`
        self._held: list[tuple[Parameter, Tensor]] = []  # what these have made, for the pass
        self._used: list[Parameter] = []  # the sharded ones that this worker's losses come from: the others have zeros
        self._used_scale = 1.0  # by which the losses of this step are multiplied
        self._compute_within(model)

    def _compute_within(self, model: nn.Module) -> None:
        """Have each forward of the model compute in the plan's precision, from wherever it is called."""
        around: list[contextlib.AbstractContextManager[Any]] = []

        def before(*_: Any) -> None:
            around.append(self.computing())
            around[-1].__enter__()

        def after(*_: Any) -> None:
            around.pop().__exit__(None, None, None)

        if self._precision != "fp32":
            model.register_forward_pre_hook(before, prepend=True)
            model.register_forward_hook(after, always_call=True)

    @functools.cached_property
    def _named(self) -> list[tuple[str, Parameter]]:
        """The parameters of all engines, at the first backward: no engine is made after it."""
        self._executor.shards.close()  # so that parameters are this worker's own rows of them
        return [pair for model in self._beside for pair in model.named_parameters()]

    @property
    def has_begun(self) -> bool:
        """Whether a first step was taken, or a first loss given: from then on nothing can be restored."""
        return self._batches is not None or self.is_under_way

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun, and is not taken."""
        return self._loss is not None or bool(self._losses)

    @property
    def is_at_end(self) -> bool:
        """Whether the step has all micro-batches of this worker."""
        return len(self._losses) == self._count

    def move(self, data: Any) -> Any:
        """Return a program's data on the worker's device, in the precision's own type."""
        return to_device(data, self._worker.device, input_dtype(self._precision))

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """What surrounds a forward: the plan's precision."""
        return computing(self._precision, self._worker.device)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, the mean over this worker's micro-batch, to those of all that it comes from."""
        if not self.is_under_way:
            self._used_scale = self._scale.value
        hooks = self._executor.hooks
        hooks.begin(self._named)  # they wait for the step's pass, which shows them the whole gradient
        try:
            with torch.autocast(self._worker.device.type, enabled=False):
                (loss if self._used_scale == 1.0 else loss * self._used_scale).backward()
        finally:
            hooks.end()
        value = loss.detach().double()
        self._loss = value if self._loss is None else self._loss + value

    def end_micro(self) -> None:
        """End the present micro-batch. Raises RuntimeError where it had no backward."""
        if self._loss is None:
            raise RuntimeError(
                "engine.step() comes after engine.backward(loss), once for each micro-batch. With several engines that "
                "train loss.backward() is not enough: it does not say whose step the loss belongs to"
            )
        self._losses.append(self._loss)
        self._loss = None

    def finish(self, optimizer: Optimizer, max_norm: float | None) -> StepEnd:
        """Agree with the other workers on the gradients, clip them, and step the optimizer where all take the step."""
        if self._batches is None:
            self._stepper = self._worker.stepper(self._model, optimizer, forward=self._give, clip_norm=max_norm)
            self._batches = open_batches(self._worker, name=self._name, sizes=self._sizes)
            self._next_batch()
        if self._stepper is None or self._batch is None:
            raise SystemExit(0)  # max_steps: an end like any other
        self._average_buffers()
        others_used = self._hold_gradients()
        before, self._executor.loss_scale = self._executor.loss_scale, self._scale
        try:
            with self._executor.buffers.left_alone():
                self._stepper(self._batch)
        finally:
            self._executor.loss_scale = before
        outcome = self._executor.outcome
        self._executor.shards.take_used()  # what the pass itself has noted
        self._executor.shards.note_used(others_used)
        optimizer.zero_grad(set_to_none=True)
        self._model.zero_grad(set_to_none=True)  # it may train more than the optimizer has
        self._losses = []
        return StepEnd(is_taken=outcome is not None and outcome.is_taken, norm=self._stepper.grad_norm)

    def _hold_gradients(self) -> list[Parameter]:
        """Hold what backwards have made, for the pass, which begins without gradients. Returns which sharded parameters
        of other engines were used: the pass forgets that, too."""
        shards = self._executor.shards
        shards.close()  # so that parameters are this worker's own rows of them
        parameters = list(self._model.parameters())
        self._held = [(one, one.grad) for one in parameters if one.requires_grad and one.grad is not None]
        own, made = {id(one) for one in parameters}, {id(one) for one, _ in self._held}
        used = shards.take_used()
        self._used = [one for one in used if id(one) in made]
        return [one for one in used if id(one) not in own]

    def advance(self) -> None:
        """End the step: it is reported, and saved where that is due. Raises SystemExit(0) at the run's last step."""
        self._next_batch()
        if self._batch is None:
            raise SystemExit(0)  # max_steps: an end like any other

    def close(self) -> None:
        """Leave the steps: what was not taken did not happen."""
        if self._batches is not None and hasattr(self._batches, "close"):
            self._batches.close()  # pyright: ignore[reportAttributeAccessIssue]  # asked for in the line before
        self._batch, self._losses, self._loss = None, [], None

    def _next_batch(self) -> None:
        self._batch = None if self._batches is None else next(self._batches, None)

    def _average_buffers(self) -> None:
        """Running statistics are each worker's own while it runs forwards, and equal on all after a step."""
        found = [one for model in self._beside for one in model.buffers() if one.is_floating_point() and one.numel()]
        if not found or self._worker.workers == 1:
            return
        mean = self._worker.average(torch.cat([one.detach().reshape(-1).double() for one in found]))
        for one, part in zip(found, mean.split([one.numel() for one in found]), strict=True):
            # By `data`, of which autograd takes no note: a graph of another engine may hold it until its backward.
            one.data.copy_(part.view_as(one))

    def _give(self, model: nn.Module, micro: None) -> Tensor:
        """What stands for this worker's micro-batches in the run's own pass: the mean of their losses, with the
        gradients that they have made."""
        held, self._held = self._held, []
        self._executor.shards.note_used(self._used)
        mean = torch.stack(self._losses).mean().requires_grad_()  # backward runs even where nothing has a gradient
        terms = _Made([gradient for _, gradient in held], 1 / (self._count * self._used_scale))
        return _WithGradients.apply(mean, terms, *(one for one, _ in held))


@dataclasses.dataclass(slots=True)
class _Made:
    """Gradients that backwards have made, until they are given away, and by what they are to be multiplied."""

    gradients: list[Tensor]
    factor: float


class _WithGradients(torch.autograd.Function):
    """A value whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, made: _Made, *parameters: Parameter) -> Tensor:
        ctx.made = made
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        factor = float(outputs[0]) * ctx.made.factor
        # Where nobody else holds them, autograd keeps them as they are. A copy takes memory, and in torch 2.11 that of
        # rows, of which some workers have none, is a whole one on all workers.
        gradients, ctx.made.gradients = ctx.made.gradients, []
        for one in gradients:
            local_part(one).mul_(factor)
        return None, None, *gradients
