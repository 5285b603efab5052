"""What NCCL's back end of torch is asked for: a communicator that can be aborted, and no end of the process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from paceline import environment
from paceline.comm.devices.communicator import connect_communicator
from paceline.comm.devices.nccl import NcclCommunicator
from paceline.comm.group import Disrupted
from paceline.errors import SyncError

CPU = torch.device("cpu")  # in place of the GPU, which is only handed on
OF_NCCL_ALONE = {"get_error"}  # what only ProcessGroupNCCL has of these names, of which this torch may have none
SWITCHES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
}


class Work:
    """A work of torch's; `failure` may be an error that is returned, or raised as the binding may do."""

    def __init__(self, failure: Any = None, *, raises: bool = False) -> None:
        self.failure, self.raises, self.is_done = failure, raises, True

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.is_done or self.failure is not None  # as WorkNCCL's

    def exception(self) -> Any:
        if self.raises:
            raise self.failure
        return self.failure


class Backend:
    """In place of torch's ProcessGroupNCCL, with the names that torch's own back ends have."""

    late = False  # the first collective waits with a lock held, as where others are still to come
    made: Backend

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)
            self._timeout = timedelta(minutes=10)

    def __init__(self, store: Any, index: int, size: int, options: Any) -> None:
        Backend.made = self
        self.given, self.called = (store, index, size, options.config.blocking, options._timeout), list[str]()
        self.environment = set_for_nccl()
        self.found, self.work = SimpleNamespace(name="SUCCESS"), Work()
        self.all_are_here, self._lock = threading.Event(), threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name not in OF_NCCL_ALONE and not hasattr(c10d.Backend, name):
            raise AttributeError(f"torch's back ends have no {name}")
        return lambda *_: self._note(name)

    def _note(self, name: str) -> Work:
        self.called.append(name)
        return self.work

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Work:
        with self._lock:
            self.environment_in_connect = set_for_nccl()
            if self.late:
                self.all_are_here.wait(20)
            return self._note("allreduce")

    def abort(self) -> None:
        with self._lock:
            self._note("abort")

    def get_error(self) -> Any:
        return self.found


def set_for_nccl() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL_")}


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SWITCHES, "TORCH_NCCL_USE_COMM_NONBLOCKING"):
        monkeypatch.setenv(name, "of the user")
        monkeypatch.delenv(name)  # what is set meanwhile is undone
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)


def made_for(store: Any = None) -> tuple[NcclCommunicator, Backend]:
    made = NcclCommunicator(store or dist.HashStore(), index=1, size=2, device=CPU, timeout_s=30)
    return made, Backend.made


def test_it_is_made_so_that_it_can_be_aborted_while_others_are_still_to_come() -> None:
    store, before = dist.HashStore(), dict(os.environ)
    made, backend = made_for(store)
    assert backend.given == (store, 1, 2, 0, timedelta(seconds=630)), "the run's own limit of 30 s comes first"
    assert backend.environment == SWITCHES and dict(os.environ) == before
    made.connect()
    assert backend.environment_in_connect == SWITCHES and dict(os.environ) == before
    made.broadcast(torch.ones(4), 1)
    made.abort()
    assert backend.called == ["eager_connect_single_device", "allreduce", "broadcast", "abort"]
    assert made.error() is None
    backend.found = SimpleNamespace(name="REMOTE_ERROR")
    assert made.error() == "NCCL says REMOTE_ERROR"


def test_what_the_user_has_set_stays_and_several_may_be_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    before = dict(os.environ)
    first = environment.nccl_that_can_be_aborted()
    with first:
        second = environment.nccl_that_can_be_aborted()
        second.__enter__()
    assert set_for_nccl() == SWITCHES | {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    second.__exit__(None, None, None)
    assert dict(os.environ) == before


def test_rows_of_one_tensor_need_no_copy() -> None:
    made, backend = made_for()
    rows = torch.zeros(2, 4)
    apart = [torch.zeros(4), torch.zeros(4)]
    made.all_gather(torch.ones(4), rows.unbind())
    made.all_gather(torch.ones(4), apart)
    made.reduce_scatter(rows.flatten().split(4), torch.ones(4))
    made.reduce_scatter([rows[1], rows[0]], torch.ones(4))
    made.all_to_all(rows.unbind(), apart)
    assert backend.called == ["_allgather_base", "allgather", "_reduce_scatter_base", "reduce_scatter", "alltoall"]


@pytest.mark.parametrize("raises", [False, True])
def test_a_collective_that_failed_does_not_count_as_completed(raises: bool) -> None:
    made, backend = made_for()
    backend.work = Work(RuntimeError("Watchdog caught collective operation timeout\nfor the rest"), raises=raises)
    work = made.all_reduce(torch.ones(4))
    work.wait()
    with pytest.raises(RuntimeError, match=r"^Watchdog caught collective operation timeout$"):
        work.is_completed()
    backend.work = Work()
    assert made.all_reduce(torch.ones(4)).is_completed()


def test_a_connection_waits_for_its_first_collective_and_is_given_up_though_torch_holds_its_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.comm.devices.communicator.ABANDONED_S", 0.1)
    monkeypatch.setattr(Backend, "late", True)
    made, backend = made_for()
    began, before = time.monotonic(), set(threading.enumerate())

    def check() -> None:
        if time.monotonic() - began > 0.2:
            raise Disrupted("worker 0 was killed by signal 9")

    with pytest.raises(Disrupted, match="worker 0"):
        connect_communicator(made, check)
    assert time.monotonic() - began < 5
    backend.all_are_here.set()
    for left in set(threading.enumerate()) - before:
        left.join(20)
    assert backend.called == ["eager_connect_single_device", "allreduce", "abort"] and set_for_nccl() == {}


def test_a_connection_whose_collective_does_not_end_is_aborted() -> None:
    made, backend = made_for()
    backend.work.is_done = False
    began = time.monotonic()

    def check() -> None:
        if time.monotonic() - began > 0.1:
            raise Disrupted("worker 0 was killed by signal 9")

    with pytest.raises(Disrupted, match="worker 0"):
        connect_communicator(made, check)
    assert backend.called[-1] == "abort" and set_for_nccl() == {}


def test_a_torch_without_it_names_what_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(SyncError, match=r"has no NCCL, .* or let the workers share devices: device='cuda-shared'"):
        NcclCommunicator(dist.HashStore(), index=0, size=1, device=torch.device("cuda", 0), timeout_s=30)
