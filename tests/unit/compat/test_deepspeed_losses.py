"""`loss.backward()` beside an engine: the losses of its model are the engine's, all others are torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from paceline.compat.deepspeed.loss_routing import LossRouting
from paceline.compat.foreign_steps import ForeignSteps


class Steps:
    """Micro-batches without a run."""

    def __init__(self) -> None:
        self.is_open = self.is_backward = False
        self.taken: list[Tensor] = []

    def open_micro(self) -> None:
        self.is_open = True

    def backward(self, loss: Tensor) -> None:
        self.taken.append(loss)
        self.is_open = False


class Doubled(torch.autograd.Function):
    """As a checkpoint whose forward is computed again in backward: the graph has no parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class DoublingNet(nn.Module):
    """Returns a dictionary, as many models do."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"found": cast("Tensor", Doubled.apply(x))}


@pytest.fixture
def steps() -> Iterator[Steps]:
    original = Tensor.backward
    yield Steps()
    Tensor.backward = original


def routed(model: nn.Module, steps: Steps) -> LossRouting:
    routing = LossRouting(model, cast("ForeignSteps", steps))
    routing.begin()
    return routing


def test_a_loss_of_another_model_is_torchs(steps: Steps) -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 1)
    routing = routed(net, steps)
    routing.open_micro()
    outputs = net(torch.ones(1, 2))
    other(outputs.detach()).sum().backward()
    assert not steps.taken
    assert steps.is_open
    assert other.weight.grad is not None
    loss = other(outputs).sum()
    loss.backward()
    assert steps.taken == [loss]


def test_a_penalty_on_the_models_weights_is_the_engines(steps: Steps) -> None:
    net = nn.Linear(2, 2)
    routed(net, steps).open_micro()
    net(torch.ones(1, 2))
    loss = net.weight.square().sum()
    loss.backward()
    assert steps.taken == [loss]


def test_a_graph_without_parameters_is_known_by_what_the_model_returned(steps: Steps) -> None:
    net = DoublingNet()
    routed(net, steps).open_micro()
    first = net(torch.ones(1, 2, requires_grad=True))["found"]
    net(torch.ones(1, 2, requires_grad=True))
    loss = first.square().mean()
    loss.backward()
    assert steps.taken == [loss]


def test_at_its_end_backward_is_torchs_again(steps: Steps) -> None:
    original, net = Tensor.backward, nn.Linear(2, 2)
    routing = routed(net, steps)
    routing.open_micro()
    routing.end()
    assert Tensor.backward is original
    net(torch.ones(1, 2)).sum().backward()
    assert not steps.taken
    assert net.weight.grad is not None
