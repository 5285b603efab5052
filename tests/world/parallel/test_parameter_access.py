"""What user code does to sharded parameters past the model is right as in one process, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from access_models import data, net, plan_of
from forked import World
from paceline.errors import PlanError
from paceline.plan import Layout


def train(worker: Any, each: Callable[[Any, nn.Module], None]) -> list[float]:
    model = worker.prepare(net())
    step = worker.stepper(
        model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)), F.cross_entropy
    )
    losses = []
    for batch in worker.batches(data(), epochs=2, name=None):
        losses.append(float(step(batch)))
        each(worker, model)
    return losses


def scaled(_: Any, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def from_whole(worker: Any, model: nn.Module) -> None:
    """Whole plain tensors, the same on all workers."""
    if worker.step == 3:
        for parameter, whole in zip(model.parameters(), net().double().parameters(), strict=True):
            parameter.data = whole.detach()


class Shadow:
    """The moving average that people copy: it swaps without clones, restores, and exchanges."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def __call__(self, worker: Any, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            before = self.shadow.get(name, parameter.data)
            self.shadow[name] = (0.5 * parameter.data + 0.5 * before).clone()
        if worker.step in (2, 4):
            backup = {}
            for name, parameter in model.named_parameters():
                backup[name] = parameter.data
                parameter.data = self.shadow[name]
            for parameter in model.parameters():
                parameter.data.mul_(1.5 if worker.step == 2 else 1.0)
            if worker.step == 2:
                for name, parameter in model.named_parameters():
                    parameter.data = backup[name]
        if worker.step == 5:
            for name, parameter in model.named_parameters():
                parameter.data, self.shadow[name].data = self.shadow[name].data, parameter.data


def by_sam(worker: Any) -> list[float]:
    """Sharpness-aware steps, with a restore by `p.data = old`."""
    model = worker.prepare(net())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.3))
    for batch in worker.batches(data(), epochs=1):
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
        old = {}
        for parameter in model.parameters():
            old[parameter] = parameter.data.clone()
            parameter.data.add_(parameter.grad * 0.05)
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
        for parameter in model.parameters():
            parameter.data = old[parameter]
        optim.step()
    return [worker.evaluate(model, data(), F.cross_entropy)["loss"]]


def by_average(worker: Any) -> list[float]:
    """An average of the weights that is prepared, too."""
    model = net()
    average = AveragedModel(model)
    model, average = worker.prepare(model), worker.prepare(average)
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.3)), F.cross_entropy)
    for batch in worker.batches(data(), epochs=1):
        step(batch)
        average.update_parameters(model)
    return [worker.evaluate(average, data(), F.cross_entropy)["loss"]]


def right(worker: Any) -> list[float]:
    """All programs that must come out as in one process, one after the other."""
    found = [*by_sam(worker), *by_average(worker)]
    for each in (scaled, from_whole, Shadow()):
        steps = worker.step

        class Counted:
            step = 0

        def since(_: Any, model: nn.Module, each: Any = each, steps: int = steps) -> None:
            Counted.step = worker.step - steps
            each(Counted, model)

        found += train(worker, since)
    return found


@pytest.mark.parametrize("zero", [1, 3])
def test_writes_past_the_wrapper_take_effect(world: World, zero: Any) -> None:
    expected = world.one_process(right, plan_of(Layout()))
    for found in world(right, 2, plan_of(Layout(shard=2, zero=zero))):
        assert found == pytest.approx(expected, rel=1e-9)


def refused(worker: Any) -> list[str]:
    """The messages of all that is refused."""
    texts: list[str] = []

    def attempt(step: Callable[[], Any]) -> None:
        try:
            step()
        except PlanError as error:
            texts.append(str(error))
        else:
            texts.append("nothing")

    model = net()
    stale = list(model.parameters())
    assert stale[0].numel() == 30
    model: Any = worker.prepare(model)
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.3))

    def put(_: Any, __: Any) -> Tensor:
        half = {name: one * 0.5 for name, one in model.named_parameters()}
        return functional_call(model, half, (torch.randn(2, 5, dtype=torch.float64),)).sum()

    def penalty(_: Any, micro: Any) -> Tensor:
        x = micro[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    def set_data(value: Tensor) -> None:
        model[0].weight.data = value

    attempt(lambda: stale[0].data.mul_(2.0))
    attempt(lambda: stale[0].sum())
    attempt(lambda: copy.deepcopy(model))
    attempt(lambda: AveragedModel(model))
    attempt(lambda: set_data(torch.zeros(2)))
    attempt(lambda: set_data(torch.zeros(6, 5)))
    for forward in (put, penalty):
        step = worker.stepper(model, optim, forward=forward)
        for batch in worker.batches(data()):
            attempt(lambda step=step, batch=batch: step(batch))
            break
    return texts


def test_what_cannot_be_right_is_refused(world: World) -> None:
    parts = ["before worker.prepare"] * 2 + ["copy.deepcopy"] * 2 + [".data of 0.weight was set to"] * 2
    parts += ["in the place of 0.weight", "create_graph=True"]
    for texts in world(refused, 2, plan_of(Layout(shard=2))):
        assert len(texts) == len(parts)
        for text, part in zip(texts, parts, strict=True):
            assert part in text
