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
