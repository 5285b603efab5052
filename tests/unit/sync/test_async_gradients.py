"""A replica that takes batches in turns, without servers: what it sends, and what it refuses before it asks anybody."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from fake_servers import Knowing, PretendedServers
from paceline.comm.messages.tensor_messages import ServerLost, ServerTimeout, TensorMessage
from paceline.errors import SyncError
from paceline.plan import ParameterServer, Raw
from paceline.sync.parameter_server.async_updates import AsyncGradients
from paceline.worker import session


class AskedServers(PretendedServers):
    """One server that takes updates."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Tensor] = []

    def ask_first(self, question: Mapping[str, Any], *_: Any, **__: Any) -> TensorMessage:
        self.asked.append(question["op"])
        return TensorMessage({"behind": 0})

    def caller(self, number: int) -> Any:
        return AskedCaller(self)


class AskedCaller:
    """The connection to it."""

    def __init__(self, servers: AskedServers) -> None:
        self._servers = servers

    def begin(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        self._servers.asked.append(header["op"])
        self._servers.sent = [*tensors]

    def answer(self, call: None) -> TensorMessage:
        return TensorMessage({})


def turns(servers: PretendedServers, named: Mapping[str, Parameter], *models: nn.Module) -> AsyncGradients:
    about: dict[str, Any] = {"sync": ParameterServer(staleness=None), "wire": Raw(), "servers": servers}
    return AsyncGradients([*named.items()], models=models, worker_rank=0, **about)


def test_sparse_gradients_of_what_is_no_table_go_as_dense_ones() -> None:
    words, servers = Parameter(torch.ones(4, 2)), AskedServers()
    gradients = turns(servers, {"words": words})
    gradients.begin(0)
    gradients.arm()
    F.embedding(torch.tensor([1, 3, 3]), words, sparse=True).sum().backward()
    gradients.flush([0.0])
    gradients.collect()
    gradients.land(scale=0.5)
    gradients.apply([])
    assert servers.asked == ["permit", "update"]
    assert [one.tolist() for one in servers.sent] == [[0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0]]


def test_an_update_that_cannot_be_asks_for_no_permission_for_which_others_would_wait() -> None:
    model, servers = nn.Linear(1, 1), AskedServers()
    model.register_buffer("last", None)
    gradients = turns(servers, dict(model.named_parameters()), model)
    gradients.begin(0)
    model.last = torch.zeros(1)
    with pytest.raises(ValueError, match="buffer last, which began as None"):
        gradients.apply([])
    assert servers.asked == []


class Waiting:
    """A worker whose function ends with an error, and the key-value store in which the other one has said that it has
    left.
    """

    workers = 2

    def __init__(self, error: SyncError) -> None:
        self._error, self.shared = error, dist.HashStore()
        self.consensus = types.SimpleNamespace(present=(), ranks=(0, 1))
        self.shared.set(session.LEFT.format(1), "3")
        self.blames_server = Knowing(self.shared).is_server_loss

    def train(self, _: Any) -> None:
        raise self._error


def called(error: SyncError) -> None:
    both: Any = Waiting(error)
    session._call_function(both.train, session.JoinedWorker(worker=both, lifecycle=both, place=both))


def test_who_has_left_before_is_not_accused_of_the_loss_of_a_server() -> None:
    for lost in (ServerLost("it has gone"), ServerTimeout("no answer")):
        lost.listener = "parameter server 0"
        with pytest.raises(ServerLost) as raised:
            called(lost)
        assert raised.value is lost
    with pytest.raises(SyncError, match="worker 1 left the training function after step 3"):
        called(SyncError("a peer says nothing"))
