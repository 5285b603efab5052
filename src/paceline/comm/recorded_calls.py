"""Has a process group of torch note its collectives in the flight recorder: those of the user's own code, of
DistributedDataParallel, `fully_shard`, DTensor.

The methods of the one group object are replaced, which torch's C++ code calls, too. A method that another one of them
calls is not noted again. A wait is noted where Python waits; DistributedDataParallel waits in C++, where a worker that
enters no further collective shows the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.flight_recorder import FlightRecorder

__all__ = ["is_recorded", "record_calls"]

# Method of torch's process groups -> what the call is named, and the position of the argument that has the same size
# on all members; None: there is none.
CALLS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter", 0),
    "reduce_scatter_single": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 0),
    "alltoall": ("all_to_all", None),
    "alltoall_base": ("all_to_all", None),
    "all_to_all_single": ("all_to_all", None),
    "barrier": ("barrier", None),
}
MARK = "records_its_calls"


def record_calls(group: Any, recorder: FlightRecorder, *, name: str, ranks: Sequence[int]) -> None:
    """From now on the group's collectives are noted. `name`: the group's in the recorder; `ranks`: its members."""
    if recorder.is_in(name):
        recorder.part(name)  # an earlier group of the same name was destroyed
    recorder.join(name, ranks)
    within = threading.local()
    for method, (kind, at) in CALLS.items():
        original = getattr(group, method, None)
        if original is not None:
            setattr(group, method, _recorded(original, kind, at, recorder=recorder, name=name, within=within))
    setattr(group, MARK, True)


def is_recorded(group: object) -> bool:
    """Whether a process group notes its own collectives."""
    return getattr(group, MARK, False) is True


def _recorded(
    original: Callable[..., Any],
    kind: str,
    at: int | None,
    *,
    recorder: FlightRecorder,
    name: str,
    within: threading.local,
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(within, "is_called", False):
            return original(*args, **kwargs)
        dtype, numel = _size(args[at]) if at is not None and len(args) > at else (None, 0)
        serial = recorder.enter(kind, "", dtype=dtype, numel=numel, group=name)
        within.is_called = True
        try:
            work = original(*args, **kwargs)
        finally:
            within.is_called = False
        return work if work is None else RecordedWork(work, recorder, serial)

    return call


def _size(value: Any) -> tuple[torch.dtype | None, int]:
    """The type of a tensor, or of the first in (lists of) tensors, and the number of elements of all."""
    if isinstance(value, Tensor):
        return value.dtype, value.numel()
    sizes = [_size(one) for one in value]
    return (sizes[0][0] if sizes else None), sum(numel for _, numel in sizes)


class RecordedWork(dist.Work):
    """A collective under way; while Python waits for it, the recorder shows that."""

    def __init__(self, work: dist.Work, recorder: FlightRecorder, serial: int) -> None:
        super().__init__()
        self._work, self._recorder, self._serial = work, recorder, serial

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._recorder.wait(self._serial)
        try:
            return self._work.wait(timeout)
        finally:
            self._recorder.leave()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def synchronize(self) -> None:
        self.wait()
