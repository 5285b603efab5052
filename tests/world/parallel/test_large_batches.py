"""Optimizers that look at whole parameters: right where workers have these, or rows of them; else refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_optimizer import LARS, Kron, Lamb, Prodigy

from forked import WorkersFailed, World
from layout_runs import EXACT, RESUME, Net, Text, assert_same, next_word
from paceline.plan import Compute, Layout, ParameterServer, Plan

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lars": lambda parameters: LARS(parameters, lr=0.5, trust_coefficient=0.1, foreach=False),
    "lamb": lambda parameters: Lamb(parameters, lr=0.05),
    "kron": lambda parameters: Kron(parameters, lr=0.01),
    "prodigy": lambda parameters: Prodigy(parameters),
}


def trained(worker: Any, kind: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    optim = worker.prepare(KINDS[kind](model.parameters()))
    step = worker.stepper(model, optim, next_word)
    losses = [float(step(batch)) for batch in worker.batches(Text(), epochs=2)]
    assert losses[-1] < losses[0]
    return {"losses": losses}


@pytest.mark.parametrize(
    "kind, plans",
    [
        ("lars", [Plan(layout=Layout(replicas=2)), Plan(layout=Layout(shard=3)), Plan(layout=Layout(shard=2, zero=1))]),
        (
            "lamb",
            [Plan(layout=Layout(replicas=2)), Plan(layout=Layout(stages=2)), Plan(sync=ParameterServer(servers=2))],
        ),
        ("prodigy", [Plan(layout=Layout(replicas=2)), Plan(sync=ParameterServer())]),
    ],
)
def test_whole_parameters_and_rows_take_the_steps_of_one_process(tmp_path: Path, kind: str, plans: list[Plan]) -> None:
    alone: dict[str, Any] = {}
    for number, plan in enumerate([Plan(), *plans]):
        (tmp_path / str(number)).mkdir()
        world, train = World(tmp_path / str(number)), functools.partial(trained, kind=kind)
        workers = max(plan.layout.workers_each, 2) if number else 1
        found = world(train, workers, dataclasses.replace(plan, batch=RESUME, compute=EXACT), save_at_end=False)
        alone = alone or found[0]
        assert_same(found, alone)


@pytest.mark.parametrize(
    "kind, plan, says",
    [
        ("prodigy", Plan(layout=Layout(tensor=2)), "Prodigy, as it was made here, looks at all.*only a part of"),
        ("prodigy", Plan(layout=Layout(stages=2)), r"Prodigy.*under Layout\(stages=2\) each stage has only its own"),
        ("kron", Plan(layout=Layout(tensor=2)), "Kron draws random numbers in its step.*only a part of"),
        ("kron", Plan(layout=Layout(shard=2)), "Kron was tried on sharded parameters, but.*no worker can step whole"),
        ("prodigy", Plan(sync=ParameterServer(servers=2)), r"with ParameterServer\(servers=2\) each server"),
    ],
)
def test_who_would_see_less_than_it_looks_at_is_refused_before_training(
    world: World, kind: str, plan: Plan, says: str
) -> None:
    with pytest.raises(WorkersFailed, match=says):
        world(functools.partial(trained, kind=kind), 2, dataclasses.replace(plan, batch=RESUME), save_at_end=False)


def test_who_would_be_offloaded_one_parameter_at_a_time_is_refused(world: World, tmp_path: Path) -> None:
    plan = Plan(compute=Compute(offload="optimizer", offload_path=str(tmp_path)), batch=RESUME)
    with pytest.raises(WorkersFailed, match=r"Prodigy.*one parameter's state is here at a time"):
        world(functools.partial(trained, kind="prodigy"), 1, plan, save_at_end=False)
