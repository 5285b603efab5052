"""One step of the plain torch loop: forward and backward of each micro-batch, clip, step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.plan import Compute, Plan
from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.bare.bare_batches import BareBatch
from paceline.worker.bare.bare_buffers import BareBuffers
from paceline.worker.data import random_state
from paceline.worker.data.step_batch import to_device

__all__ = ["BarePass", "BareStepper"]

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class BareScale:
    """By what losses are multiplied before backward in fp16; 1 in other precisions."""

    def __init__(self, compute: Compute) -> None:
        self.now, self._moves, self.is_used = 1.0, False, compute.precision == "fp16"
        if self.is_used:
            self._moves = compute.loss_scale == "dynamic"
            self.now = float(compute.loss_scale_start if compute.loss_scale == "dynamic" else compute.loss_scale)
        self._window, self._patience = compute.loss_scale_window, compute.loss_scale_hysteresis
        self._left, self._since = self._patience, 0  # overflows until it is halved; steps without one

    def note(self, *, has_overflowed: bool, is_first: bool) -> None:
        """A pass is over, whose loss is finite: halve the scale after an overflow, double it after many good steps."""
        if not self._moves:
            return
        if has_overflowed:
            self._since = 0
            self._left -= 1
            if self._left <= 0:
                self.now = max(1.0, self.now / 2)
        elif is_first:
            self._since += 1
            if self._since == self._window:
                self.now, self._since, self._left = min(2.0**64, self.now * 2), 0, self._patience


class BarePass:
    """Runs the micro-batches of a step, and adds up what they give."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.buffers = BareBuffers()
        self.loss: float | None = None  # of the last pass; None: nothing called backward
        self.scale = BareScale(plan.compute)
        self.used_scale = self.scale.now  # in the last pass
        self._is_first = True  # of the passes over a batch
        self._plan, self._device = plan, device
        self._preserved = random_state.PreservedRandomState()
        self._num_step = 0  # samples
        self._micro: MicroBatch | None = None
        self._sum = self._count = 0.0
        self._is_counted = False  # losses come as (sum, count)

    def moved(self, data: Any) -> Any:
        """A micro-batch on the device, in the plan's precision."""
        return to_device(data, self._device, torch.float64 if self._plan.compute.precision == "fp64" else None)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Autocast, or a default type, as the plan's precision says."""
        former = torch.get_default_dtype()
        if self._plan.compute.precision == "fp64":
            torch.set_default_dtype(torch.float64)
        try:
            half = HALVES.get(self._plan.compute.precision)
            with torch.autocast(self._device.type, half or torch.bfloat16, enabled=half is not None):
                yield
        finally:
            torch.set_default_dtype(former)

    def run(self, batch: BareBatch, *, again: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        """Yield the micro-batches, whose backward is awaited. `again` runs one once more, without a gradient; where it
        is not known, buffers go from one micro-batch to the next."""
        self._num_step, self._sum, self._count, self._is_counted = batch.num_samples, 0.0, 0.0, False
        self.used_scale, self._is_first = self.scale.now, batch.num_passes == 0
        self.buffers.begin()
        with self._preserved:
            for micro in batch.micros:
                if again is not None:
                    self.buffers.rewind()
                data = self._opened(batch, micro)
                with self.computing():
                    yield data
                self._note_alone()
            if again is not None:
                self._run_in_turn(batch, again)
        batch.num_passes += 1
        self.loss = self._sum / self._count if self._count else None

    def backward(self, loss: Any) -> None:
        """Add a micro-batch's gradient."""
        micro = self._micro
        if micro is None:
            raise RuntimeError(
                "worker.backward() was called outside of a loop over a batch, or twice for one micro-batch"
            )
        self._note_alone()  # before backward: a block that is computed again there changes its buffers once more
        is_pair = isinstance(loss, (tuple, list))
        value, count = loss if is_pair else (loss, micro.num_samples)
        self._is_counted |= is_pair
        with torch.autocast(self._device.type, enabled=False):
            if self.scale.is_used:  # each sample counts as in a mean, so that the same gradients overflow
                share = 1 / self._num_step if is_pair else count / self._num_step
                (value.float().reshape(()) * share * self.scale.now).backward()
            else:
                (value.reshape(()) if is_pair else value.reshape(()) * (count / self._num_step)).backward()
        self._sum += float(value.detach()) * (1.0 if is_pair else count)
        self._count += float(count)

    def finish(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Divide by the loss scale, and by the count, where losses came with one; returns whether all gradients are
        finite. Where they are not, buffers are what they were, too: the step is left out."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient in gradients if self.scale.is_used else ():
            gradient.div_(self.scale.now)
        if self._is_counted and self._count:
            for gradient in gradients:
                gradient.div_(self._count / self._num_step if self.scale.is_used else self._count)
        is_finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        if not is_finite:
            self.buffers.rewind()
        if self.loss is not None and math.isfinite(self.loss):
            self.scale.note(has_overflowed=not is_finite, is_first=self._is_first)
        return is_finite

    def _opened(self, batch: BareBatch, micro: MicroBatch) -> Any:
        data = self.moved(batch.read(micro))
        self._micro = micro
        random_state.seed_all(self._plan.batch.seed, 0, batch.step, batch.num_passes, micro.index)
        return data

    def _note_alone(self) -> None:
        if self._micro is not None:
            self.buffers.note_alone(self._micro.num_samples)
        self._micro = None

    def _run_in_turn(self, batch: BareBatch, again: Callable[[Any], Any]) -> None:
        """Find what the step leaves in the buffers."""
        with self.buffers.in_turn():
            for micro in batch.micros:
                data = self._opened(batch, micro)
                with torch.no_grad(), self.computing():
                    again(data)
                self.buffers.note_in_turn()
        self._micro = None


class BareStepper:
    """`step(batch)` of the plain torch loop."""

    def __init__(
        self,
        bare_pass: BarePass,
        *,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        loss_of: Callable[[Any], Any],
        clip_norm: float | None,
        begin: Callable[[BareBatch], None],
        stepping: Callable[[], contextlib.AbstractContextManager[None]],
        commit: Callable[[BareBatch], None],
    ) -> None:
        self.grad_norm: Tensor | None = None
        self._pass, self._optimizers, self._loss_of, self._clip_norm = bare_pass, optimizers, loss_of, clip_norm
        self._parameters = list(dict.fromkeys(p for model in models for p in model.parameters()))
        self._begin, self._stepping, self._commit = begin, stepping, commit

    def __call__(self, batch: BareBatch) -> Tensor:
        self._begin(batch)
        for parameter in self._parameters:
            parameter.grad = None
        for micro in self._pass.run(batch, again=self._loss_of):
            self._pass.backward(self._loss_of(micro))
        is_finite = self._pass.finish(self._parameters)
        if self._clip_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm if is_finite else float("inf"))
        if is_finite:
            with self._stepping():
                for optimizer in self._optimizers:
                    optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        self._commit(batch)
        return torch.tensor(float("nan") if self._pass.loss is None else self._pass.loss, dtype=torch.float64)
