"""A model that is changed past what a layout has prepared is refused by name, and never trained on old numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

from access_models import Block, data, net, plan_of
from forked import World
from paceline.errors import PlanError
from paceline.parallel import partial_parameter
from paceline.parallel.fully_sharded import sharded_numbers
from paceline.plan import Layout, Plan


class KeepsView(Block):
    """Keeps some rows of a weight, beside the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = {"first": self.up.weight.data[:2]}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rows["first"].sum()


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def keeps_view(worker: Any) -> None:
    worker.prepare(nn.Sequential(nn.Linear(5, 6), KeepsView(), KeepsView(), nn.Linear(6, 3)))


def shares_layers(worker: Any) -> None:
    first = net()
    worker.prepare(first)
    worker.prepare(nn.Sequential(nn.Linear(5, 6), first[1], Block(), nn.Linear(6, 3)))


def is_lazy(worker: Any) -> None:
    worker.prepare(nn.Sequential(nn.LazyLinear(6), Block(), Block(), nn.Linear(6, 3)))


def run(worker: Any, change: Callable[[Any], object], *, model: Any = None) -> None:
    """Train; `change` is made after the first step."""
    model = worker.prepare(net() if model is None else model)
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), F.cross_entropy)
    for number, batch in enumerate(worker.batches(data())):
        step(batch)
        if number == 0:
            change(model)


def ties(model: Any) -> None:
    model[2].up.weight = model[1].up.weight


def drops_bias(model: Any) -> None:
    model[1].down.bias = None


def parametrizes(model: Any) -> None:
    parametrize.register_parametrization(model[1].up, "weight", Doubled())


def hooks_all(model: Any) -> None:
    register_multi_grad_hook(list(model.parameters()), lambda _: None, mode="any")


def hooks_backward(model: Any) -> None:
    model[1].register_full_backward_hook(lambda *_: None)


def compiled(worker: Any) -> None:
    model = worker.prepare(net())
    forward = torch.compile(model, backend="eager")
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in worker.batches(data()):
        for x, y in batch:
            worker.backward(F.cross_entropy(forward(x), y))
        optim.step()


def beside(worker: Any) -> None:
    """A second backward, whose gradient has no weight in the global batch."""
    model = worker.prepare(net())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in worker.batches(data()):
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
            model(x).square().mean().backward()
        optim.step()


def steps_in_backward(worker: Any) -> None:
    model = net()
    own = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}

    def step(parameter: Any) -> None:
        own[parameter].step()

    for one in own:
        one.register_post_accumulate_grad_hook(step)
    run(worker, lambda _: None, model=model)


def lbfgs(worker: Any) -> None:
    worker.prepare(torch.optim.LBFGS(worker.prepare(net()).parameters()))


AT_PREPARE: dict[str, Callable[[Any], object]] = {
    "keeps a tensor .rows. in the memory of 1.up.weight": keeps_view,
    "has no shape yet": is_lazy,
    "LBFGS computes with all its parameters|LBFGS, as it was made here": lbfgs,
}
IN_STEPS: dict[str, Callable[[Any], object]] = {
    "in the place of 2.up.weight": ties,
    "was removed from its module|in the place of|of no prepared model": drops_bias,
    "in the place of ": parametrizes,
}


def refusals(worker: Any) -> dict[str, str]:
    """What is said of each change. A model in stages is refused by one worker, where the others still wait for it."""
    layout, found = worker.plan.layout, dict[str, str]()
    calls = dict(AT_PREPARE)
    if layout.tensor > 1:
        calls["does not see through layers"] = compiled
    if layout.stages == 1:
        calls["split already"] = shares_layers
        calls["in a dictionary of its own|the parameter 0.weight itself"] = steps_in_backward
        calls["beside worker.backward|a second gradient arrived"] = beside
        for says, change in IN_STEPS.items():
            calls[says] = lambda worker, change=change: run(worker, change)
    if layout.stages > 1:
        calls["register_full_backward_hook"] = lambda worker: run(worker, hooks_backward)
    calls["Use parameter.register_hook"] = lambda worker: run(worker, hooks_all)
    for says, call in calls.items():
        found[says] = ""
        try:
            call(worker)
        except (PlanError, RuntimeError) as error:
            said = sharded_numbers.explained(error) or partial_parameter.explained(error)  # as the run does
            found[says] = str(said or error)
    return found


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(shard=2), Layout(stages=2)], ids=str)
def test_models_changed_past_their_layout_are_refused_by_name(world: World, layout: Layout) -> None:
    for found in world(refusals, 2, plan_of(layout), save_at_end=False):
        assert len(found) > len(AT_PREPARE)
        for says, said in found.items():
            assert re.search(says, said), (says, said)


def test_a_sum_over_an_axis_is_not_written_by_its_parts(world: World) -> None:
    """To add 1 to each part of a sum over two workers adds 2 to it: torch refuses that, and so it stays."""

    def work(worker: Any) -> tuple[str, list[float]]:
        sharded_numbers.install()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        mesh = init_device_mesh("cpu", (2, 2))
        part = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Partial()])
        with pytest.raises(RuntimeError, match="placement") as refused:
            part.add_(1.0)
        return str(refused.value), part.to_local().tolist()

    said, numbers = world.one_process(work, Plan())
    assert "Partial" in said and numbers == [1.0, 1.0]
