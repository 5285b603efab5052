"""What optimizers do that is decided after they are prepared, or by chance: hooks, switched options, random numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from forked import WorkersFailed, World
from layout_runs import EXACT, ROWS, Net, Text, next_word
from paceline.plan import AllReduce, Batch, Layout, ParameterServer, Plan


def project(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.mul_((1 / parameter.norm()).clamp(max=1))


def clip_by_hand(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.stack([one.norm() for one in gradients]).norm()
    for one in gradients:
        one.mul_((0.1 / norm).clamp(max=1))


class Sgd(torch.optim.Optimizer):
    """An optimizer of the user's own, which is trusted to work on parts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1)


def hooked(worker: Any, *, is_before: bool, hook: Any, register: str) -> list[float]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    optim: Any = Sgd(model.parameters())
    if is_before:
        getattr(optim, register)(hook)
    optim = worker.prepare(optim)
    if not is_before:
        getattr(optim, register)(hook)
    step = worker.stepper(model, optim, next_word)
    return [float(step(batch)) for batch in worker.batches(Text(ROWS))]


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("hook", [project, clip_by_hand])
@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(stages=2)], ids=["tensor", "stages"])
def test_a_hook_that_sees_parts_is_refused_whenever_it_was_registered(
    world: World, is_before: bool, hook: Any, layout: Layout
) -> None:
    register = "register_step_post_hook" if hook is project else "register_step_pre_hook"
    plan = Plan(batch=Batch(size=16, micro=4), compute=EXACT, layout=layout)
    with pytest.raises(WorkersFailed, match=r"needs the whole of|was changed between the pass over the batch and"):
        world(lambda one: hooked(one, is_before=is_before, hook=hook, register=register), 2, plan, save_at_end=False)


def test_hooks_that_see_whole_parameters_are_as_in_one_process(world: World) -> None:
    plan, found = Plan(batch=Batch(size=16, micro=4), compute=EXACT), []
    for workers in (1, 2):
        (losses, *_) = world(
            lambda one: hooked(one, is_before=False, hook=clip_by_hand, register="register_step_pre_hook"),
            workers, plan, save_at_end=False,
        )  # fmt: skip
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-9)


class Switched(torch.optim.Optimizer):
    """Looks at norms, or draws noise, where a group says so."""

    def __init__(self, parameters: Any, **options: bool) -> None:
        super().__init__(parameters, {"trust": False, "noise": False} | options)

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in (one for one in group["params"] if one.grad is not None):
                    ratio = parameter.norm() / parameter.grad.norm() if group["trust"] else 1.0
                    noise = torch.randn_like(parameter) if group["noise"] else 0.0
                    parameter.sub_(0.1 * ratio * parameter.grad + 0.01 * noise)


def switching(worker: Any, *, how: str) -> list[float]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    first, *others = model.parameters()
    optim = worker.prepare(Switched([first] if how == "added" else [first, *others], noise=how == "noise"))
    step, losses = worker.stepper(model, optim, next_word), []
    for number, batch in enumerate(worker.batches(Text(ROWS))):
        if number == 1 and how == "switched":
            optim.param_groups[0]["trust"] = True
        if number == 1 and how == "added":
            optim.add_param_group({"params": others, "trust": True})
        losses.append(float(step(batch)))
    return losses


@pytest.mark.parametrize("how", ["switched", "added"])
def test_an_optimizer_whose_options_are_switched_is_tried_again(world: World, how: str) -> None:
    """From then on owners step what it looks at as a whole."""
    plan = Plan(batch=Batch(size=16, micro=4), compute=EXACT)
    alone, *_ = world(lambda one: switching(one, how=how), 1, plan)
    for layout in (Layout(shard=2), Layout(tensor=2)):
        split = dataclasses.replace(plan, layout=layout)
        for losses in world(lambda one: switching(one, how=how), 2, split, fresh=True):
            assert losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "sync"),
    [(Layout(stages=2), AllReduce()), (Layout(replicas=2), ParameterServer(servers=2))],
    ids=["stages", "servers"],
)
def test_an_optimizer_that_draws_is_refused_where_its_parameters_are_apart(
    world: World, layout: Layout, sync: Any
) -> None:
    plan = Plan(batch=Batch(size=16, micro=4), compute=EXACT, layout=layout, sync=sync)
    with pytest.raises(WorkersFailed, match="Switched draws random numbers in its step"):
        world(lambda one: switching(one, how="noise"), 2, plan, save_at_end=False)


class Warming:
    """An object around an optimizer, as many scripts have one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.number = optimizer, 0

    def step(self) -> None:
        self.number += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, self.number / 4)
        self.optimizer.step()


def wrapped(worker: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    optim: Any = Warming(worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0)))
    says = []
    for models, second in ((model, optim), (model, [optim]), (optim, model), (model, None), ([], optim.optimizer)):
        try:
            worker.stepper(models, second, next_word)
        except TypeError as error:
            says.append(str(error))
    for batch in worker.batches(Text(ROWS)):
        for x, y in batch:
            worker.backward(next_word(model(x), y))
        optim.step()
        optim.optimizer.zero_grad()
    return {"says": says, "weights": [one.tolist() for one in model.parameters()]}


def test_an_object_around_an_optimizer_works_in_a_plain_loop_and_a_stepper_says_so(world: World) -> None:
    plan = Plan(batch=Batch(size=16, micro=4), compute=EXACT)
    found = [world(wrapped, workers, plan, fresh=True)[0] for workers in (1, 2)]
    assert found[0]["says"] == found[1]["says"] and len(found[0]["says"]) == 5, found[0]["says"]
    names = [text.partition(": ")[0].rpartition(" ")[2] for text in found[0]["says"]]
    assert names == ["Warming", "Warming", "Warming", "NoneType", "list"]
    assert "works in a plain loop" in found[0]["says"][0]
    for one, two in zip(found[0]["weights"], found[1]["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-6, atol=1e-9)
