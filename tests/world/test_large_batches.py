"""Optimizers that look at whole parameters: right where workers have these, or rows of them; refused where parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forked import WorkersFailed, World
from layerwise import Lars
from layout_runs import EXACT, RESUME, Net, Text, assert_same, next_word
from paceline.plan import Layout, Plan


def trained(worker: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    optim = worker.prepare(Lars(model.parameters(), lr=0.5))
    step = worker.stepper(model, optim, next_word)
    losses = [float(step(batch)) for batch in worker.batches(Text(), epochs=2)]
    assert losses[-1] < losses[0]
    return {"losses": losses}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plan = Plan(batch=RESUME, compute=EXACT)
    return World(tmp_path_factory.mktemp("alone"))(trained, 1, plan, save_at_end=False)[0]


@pytest.mark.parametrize(
    "layout", [Layout(replicas=2), Layout(shard=3), Layout(shard=2, zero=1), Layout(stages=2)], ids=str
)
def test_whole_parameters_and_rows_take_the_steps_of_one_process(
    world: World, alone: dict[str, Any], layout: Layout
) -> None:
    workers = max(layout.workers_each, 2)
    assert_same(world(trained, workers, Plan(layout=layout, batch=RESUME, compute=EXACT), save_at_end=False), alone)


def test_parts_of_cut_layers_are_refused_before_training(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"Lars looks at parameters as a whole.*Use shard or stages"):
        world(trained, 2, Plan(layout=Layout(tensor=2), batch=RESUME, compute=EXACT), save_at_end=False)
