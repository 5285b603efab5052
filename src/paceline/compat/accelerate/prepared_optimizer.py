"""Optimizers and schedulers as `Accelerator.prepare` returns them: they step where all workers do."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from paceline.compat.accelerate.flat_loop import FlatLoop

__all__ = ["PreparedScheduler", "gate_optimizer"]

SCHEDULED = "_wrapped_by_lr_sched"  # of torch's schedulers, which watch the method


def gate_optimizer(optimizer: Optimizer, flat: FlatLoop) -> None:
    """Have the optimizer's `step()` and `zero_grad()` do nothing while a step's micro-batches are under way."""
    step, zero_grad = optimizer.step, optimizer.zero_grad

    def gated_step(own: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if not flat.note_step():
            return None
        return step() if closure is None else step(closure)

    def gated_zero_grad(own: Optimizer, set_to_none: bool = True) -> None:
        if flat.zero_grad(own):
            zero_grad(set_to_none)

    # A scheduler that was made before looks for its mark on the method, and binds what it finds here.
    if hasattr(step, SCHEDULED):
        setattr(gated_step, SCHEDULED, True)
    optimizer.step = types.MethodType(gated_step, optimizer)
    optimizer.zero_grad = types.MethodType(gated_zero_grad, optimizer)


class PreparedScheduler:
    """Steps its scheduler where an optimizer has stepped: once for each process, unless batches are split.

    A schedule is written for the batches of one process, of which a step takes as many as there are processes. All
    other attributes are the scheduler's.
    """

    def __init__(self, scheduler: Any, flat: FlatLoop, *, times: int, follows_optimizer: bool = True) -> None:
        self.scheduler = scheduler
        self._flat, self._times, self._follows_optimizer = flat, times, follows_optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet: while a copy is made
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, or do nothing inside of a step and after one that was left out."""
        if not self._follows_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if self._flat.in_pass or self._flat.was_skipped:
            return
        for _ in range(self._times):
            # A schedule of a known length may not be asked to go beyond it.
            if getattr(self.scheduler, "total_steps", None) is not None:
                if self.scheduler._step_count <= self.scheduler.total_steps:
                    self.scheduler.step(*args, **kwargs)
            else:
                self.scheduler.step(*args, **kwargs)
