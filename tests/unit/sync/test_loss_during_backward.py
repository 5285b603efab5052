"""A member is lost while backward runs: the user's code hears nothing of it, and the end of the gradient pass does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.group import CompletedTransfer, Disrupted, SingleWorkerGroup
from paceline.comm.messages.tensor_messages import TensorMessage
from paceline.plan import AllReduce, Int8, ParameterServer, Raw, Wire
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.sync.parameter_server.client import ServerClient
from paceline.sync.parameter_server.sync_updates import SyncServerGradients

ONE_LAYER = 4 * 8 * 8  # bytes: a bucket for each


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))


def run_pass(model: nn.Module, gradients: GradientReducer) -> None:
    """A gradient pass of one micro-batch, up to its end."""
    gradients.begin(0)
    gradients.arm()
    model(torch.ones(1, 8)).sum().backward()


class Losing(SingleWorkerGroup):
    """A group of three; one member is lost after the first transfer."""

    size = 3

    def __init__(self) -> None:
        self.loses, self.num_begun = True, 0

    def all_reduce(self, tensor: Tensor, *, what: str) -> CompletedTransfer:
        return self._begun()

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> CompletedTransfer:
        return self._begun()

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> CompletedTransfer:
        return self._begun()

    def _begun(self) -> CompletedTransfer:
        self.num_begun += 1
        if self.loses and self.num_begun > 1:
            raise Disrupted("worker 2 was killed by signal 9")
        return CompletedTransfer()


@pytest.mark.parametrize(
    ("sync", "wire"),
    [
        (AllReduce(bucket_bytes=ONE_LAYER), Raw()),
        (AllReduce(bucket_bytes=ONE_LAYER), Int8()),
        (AllReduce(bucket_bytes=ONE_LAYER, op="adasum"), Raw()),
    ],
    ids=["raw", "int8", "adasum"],
)
def test_a_bucket_that_cannot_leave_is_told_at_the_end_of_the_pass(sync: AllReduce, wire: Wire) -> None:
    model, group = net(), Losing()
    gradients = GradientReducer(model.named_parameters(), group=group, sync=sync, wire=wire)
    run_pass(model, gradients)
    assert all(parameter.grad is not None for parameter in model.parameters()), "backward has come to its end"
    with pytest.raises(Disrupted, match="worker 2 was killed by signal 9"):
        gradients.flush([1.0])
    assert group.num_begun == 2, "nothing more is sent to a group that is over"
    group.loses = False
    gradients.members_changed()
    run_pass(model, gradients)
    gradients.flush([1.0])
    assert group.num_begun >= 2 + 4


class OnDevice(SingleWorkerGroup):
    """Two members whose waits are a device's: nothing but `settle` tells of an abort."""

    size = 2

    def __init__(self) -> None:
        self.is_aborted, self.num_settled = False, 0

    def all_reduce(self, tensor: Tensor, *, what: str) -> CompletedTransfer:
        return CompletedTransfer()

    def settle(self) -> None:
        self.num_settled += 1
        if self.is_aborted:
            raise Disrupted("worker 1 was killed by signal 9")


@pytest.mark.parametrize("aborted", [0, 1])
def test_no_number_of_a_device_is_read_before_its_sum_has_ended_well(aborted: int) -> None:
    model, groups = net(), [OnDevice(), OnDevice()]
    gradients = GradientReducer(
        model.named_parameters(), group=groups[0], sync=AllReduce(), wire=Raw(), all_workers=groups[1]
    )
    run_pass(model, gradients)
    gradients.flush([1.0])
    assert gradients.collect() == [1.0]
    assert [group.num_settled for group in groups] == [1, 1], "each once, whatever the number of buckets"
    run_pass(model, gradients)
    gradients.flush([1.0])
    groups[aborted].is_aborted = True
    with pytest.raises(Disrupted, match="worker 1 was killed by signal 9"):
        gradients.collect()


def test_so_it_is_with_a_bucket_that_leaves_after_the_others() -> None:
    model, group = net(), OnDevice()
    gradients = GradientReducer(model.named_parameters(), group=group, sync=AllReduce(bucket_bytes=8), wire=Raw())
    gradients.begin(0)
    gradients.arm()
    next(model.children())(torch.ones(1, 8)).sum().backward()
    gradients.flush([1.0])
    gradients.collect()
    gradients.land(scale=1.0)
    run_pass(model, gradients)  # all layers: three of the buckets are cold
    gradients.flush([1.0])
    gradients.collect()
    group.is_aborted = True
    with pytest.raises(Disrupted, match="worker 1 was killed by signal 9"):
        gradients.land(scale=1.0)


class Taking(ServerClient):
    """One server that takes what is pushed, as long as no worker is lost."""

    def __init__(self) -> None:
        self.count, self.is_lost = 1, False

    @property
    def are_there(self) -> bool:
        return True

    def meet(self, *_: Any, **__: Any) -> None:
        """It is there."""

    def push(self, number: int, header: Mapping[str, Any], *tensors: Tensor) -> Callable[[], None]:
        return self._wait

    def ask(self, questions: Sequence[Mapping[str, Any]], *, checks: bool = True) -> list[TensorMessage]:
        return [TensorMessage({"squared": 1.0}) for _ in questions]

    def _wait(self) -> None:
        if self.is_lost:
            raise Disrupted("worker 2 was killed by signal 9")


def test_so_it_is_where_a_push_waits_for_the_one_before() -> None:
    model, servers = net(), Taking()
    gradients = SyncServerGradients(
        model.named_parameters(),
        group=SingleWorkerGroup(),
        sync=ParameterServer(bucket_bytes=ONE_LAYER),
        wire=Raw(),
        servers=servers,
        generation=lambda: 0,
    )
    gradients.serve([torch.optim.SGD(model.parameters(), lr=0.1)])
    run_pass(model, gradients)
    gradients.flush([1.0])
    gradients.collect()
    gradients.land(scale=1.0)
    servers.is_lost = True
    run_pass(model, gradients)
    assert all(parameter.grad is not None for parameter in model.parameters()), "backward has come to its end"
    with pytest.raises(Disrupted, match="worker 2 was killed by signal 9"):
        gradients.flush([1.0])
