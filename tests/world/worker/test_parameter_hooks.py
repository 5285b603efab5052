"""Gradient hooks on parameters see the whole gradient of the global batch, under every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from access_models import data, net, plan_of
from forked import World
from paceline.errors import PlanError, SyncError
from paceline.plan import Batch, Layout, ParameterServer, Plan

LIMIT = 0.01
LAYOUTS = {
    "replicas": Layout(replicas=2),
    "zero1": Layout(shard=2, zero=1),
    "stages": Layout(stages=2),
    "mixed": Layout(shard=2, tensor=2),
}


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def by_norm(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1.0)


def clamp_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.clamp_(-LIMIT, LIMIT)


def hook_early(model: nn.Module) -> list[Any]:
    """Before the model is prepared; the last hook is to be removed again."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    return [one.register_hook(clamped) for one in weights[:2]] + [weights[2].register_hook(lambda g: g * 100)]


def hook_late(model: nn.Module) -> None:
    """After the model is prepared; biases of cut layers are among them."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    weights[3].register_hook(by_norm)
    weights[4].register_post_accumulate_grad_hook(clamp_gradient)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.register_post_accumulate_grad_hook(clamp_gradient)


def train(worker: Any) -> list[float]:
    """The losses; the last entry counts refusals."""
    model = net()
    *_, removed = hook_early(model)
    model = worker.prepare(model)
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    hook_late(model)
    removed.remove()
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=0.3)
    losses = []
    for batch in worker.batches(data(), epochs=2):
        losses.append(float(step(batch)))
        if worker.step == 4:
            break
    return losses


def by_hand() -> list[float]:
    """The same by torch alone: whole batches, in the order of our streams."""
    model = net().double()
    *_, removed = hook_early(model)
    hook_late(model)
    removed.remove()
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for x, y in ORDER:
        loss = F.cross_entropy(model(x), y)
        losses.append(float(loss.detach()))
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optim.step()
    return losses


ORDER: list[tuple[Tensor, Tensor]] = []


def order(worker: Any) -> list[tuple[Tensor, Tensor]]:
    """The batches of the stream, whole: what one worker is given in one micro-batch."""
    model = worker.prepare(nn.Linear(5, 3))
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters())), forward=keep)
    for batch in worker.batches(data(), epochs=2):
        step(batch)
    return KEPT[:4]


KEPT: list[tuple[Tensor, Tensor]] = []


def keep(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Tensor:
    KEPT.append(micro)
    return model(micro[0]).sum()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    ORDER[:] = World(tmp_path_factory.mktemp("order"))(order, 1, plan_of(Layout(), micro=8))[0]
    return by_hand()


@pytest.mark.parametrize("name", LAYOUTS)
def test_hooks_see_the_whole_gradient_as_in_plain_torch(world: World, name: str, expected: list[float]) -> None:
    layout = LAYOUTS[name]
    workers = layout.workers_each * (layout.replicas if isinstance(layout.replicas, int) else 1)
    for losses in world(train, workers, plan_of(layout)):
        assert losses == pytest.approx(expected, rel=1e-9)


def refused(worker: Any, put: Callable[[Any, nn.Module], None], kind: type[Exception]) -> tuple[str, bool]:
    """The message with which the first step was refused, and whether the weights are what they were."""
    model = worker.prepare(net())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    put(worker, model)
    step = worker.stepper(model, optim, F.cross_entropy)
    before = [p.detach().clone() for p in model.parameters()]
    text = ""
    for batch in worker.batches(data()):
        try:
            step(batch)
        except kind as error:
            text = str(error)
        break
    return text, all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_cannot_be_right_is_refused_before_weights_change(world: World) -> None:
    def step_inside(_: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            optim = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optim=optim: optim.step())

    def on_first(worker: Any, model: Any) -> None:
        if worker.is_first:
            model[0].weight.register_hook(clamped)

    def in_forward(_: Any, model: Any) -> None:
        def put(module: Any, args: Any) -> None:
            module.weight.register_hook(clamped)

        model[3].register_forward_pre_hook(put)

    def attack(worker: Any) -> list[tuple[str, bool]]:
        cases = ((step_inside, PlanError), (on_first, SyncError), (in_forward, RuntimeError))
        return [refused(worker, put, kind) for put, kind in cases]

    for layout in (Layout(replicas=2), Layout(shard=2)):
        for stepped, some, late in world(attack, 2, plan_of(layout)):
            assert stepped[1] and "changed the parameter model" in stepped[0]
            assert some[1] and "other parameters than each other" in some[0]
            assert late[1] and "within a pass over a batch" in late[0]


def test_parameter_servers_refuse_hooks(world: World) -> None:
    def on_one(_: Any, model: Any) -> None:
        model[0].weight.register_hook(clamped)

    def attack(worker: Any) -> tuple[str, bool]:
        return refused(worker, on_one, PlanError)

    plan = Plan(layout=Layout(replicas=1), batch=Batch(size=8), sync=ParameterServer())
    assert "summed on the servers" in world(attack, 1, plan)[0][0]
