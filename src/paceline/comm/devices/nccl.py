"""NCCL as a communicator: torch's back end, without what ends the process when a member is lost.

torch's back end watches its own collectives, and by default ends the whole process after an error or a time limit: for
runs that begin again as a whole. Here a lost member is an ordinary event, so that is switched off while communicators
are made. They are made in NCCL's non-blocking mode, in which they can be aborted at any moment.

torch counts a collective that has failed as completed, and says so only by its `exception`; `_Work` raises it.

Not yet run on several devices: machines with more than one were not at hand. What is tested is all that stands above
this file, with a stand-in that behaves as NCCL's documentation says (`tests/support/fake_nccl.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import environment
from paceline.comm.devices.communicator import CommunicatorWork
from paceline.comm.group import first_line
from paceline.errors import SyncError

__all__ = ["NcclCommunicator"]

PATIENCE_S = 600.0  # beyond the run's own limit, which is to come first: it says what is waited for
CONNECT_POLL_S = 0.001


class NcclCommunicator:
    """One member's end of an NCCL communicator, which exists from `connect` on. `store` is for this one alone."""

    def __init__(self, store: dist.Store, *, index: int, size: int, device: torch.device, timeout_s: float) -> None:
        """`timeout_s`: within which the caller gives up a collective by itself."""
        made: Any = getattr(dist, "ProcessGroupNCCL", None)
        if made is None:
            raise SyncError(
                f"this torch ({torch.__version__}) has no NCCL, over which workers with a {device.type} device each "
                "exchange tensors. Install a torch that has, or let the workers share devices: device='cuda-shared'"
            )
        options = made.Options()
        options.config.blocking = 0  # counts more than TORCH_NCCL_USE_COMM_NONBLOCKING
        options._timeout = timedelta(seconds=timeout_s + PATIENCE_S)
        self._device = device
        self._aborted = threading.Event()
        with environment.nccl_that_can_be_aborted():
            self._backend: Any = made(store, index, size, options)

    def connect(self) -> None:
        # In the non-blocking mode this returns before all have come; then the first collective waits for them, and
        # cannot be aborted meanwhile. So the first one belongs to the connection.
        with environment.nccl_that_can_be_aborted():
            self._backend.eager_connect_single_device(self._device)
            first = self.all_reduce(torch.zeros(1, device=self._device))
            while not first.is_completed():
                if self._aborted.is_set():
                    raise RuntimeError("the communicator was aborted while it was made")
                time.sleep(CONNECT_POLL_S)

    def all_reduce(self, tensor: Tensor) -> CommunicatorWork:
        return _Work(self._backend.allreduce([tensor], dist.AllreduceOptions()))

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor]) -> CommunicatorWork:
        whole = _as_one(out)
        if whole is not None:
            return _Work(self._backend._allgather_base(whole, tensor))
        return _Work(self._backend.allgather([list(out)], [tensor]))

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor) -> CommunicatorWork:
        whole = _as_one(parts)
        if whole is not None:
            return _Work(self._backend._reduce_scatter_base(out, whole, dist.ReduceScatterOptions()))
        return _Work(self._backend.reduce_scatter([out], [list(parts)]))

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor]) -> CommunicatorWork:
        return _Work(self._backend.alltoall(list(out), list(parts)))

    def broadcast(self, tensor: Tensor, source: int) -> CommunicatorWork:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return _Work(self._backend.broadcast([tensor], options))

    def error(self) -> str | None:
        # `ErrorType` has members for success, a time limit, and errors of the communicator and of another member.
        found: Any = self._backend.get_error()
        name = getattr(found, "name", str(found))
        return None if name == "SUCCESS" else f"NCCL says {name}"

    def abort(self) -> None:
        self._aborted.set()
        self._backend.abort()


class _Work:
    """A collective of torch's back end that does not count as completed where it has failed."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        exception = getattr(self._work, "exception", None)  # torch calls it deprecated, and has nothing else yet
        if exception is None:
            return True
        try:
            failure = exception()
        except Exception as raised:  # torch may raise it, or have no type for it: either way there is one
            failure = raised
        if failure is not None:
            raise RuntimeError(first_line(failure) if isinstance(failure, BaseException) else str(failure))
        return True


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose equal parts these are, one after the other in memory, flat; None where they are not. With it
    torch needs no room for a copy of them all."""
    first, each = tensors[0], tensors[0].numel()
    for number, one in enumerate(tensors):
        is_next = one.storage_offset() == first.storage_offset() + number * each
        is_here = one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_next and is_here and one.numel() == each and one.is_contiguous() and one.dtype == first.dtype):
            return None
    return first.detach().as_strided((len(tensors) * each,), (1,))
