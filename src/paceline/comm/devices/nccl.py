"""NCCL as a communicator: torch's back end, without what ends the process when a member is lost.

torch's back end watches its own collectives, and by default ends the whole process after an error or a time limit: for
runs that begin again as a whole. Here a lost member is an ordinary event, so that is switched off, and communicators
are made in NCCL's non-blocking mode, in which they can be aborted at any moment.

Not yet run on several devices: machines with more than one were not at hand. What is tested is all that stands above
this file, with a stand-in that behaves as NCCL's documentation says (`tests/support/fake_nccl.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import environment
from paceline.comm.devices.communicator import CommunicatorWork
from paceline.errors import SyncError

__all__ = ["NcclCommunicator"]


class NcclCommunicator:
    """One member's end of an NCCL communicator, which exists from `connect` on. `store` is for this one alone."""

    def __init__(self, store: dist.Store, *, index: int, size: int, device: torch.device) -> None:
        made: Any = getattr(dist, "ProcessGroupNCCL", None)
        if made is None:
            raise SyncError(
                f"this torch ({torch.__version__}) has no NCCL, over which workers with a {device.type} device each "
                "exchange tensors. Install a torch that has, or let the workers share devices: device='cuda-shared'"
            )
        environment.let_nccl_be_aborted()
        options = made.Options()
        options.config.blocking = 0
        self._device = device
        self._backend: Any = made(store, index, size, options)

    def connect(self) -> None:
        self._backend.eager_connect_single_device(self._device)

    def all_reduce(self, tensor: Tensor) -> CommunicatorWork:
        return self._backend.allreduce([tensor], dist.AllreduceOptions())

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor]) -> CommunicatorWork:
        return self._backend.allgather([list(out)], [tensor])

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor) -> CommunicatorWork:
        return self._backend.reduce_scatter([out], [list(parts)])

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor]) -> CommunicatorWork:
        return self._backend.alltoall(list(out), list(parts))

    def broadcast(self, tensor: Tensor, source: int) -> CommunicatorWork:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._backend.broadcast([tensor], options)

    def error(self) -> str | None:
        # `ErrorType` has members for success, a time limit, and errors of the communicator and of another member.
        found: Any = self._backend.get_error()
        name = getattr(found, "name", str(found))
        return None if name == "SUCCESS" else f"NCCL says {name}"

    def abort(self) -> None:
        self._backend.abort()
