"""A step that runs out of memory: void on all workers, it comes again in micro-batches of half the size.

A worker that gets no memory in the forward or backward of a micro-batch runs no further one. It takes part in the sums
of the pass with what it has, and its mark in the step metadata makes the sums void everywhere. So all workers know at
the same place, and nothing was changed.

That needs workers which exchange nothing within a micro-batch. Where a replica is split, the others would wait in the
middle of a layer. There, and where code of the user's own loop gets no memory in its forward, the error ends the
worker, and the supervisor starts all again with smaller micro-batches (`paceline.launch.coordinator.restart`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import torch.distributed as dist

from paceline.comm.group import Disrupted
from paceline.host_memory import is_out_of_memory
from paceline.plan import AllReduce, Plan
from paceline.worker.data.micro_batch_size import MicroBatchSize

__all__ = ["MemoryShortage", "PassOutOfMemory"]

BEFORE = re.compile(r"^\[enforce fail at [^\]]*\] (err == 0)?\.? *")  # what torch's check macros say first
AT_LEAST = (
    "paceline: micro-batches are of one sample already. What needs less memory: compute(recompute=blocks), "
    "compute(precision=bf16), compute(offload=optimizer), or a layout that splits the model (shard, tensor, stages). "
    "paceline plan SCRIPT --cluster NAME --fits says what would fit"
)


class PassOutOfMemory(Disrupted):
    """A worker got no memory in this pass: it is done again in smaller micro-batches, on all workers."""


class MemoryShortage:
    """What one worker knows of its memory in the present pass."""

    def __init__(self, plan: Plan, sizes: MicroBatchSize, *, is_split: bool) -> None:
        self._sizes = sizes
        self.halves = plan.guard.on_out_of_memory == "halve"  # where micro-batches have more than one sample
        self._is_whole = isinstance(plan.sync, AllReduce) and not is_split
        self.text = ""  # the error, where this worker got no memory
        self.is_torn: Callable[[], bool] = lambda: False  # whether an exchange has failed half way

    @property
    def can_halve(self) -> bool:
        """Whether smaller micro-batches may be taken."""
        return self.halves and self._sizes.samples > 1

    @property
    def half(self) -> int:
        """Samples of a micro-batch that is to be tried next."""
        return self._sizes.half

    @contextlib.contextmanager
    def survived(self) -> Iterator[None]:
        """Surround what a micro-batch runs. An error for want of memory is noted in `text`, where the pass can go on to
        its end without this worker's gradients; else it is raised."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self.halves and not self.can_halve and AT_LEAST not in getattr(error, "__notes__", ()):
                error.add_note(AT_LEAST)
            is_alone = not (isinstance(error, dist.DistError) or self.is_torn())
            if not (self.can_halve and self._is_whole and is_alone):
                raise
            self.text = _sentence(str(error))  # not the error itself: it holds frames, and their tensors


def _sentence(text: str) -> str:
    """The first sentence of an error, without the place in torch's sources."""
    return BEFORE.sub("", text.partition("\n")[0]).partition(". ")[0]
