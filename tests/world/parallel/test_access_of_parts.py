"""What user code does to parts of parameters and gradients is right as in one process, or refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

from access_models import data, net, plan_of
from forked import World
from layout_runs import beside
from paceline.errors import PlanError
from paceline.plan import Layout

LAYOUTS = [Layout(tensor=2), Layout(shard=2), Layout(stages=2), Layout(shard=2, tensor=2)]


def change(model: nn.Module, step: int) -> None:
    """What is right on parts: whole tensors written to parameters, and numbers at the same places."""
    generator = torch.Generator().manual_seed(step)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    wholes = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.lerp_(before[name] * 0.5, 0.5).clamp_(-0.4, 0.4)
            parameter.add_(wholes[name], alpha=1e-2)
            parameter[parameter.abs() < 0.02] = 0.0  # as pruning by magnitude does
            parameter[wholes[name] > 1.5] = 0.01
            if step == 2 and name.startswith("1"):
                parameter.copy_(wholes[name] * 0.3)
            if step == 3 and name.startswith("2"):
                parameter.data = wholes[name] * 0.3


def by_size(model: nn.Module) -> list[dict[str, Any]]:
    """Groups with rates by fan-in and size, as they are scaled by hand: of whole parameters."""
    return [
        {"params": [one], "lr": 0.3 / one.size(-1) + one.numel() / 1000 + len(one) / max(one.shape) / 100}
        for one in model.parameters()
    ]


def train(worker: Any) -> list[float]:
    model = worker.prepare(net())
    optim = worker.prepare(torch.optim.SGD(by_size(model), lr=0.3, momentum=0.9))
    step, losses = worker.stepper(model, optim, F.cross_entropy), []
    for batch in worker.batches(data(), epochs=2):
        losses.append(float(step(batch)))
        change(model, worker.step)
    return losses


def slope_penalty(model: Any, micro: Any) -> Tensor:
    """As WGAN-GP has it: a gradient of the gradient by inputs."""
    x = micro[0].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return F.cross_entropy(out, micro[1]) + (slope.norm(dim=1) - 1).square().mean()


def gradient_penalty(model: Any, micro: Any) -> Tensor:
    loss = F.cross_entropy(model(micro[0]), micro[1])
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + torch.stack([one.square().sum() for one in found]).sum()


def weighed_by_slopes(worker: Any, *, fetched: str) -> list[float]:
    """A loss weighed by its gradient, as methods for several tasks have it; parameters are `fetched` when?"""
    model: Any = worker.prepare(net())
    held = list(model.parameters())

    def loss_of(model: Any, micro: Any) -> Tensor:
        loss = F.cross_entropy(model(micro[0]), micro[1])
        asked = held if fetched == "early" else list(model.parameters())
        if fetched == "backward":
            loss.backward(inputs=held, retain_graph=True)
        found = torch.autograd.grad(loss, asked, retain_graph=True, allow_unused=True)
        return loss * (1 + sum(one.square().sum() for one in found if one is not None))

    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), forward=loss_of)
    return [float(step(batch)) for batch in worker.batches(data())]


def by_functions(model: Any, micro: Any) -> Tensor:
    half = {name: one * 0.5 for name, one in model.named_parameters()}
    return functional_call(model, half, (micro[0],)).sum()


def transformed(model: Any, micro: Any) -> Tensor:
    return grad(lambda x: model(x).sum())(micro[0]).sum() + model(micro[0]).sum()


def l2(model: Any, micro: Any) -> Tensor:
    return F.cross_entropy(model(micro[0]), micro[1]) + sum(one.square().sum() for one in model.parameters())


def losses_of(worker: Any, forward: Callable[[Any, Any], Tensor]) -> list[float]:
    model = worker.prepare(net())
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), forward=forward)
    return [float(step(batch)) for batch in worker.batches(data())]


def second_order(worker: Any) -> list[float]:
    return losses_of(worker, slope_penalty)


def refused(worker: Any) -> dict[str, str]:
    """The messages of all that is refused."""
    texts: dict[str, str] = {}
    model: Any = worker.prepare(net())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.3))

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            texts[name] = ""
        except PlanError as error:
            texts[name] = str(error)

    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(data()):
        step(batch)
        break
    weight = model[1].up.weight if model[1].up.weight.grad is not None else model[2].up.weight
    if worker.plan.layout.stages == 1:
        attempt("a gradient's norm", lambda: float(weight.grad.norm()))
    attempt("a norm", lambda: [float(one.detach().norm()) for one in model.parameters()])
    if worker.plan.layout.shard > 1 and worker.plan.layout.tensor > 1:
        attempt("what is gathered", lambda: [one.full_tensor() for one in model.parameters()])
    attempt("an array", lambda: [one.detach().numpy() for one in model.parameters()])
    attempt("a list", lambda: [one.tolist() for one in model.parameters()])
    attempt("a random fill", lambda: [nn.init.normal_(one) for one in model.parameters()])
    attempt("noise", lambda: [torch.randn_like(one) for one in model.parameters()])
    attempt("a mask", lambda: [F.dropout(one.detach()) for one in model.parameters()])
    if worker.plan.layout.tensor == 1:
        attempt("a copy", lambda: copy.deepcopy(model))
    for forward in (gradient_penalty, by_functions, transformed, l2):
        if forward is by_functions and worker.plan.layout.tensor > 1:
            continue  # right there
        if forward in (l2, transformed) and worker.plan.layout.shard > 1:
            continue  # torch's words, which the run replaces; right
        attempt(forward.__name__, lambda forward=forward: losses_of(worker, forward))
    if worker.plan.layout.shard > 1:
        for fetched in ("early", "backward"):
            attempt(fetched, lambda fetched=fetched: weighed_by_slopes(worker, fetched=fetched))
    return texts


NAMES = {
    "a gradient's norm": "clip_gradients",
    "a norm": "penalty=",
    "what is gathered": "full_tensor() needs the whole",
    "an array": "numpy() ",
    "a list": "tolist() ",
    "a random fill": "",
    "noise": "",
    "a mask": "",
    "early": "gathered copy",
    "backward": "gathered copy",
    "a copy": "ExponentialMoving",
}
NAMES |= {"gradient_penalty": "", "by_functions": "in the place of", "transformed": "torch.func", "l2": "penalty="}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_are_as_in_one_process_or_refused(world: World, layout: Layout, tmp_path: Path) -> None:
    expected = world.one_process(train, plan_of(Layout()))
    for found in world(train, layout.workers_each, plan_of(layout)):
        assert found == pytest.approx(expected, rel=1e-9)
    axes = [axis.removesuffix("s") for axis in ("shard", "tensor", "stages") if getattr(layout, axis) > 1]
    for texts in beside(tmp_path)(refused, layout.workers_each, plan_of(layout), save_at_end=False):
        for name, said in texts.items():
            assert any(axis in said for axis in axes) and NAMES[name] in said, (name, said)


def test_gradients_of_gradients_are_right_under_tensor_parallel(world: World) -> None:
    expected = world.one_process(second_order, plan_of(Layout()))
    for found in world(second_order, 2, plan_of(Layout(tensor=2))):
        assert found == pytest.approx(expected, rel=1e-9)


def test_gradients_that_forward_asks_for_are_those_of_one_process(world: World) -> None:
    slopes = functools.partial(weighed_by_slopes, fetched="in forward")
    expected = world.one_process(slopes, plan_of(Layout()))
    for found in world(slopes, 2, plan_of(Layout(shard=2, zero=3))):
        assert found == pytest.approx(expected, rel=1e-9)
