"""A gradient pass whose beginning is aborted: nothing of it is left, and it is done again as the same pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fake_servers import PretendedServers
from paceline.comm.group import Disrupted, SingleWorkerGroup
from paceline.comm.messages.tensor_messages import TensorMessage
from paceline.plan import ParameterServer, Plan, Raw
from paceline.schedule.micro_batches import MicroBatch
from paceline.sync.parameter_server.sync_updates import SyncServerGradients
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.step.gradient_pass import StepExecutor
from paceline.worker.topology.parallel_groups import single_worker_replicas


class Slow(PretendedServers):
    """A member is lost while it is awaited where the server is."""

    def meet(self, *_: Any, **__: Any) -> None:
        self.asked.append("meet")
        if len(self.asked) == 1:
            raise Disrupted("a member was lost")
        super().meet()

    def push(self, number: int, header: Mapping[str, Any], *tensors: Tensor) -> Callable[[], None]:
        self.asked.append("push")
        return lambda: None

    def ask(self, questions: Sequence[Mapping[str, Any]], *, checks: bool = True) -> list[TensorMessage]:
        self.asked.append(questions[0]["op"])
        return [TensorMessage({"squared": 4.0}) for _ in questions]


class Asked:
    """Of a run in which nobody wants anything."""

    wants_change = False

    def change_is_due(self) -> None: ...

    def vote(self) -> bool:
        return True


def test_a_member_that_is_lost_while_servers_are_met_has_the_same_pass_done_again() -> None:
    weight, servers = Parameter(torch.ones(2)), Slow()
    about: dict[str, Any] = {"sync": ParameterServer(), "wire": Raw(), "servers": servers}
    gradients = SyncServerGradients([("weight", weight)], group=SingleWorkerGroup(), generation=lambda: 0, **about)
    gradients.serve([torch.optim.SGD([weight], lr=1.0)])
    alone: dict[str, Any] = {
        "group": SingleWorkerGroup(),
        "axes": single_worker_replicas(SingleWorkerGroup()),
        "device": torch.device("cpu"),
    }
    executor = StepExecutor(Plan(), consensus=Asked(), measures_noise=False, **alone)
    batch = StepBatch(
        stream="train",
        step=1,
        epoch=0,
        start=0,
        stop=2,
        micros=[MicroBatch(0, 0, 2)],
        ends_epoch=None,
        fetch=lambda: torch.ones(2),
        run_pass=lambda batch: executor.run(batch, gradients),
    )
    with pytest.raises(Disrupted):
        list(batch)
    assert not executor.under_way and batch.num_passes == 0
    for micro in batch:
        executor.backward((weight * micro).mean())
    assert servers.asked == ["meet", "meet", "push", "sum"]
    assert executor.outcome is not None and executor.outcome.is_taken and batch.num_passes == 1
