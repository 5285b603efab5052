"""How many samples a micro-batch has: as the plan says, or fewer since steps ran out of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from paceline.plan import Batch
from paceline.schedule.micro_batches import MicroBatch, micro_batches

__all__ = ["MicroBatchSize"]


class MicroBatchSize:
    """The size of micro-batches now, equal on all workers. It is part of the run's state.

    `is_even`: those of a short step have about the same size; else all but the last are whole.
    """

    is_even = True

    def __init__(self, planned: Batch, *, start: int | None = None) -> None:
        """`start`: the size to begin with, where that is known to be smaller than the plan's."""
        self.planned = planned  # as the plan says, whatever is adopted
        self._planned, self._start = planned.resolved_micro, start
        now = min(start or self._planned, self._planned)
        self.batch = dataclasses.replace(planned, micro=now)  # the plan's, in micro-batches of now
        self.changed: Callable[[], None] = lambda: None  # called after each change

    @property
    def samples(self) -> int:
        """Samples of a micro-batch, at most."""
        return self.batch.resolved_micro

    def cut(self, start: int, stop: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a step that has positions [start, stop)."""
        return micro_batches(start, stop, self.samples, is_even=self.is_even)

    def adopt(self, batch: Batch, *, is_even: bool = True) -> None:
        """From now on steps are those of this batch, which a program's own data loader says. All workers call it."""
        if batch.resolved_micro != self._planned:
            self._planned, now = batch.resolved_micro, min(self._start or batch.resolved_micro, batch.resolved_micro)
        else:
            now = self.samples  # halved perhaps, since
        self.batch, self.is_even = dataclasses.replace(batch, micro=now), is_even

    @property
    def half(self) -> int:
        """Half of them, rounded up."""
        return -(-self.samples // 2)

    def halve(self) -> None:
        """From now on each micro-batch is two, of which the first may have a sample more. All workers call it."""
        self.take(self.half)

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint, a newcomer or a snapshot."""
        return {"planned": self._planned, "samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned if it is smaller, unless the plan has been given another size since."""
        if state["planned"] == self._planned:
            self.take(min(state["samples"], self.samples))

    def take(self, samples: int) -> None:
        """From now on each micro-batch has so many samples. All workers call it."""
        self.batch = dataclasses.replace(self.batch, micro=samples)
        self.changed()
