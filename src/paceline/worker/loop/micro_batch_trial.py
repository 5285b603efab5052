"""Steps in micro-batches of several sizes, one after the other in one run, so that each is measured.

`paceline plan --verify` has a script's plan run in this way (`paceline.cli.plan_costs.verify`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paceline.worker.data.micro_batch_size import MicroBatchSize

__all__ = ["MicroBatchTrial"]


class MicroBatchTrial:
    """Sets the size of micro-batches by the number of the step, equally on all workers."""

    def __init__(self, sizes: MicroBatchSize, trial: Sequence[tuple[int, int]]) -> None:
        """`trial`: samples of a micro-batch, and in how many steps; the last size stays."""
        self._sizes = sizes
        ends = itertools.accumulate(steps for _, steps in trial)
        self._until = [(end, samples) for end, (samples, _) in zip(ends, trial, strict=True)]

    def before_step(self, done: int) -> None:
        """So many steps are committed, and the next one comes."""
        samples = next((samples for end, samples in self._until if done < end), self._sizes.samples)
        if samples != self._sizes.samples:
            self._sizes.take(samples)
