"""Guard says what is done about numbers that go wrong: losses that leap, and replicas whose weights differ."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from paceline import config
from paceline.errors import PlanError
from paceline.plan.part import PlanPart

__all__ = ["Guard"]

LEAST_WINDOW = 8
ROLLBACK_EVERY = 100
USED_BY = {  # fields that mean something only beside certain values of `on_spike`
    "factor": ("stop", "skip", "rollback"),
    "window": ("stop", "skip", "rollback"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Guard(PlanPart):
    """What to do `on_spike`, and how often replicas compare their weights.

    A spike is a step whose loss, over the whole global batch, is above median + `factor` x spread of the last `window`
    losses (spread: 1.4826 times the median absolute deviation, and at least 1 % of the median; nothing is judged before
    half a window is known), or is not finite, or whose gradients are not. It is seen before the optimizer steps.
    "skip": nobody takes the step, its samples count as used. "stop": the run fails before the step. "rollback": the
    run goes back to the last snapshot, which every worker keeps in its host's memory, and goes on behind the spike's
    samples: those since the snapshot are not used again. "none": a step whose gradients are not finite is skipped,
    nothing else is looked at.

    Snapshots are taken `snapshot_every` steps apart. They also outlive the workers: when one of a run with a fixed
    number of replicas is lost, or the last replica of one where they come and go, all begin again with the newest
    one, without a look at the disk. None: where a replica
    is several workers, and so often that it takes at most 1 % of the time, at least 10 steps apart; for "rollback" 100
    steps apart. A number: under all layouts. 0: never.

    `check_every` steps (0: never) all workers compare a digest of their trained weights, bit by bit; one that differs
    from the majority is named, and gets the majority's state.
    """

    on_spike: Literal["none", "stop", "skip", "rollback"] = "none"
    factor: float = 10.0
    window: int = 128
    snapshot_every: int | None = None
    check_every: int = 0

    @property
    def rollback_every(self) -> int:
        """Steps between the snapshots that a rollback goes back to."""
        return self.snapshot_every or ROLLBACK_EVERY

    def __post_init__(self) -> None:
        config.check_fields(self)
        if not 0 < self.factor < math.inf:
            raise PlanError(f"Guard.factor is {self.factor}; it must be more than 0, for example 10.")
        if self.window < LEAST_WINDOW:
            raise PlanError(f"Guard.window is {self.window}; it must be at least {LEAST_WINDOW} steps.")
        if self.snapshot_every is not None and self.snapshot_every < 0:
            raise PlanError(
                f"Guard.snapshot_every is {self.snapshot_every}; it must be a number of steps, 0 (never), or left out."
            )
        if self.snapshot_every == 0 and self.on_spike == "rollback":
            raise PlanError(
                "Guard.snapshot_every is 0, and on_spike='rollback' goes back to snapshots: leave it out, or use 1 or "
                "more steps."
            )
        if self.check_every < 0:
            raise PlanError(f"Guard.check_every is {self.check_every}; it must be 0 (never) or a number of steps.")
        for name in config.non_defaults(self):
            uses = USED_BY.get(name)
            if uses is not None and self.on_spike not in uses:
                raise PlanError(
                    f"Guard.{name} is {getattr(self, name)}, but on_spike={self.on_spike!r} does not use it: leave it "
                    f"out, or use on_spike={' or '.join(map(repr, uses))}."
                )
