"""Guard says what is done where numbers go wrong, and where memory runs out."""

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

    A spike is a step whose loss or gradients are not finite, or whose loss over the global batch is too high. Too high
    means above median + `factor` x spread of the last `window` losses. The spread is 1.4826 times the median absolute
    deviation, and at least 1 % of the median. Nothing is judged before half a window is known. A spike is seen before
    the optimizer steps:

    - "none": a step whose gradients are not finite is skipped, and nothing else is looked at;
    - "skip": no worker takes the step, and its samples count as used;
    - "stop": the run fails with BadNumbersError before the step;
    - "rollback": the run goes back to the last snapshot and continues behind the spike's samples. Samples since the
      snapshot are not used again.

    Snapshots lie in each worker's host's memory, `snapshot_every` steps apart (0: never), and outlive the workers. When
    a run with a fixed number of replicas loses a worker, all restart from the newest snapshot, without the disk. The
    same holds for the last replica of an elastic run. None means: if a replica is several workers, as often as costs at
    most 1 % of the time, at least 10 steps apart; for "rollback" 100 steps apart.

    Every `check_every` steps (0: never) all workers compare a digest of their trained weights, bit by bit. A worker
    that differs from the majority is named, and receives the majority's state.

    `on_out_of_memory` is about a step for which a worker gets no memory. "halve": from that step on micro-batches have
    half as many samples, on all workers, and the step runs again. The global batch stays; what depends on the
    micro-batch changes with it (batch norm, in-batch losses, the draws of dropout). "stop": the run fails.

    Raises PlanError for values out of range, and for `factor` or `window` beside an `on_spike` without use for them.

    Example::

        guard = paceline.Guard(on_spike="skip", factor=8.0, check_every=100)
        assert paceline.Plan.parse("guard(on_spike=skip,factor=8.0,check_every=100)").guard == guard
    """

    on_spike: Literal["none", "stop", "skip", "rollback"] = "none"
    factor: float = 10.0
    window: int = 128
    snapshot_every: int | None = None
    check_every: int = 0
    on_out_of_memory: Literal["halve", "stop"] = "halve"

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
