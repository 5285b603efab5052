"""Penalties on weights are those of one process under every layout; reads of split weights are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import quick
from expert_models import AttendingMoeNet
from forked import World
from layout_runs import ROWS, Text, assert_same, next_word, plan_of, workers_of
from paceline.errors import PlanError
from paceline.plan import Layout

LAYOUTS = [
    Layout(replicas=2),
    Layout(tensor=2),
    Layout(shard=2),
    quick.further(Layout(shard=2, zero=1)),
    Layout(stages=2),
    Layout(experts=2),
    Layout(tensor=2, sequence=True, experts=2),
    quick.further(Layout(tensor=2, shard=2)),
    quick.further(Layout(tensor=2, stages=2)),
    quick.further(Layout(shard=2, experts=2)),
]
SPLIT = {"tensor", "stages", "experts"}


def weight_penalty(name: str, parameter: Tensor) -> Tensor | None:
    """One that needs whole matrices, one that needs a whole norm, and parameters without any."""
    if name.endswith("bias"):
        return None
    if parameter.ndim == 2:
        product = parameter @ parameter.T
        return 1e-3 * (product - torch.eye(len(product), dtype=product.dtype)).pow(2).sum()
    return 1e-2 * parameter.norm()


def step_loss(model: Any, micro: tuple[Tensor, Tensor]) -> Tensor:
    return next_word(model(micro[0]), micro[1]) + 0.1 * model.auxiliary


def reads(parameter: Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
    """Ways in which code reads weights: each would compute on a part."""
    return {
        "an L2 penalty": lambda: parameter.pow(2).sum(),
        "a norm": lambda: torch.linalg.vector_norm(parameter),
        "a norm of its data": lambda: parameter.data.norm(),
        "of a detached copy": lambda: (parameter.detach().clone() * 2.0).abs().max(),
        "a product": lambda: parameter.flatten(1) @ parameter.flatten(1).T,
        "one number": lambda: float(parameter.detach().flatten()[0]),
        "a part added to a whole": lambda: torch.ones(shape, dtype=parameter.dtype).add_(parameter.data),
        "whether it is equal to another": lambda: torch.equal(parameter.data, parameter.data),
        "noise of its shape": lambda: torch.randn_like(parameter),
    }


def run(worker: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = AttendingMoeNet()
    before = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    model = worker.prepare(model)
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    step = worker.stepper(model, optim, forward=step_loss, penalty=weight_penalty, clip_norm=0.5)
    losses, norms = [], []
    for batch in worker.batches(Text(ROWS)):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    layout, refused, silent = worker.plan.layout, [], []
    parameters = dict(model.named_parameters())
    for name, shape in before:
        parameter = parameters[name]
        if tuple(parameter.shape) != shape:
            silent.append(f"the shape of {name}")  # it is that of the whole
        if hasattr(parameter, "held"):
            for what, read in reads(parameter, shape).items():
                try:
                    with torch.set_grad_enabled("data" not in what):
                        read()
                    silent.append(f"{what} of {name}")
                except PlanError as error:
                    refused.append(str(error))
            if not parameter.is_meta:
                with torch.no_grad():
                    parameter.mul_(0.5).add_(parameter.clone(), alpha=1.0)  # at the same places: right on parts
    is_named = all(any(f"{axis}=" in one for axis in SPLIT) and "penalty=" in one for one in refused)
    is_split = max(layout.tensor, layout.stages, layout.experts) > 1
    return {
        "losses": losses,
        "norms": norms,
        "silent": silent,
        "is_named": is_named,
        "tried": bool(refused) == is_split,
    }


def by_hand(worker: Any) -> dict[str, Any]:
    """What a plain loss says: the penalty is in it."""
    torch.manual_seed(3)
    model = worker.prepare(AttendingMoeNet())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))

    def loss(model: Any, micro: Any) -> Any:
        found = [weight_penalty(name, parameter) for name, parameter in model.named_parameters()]
        return step_loss(model, micro) + sum(one for one in found if one is not None)

    step = worker.stepper(model, optim, forward=loss, clip_norm=0.5)
    losses, norms = [], []
    for batch in worker.batches(Text(ROWS)):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    return {"losses": losses, "norms": norms, "silent": [], "is_named": True, "tried": True}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return World(tmp_path_factory.mktemp("oracle")).one_process(by_hand, plan_of(Layout()))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_penalty_is_that_of_one_process_and_reads_of_parts_are_refused(
    world: World, layout: Layout, oracle: dict[str, Any]
) -> None:
    assert_same(world(run, workers_of(layout), plan_of(layout)), oracle)
