"""What a gradient pass brings (`StepOutcome`), what travels with it, and how it is committed with the other workers."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from paceline.comm.group import Disrupted
from paceline.worker.step.losses import LossSpike

__all__ = ["StepInvalidated", "StepOutcome", "StepVote", "SummedMetadata"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a pass; equal on all workers."""

    loss: float  # of the whole global batch; NaN when no worker called backward
    finite: bool  # of the gradients
    unused: tuple[str, ...]  # parameters that no worker used
    is_empty: bool  # no worker called backward: the pass only read the data
    communication_s: float
    broken: str = ""  # the first parameter here whose gradient is not finite; "": none, or not looked for
    spike: LossSpike | None = None  # the optimizer does not step
    is_idle: bool = False  # this replica, which takes steps by itself, had nothing to run
    is_late: bool = False  # others took the step without this replica's share of it
    noise_scale: float | None = None  # of gradients, in samples; None: not known yet
    grad_norm: float | None = None  # global, before clipping, of unscaled losses; None: not known, or not finite
    loss_scale: float | None = None  # by which losses were multiplied; None: the plan scales none
    next_loss_scale: float | None = None  # gradients overflowed, as is expected now and then, and this comes next
    num_overflows: int = 0  # passes with gradients that overflowed in fp16, of all attempts, with this one

    @property
    def is_taken(self) -> bool:
        """Whether the optimizer steps; otherwise the gradients have been dropped."""
        return self.finite and self.spike is None and not self.is_idle and not self.is_late


class StepVote(Protocol):
    """How a pass is committed with the other workers: `Consensus`, or a replica's own vote."""

    @property
    def wants_change(self) -> bool:
        """Whether this worker knows of something to be done between two steps."""
        ...

    def change_is_due(self) -> None:
        """All workers know that one of them wants a change."""
        ...

    def vote(self) -> bool:
        """Wait until all workers have the result; False: it is void."""
        ...


class StepInvalidated(Disrupted):
    """The members have regrouped, and this pass is void."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SummedMetadata:
    """The step metadata, summed over the workers."""

    loss_sum: float
    weight_sum: float
    wants_change: bool  # one of them wants a change between two steps
    changed: list[bool]  # for each buffer: it changed on one of them
    of_buffers: list[float]  # `BufferAverager.marks`
    of_state: float  # `StateTrials.mark`
