"""Counts the steps of a program that has a loop of its own, by torch's hook of all optimizers.

A program may have several optimizers, and each steps at most once in a step: in A B A B the second A belongs to
another one than the first. So a step ends when as many have stepped as in any step before, or when one steps again. An
optimizer that another one steps within its own, as ZeroRedundancyOptimizer does, is a part of that.

The loss of a step is that on which `backward()` was called last, on each worker; readers take the mean over workers.
On a GPU to read it would wait for the device, so only every `FAR_STEPS`-th is read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.comm.flight_recorder import FlightRecorder
from paceline.worker.loop.learning_rates import LearningRates
from paceline.worker.loop.step_log import StepLog

__all__ = ["ProgramSteps"]

PHASE = "the program's own step"
FAR_STEPS = 20


class ProgramSteps:
    """The steps of one worker."""

    def __init__(self, log: StepLog, recorder: FlightRecorder) -> None:
        self._log, self._recorder, self._rates = log, recorder, LearningRates()
        self._stepped: list[Optimizer] = []  # since the last step ended
        self._stepping: list[Optimizer] = []  # at this moment, the outermost first
        self._most: int | None = None  # that have stepped in any step
        self._loss: Tensor | None = None  # of the last backward
        self._stepped_on: Tensor | None = None  # the loss before the last optimizer's step

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count while entered. The last step is complete when this is left, unless an error ends it."""
        self._log.is_counting = True
        self._recorder.begin(PHASE, 1)
        handles = (
            register_optimizer_step_pre_hook(self._optimizer_steps),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        )
        try:
            with self._hearing_losses():
                yield
            self._end_step()
        finally:
            for handle in handles:
                handle.remove()
            self._log.is_counting = False

    @contextlib.contextmanager
    def _hearing_losses(self) -> Iterator[None]:
        """While entered, keep the loss of each `backward()`."""
        its_class: Any = Tensor
        original = its_class.backward

        @functools.wraps(original)
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if tensor.numel() == 1:
                self._loss = tensor.detach()
            original(tensor, *args, **kwargs)

        its_class.backward = backward
        try:
            yield
        finally:
            if its_class.backward is backward:  # else other code has replaced it
                its_class.backward = original

    def _optimizer_steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._leave(optimizer)  # its last step has ended in an error that the program has caught
        self._stepping.append(optimizer)

    def _leave(self, optimizer: Optimizer) -> None:
        places = [place for place, one in enumerate(self._stepping) if one is optimizer]
        del self._stepping[places[0] if places else len(self._stepping) :]

    def _optimizer_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._leave(optimizer)
        if self._stepping:
            return
        if any(optimizer is one for one in self._stepped):
            self._most = max(self._most or 0, len(self._stepped))
            self._end_step()
        self._stepped.append(optimizer)
        self._stepped_on, self._loss = self._loss if self._loss is not None else self._stepped_on, None
        if len(self._stepped) == self._most:
            self._end_step()

    def _end_step(self) -> None:
        if not self._stepped:
            return
        loss, self._stepped_on = self._stepped_on, None
        is_read = loss is not None and _is_plain(loss)
        if loss is not None and loss.device.type != "cpu":
            is_read = is_read and self._log.step % FAR_STEPS == 0
        self._log.count(self._rates.now(self._stepped), loss=float(loss) if is_read and loss is not None else None)
        self._stepped.clear()
        self._recorder.begin(PHASE, self._log.step + 1)


def _is_plain(loss: Tensor) -> bool:
    """Whether a number can be read from it: no distributed or traced tensor, which this worker alone cannot read."""
    return type(loss) is Tensor and not loss.is_meta and not torch.compiler.is_compiling()
