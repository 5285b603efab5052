"""What NCCL's back end of torch is asked for: a communicator that can be aborted, and no end of the process."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.comm.devices.nccl import NcclCommunicator
from paceline.errors import SyncError

GPU = torch.device("cuda", 0)


class Backend:
    """In place of torch's ProcessGroupNCCL, with the names that its type declarations have."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)

    def __init__(self, store: Any, index: int, size: int, options: Any) -> None:
        self.given, self.called = (store, index, size, options.config.blocking), list[str]()
        self.environment = {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL_")}
        self.found = SimpleNamespace(name="SUCCESS")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.called.append(name)

    def get_error(self) -> Any:
        return self.found


def test_it_is_made_so_that_it_can_be_aborted_while_others_are_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_USE_COMM_NONBLOCKING"):
        monkeypatch.setenv(name, "of the user")
        monkeypatch.delenv(name)  # what is set meanwhile is undone
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    store = dist.HashStore()
    made = NcclCommunicator(store, index=1, size=2, device=GPU)
    backend: Backend = made._backend
    assert backend.given == (store, 1, 2, 0)
    assert backend.environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    }
    made.connect()
    numbers = torch.ones(4)
    made.all_reduce(numbers)
    made.broadcast(numbers, 1)
    made.abort()
    assert backend.called == ["eager_connect_single_device", "allreduce", "broadcast", "abort"]
    assert made.error() is None
    backend.found = SimpleNamespace(name="REMOTE_ERROR")
    assert made.error() == "NCCL says REMOTE_ERROR"


def test_a_torch_without_it_names_what_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(SyncError, match=r"has no NCCL, .* or let the workers share devices: device='cuda-shared'"):
        NcclCommunicator(dist.HashStore(), index=0, size=1, device=GPU)
