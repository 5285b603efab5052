"""An operation that this worker has submitted, from the call to the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.compat.horovod.requests import OpRequest

__all__ = ["PendingOp", "written_event"]


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class PendingOp:
    """`inputs`: what the user gave. `outputs`: where the result of an all-reduce or a broadcast goes."""

    request: OpRequest
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    is_grouped: bool = False
    written_by: Any = None  # on a GPU: the event after which the inputs hold their numbers
    help_until_done: Callable[[PendingOp], None] | None = None  # of the session that it was submitted to
    result: Any = None
    error: BaseException | None = None
    is_done: bool = False

    def complete(self, result: Any) -> None:
        """Note the result. Only the first call counts, of this and `fail`. The caller wakes the thread that waits."""
        if not self.is_done:
            self.result, self.inputs = result, ()
            self.is_done = True

    def fail(self, error: BaseException) -> None:
        if not self.is_done:
            self.error, self.inputs = error, ()
            self.is_done = True

    def wait(self) -> Any:
        """Return the result; raises the error. The session sets a limit to the wait: it fails what is overdue."""
        if self.help_until_done is None:
            raise RuntimeError(f"{self.request.name} was not submitted")
        self.help_until_done(self)
        if self.error is not None:
            raise self.error
        return self.result

    def settle_inputs(self) -> None:
        """Return when the inputs hold their numbers."""
        if self.written_by is not None:
            self.written_by.synchronize()


def written_event(tensors: Sequence[Tensor]) -> Any:
    """Return the event after which tensors on a GPU hold their numbers; None on the CPU."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event = torch.cuda.Event()
    event.record()
    return event
