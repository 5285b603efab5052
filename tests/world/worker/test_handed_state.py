"""What a worker of a cut replica has of the run's state fits another one at the same place, without a message."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from forked import WorkersFailed, World
from layout_runs import EXACT, RESUME, Text, next_word, prepared
from paceline.plan import Compute, Layout, Plan

LATER = 5  # steps, of 8


def first_life(worker: Any) -> Any:
    """Return the losses and what this worker had after some steps."""
    model, optim = prepared(worker)
    step = worker.stepper(model, optim, next_word, clip_norm=0.5)
    losses, state = [], None
    for batch in worker.batches(Text(), epochs=2):
        if worker.step == LATER:  # between two steps
            state = copy.deepcopy(worker._consensus._holder.snapshot())
        losses.append(float(step(batch)))
    return losses, state


def second_life(worker: Any, states: list[Any], places: list[int]) -> list[float]:
    """Go on from what the worker at a place had."""
    worker._consensus._holder.fill(states[places[worker.rank]])
    model, optim = prepared(worker)
    step = worker.stepper(model, optim, next_word, clip_norm=0.5)
    return [float(step(batch)) for batch in worker.batches(Text(), epochs=2)]


@pytest.mark.parametrize(
    ("layout", "offload"),
    [
        (Layout(shard=2), True),
        (Layout(shard=2, zero=1), False),
        (Layout(tensor=2), False),
        (Layout(stages=2), False),
    ],
    ids=["shard-offload", "zero1", "tensor", "stages"],
)
def test_a_new_worker_goes_on_with_what_another_one_had_at_its_place(
    world: World, tmp_path: Path, layout: Layout, offload: bool
) -> None:
    compute = Compute(precision="fp64", offload="optimizer", offload_path=str(tmp_path)) if offload else EXACT
    plan = Plan(layout=layout, batch=RESUME, compute=compute)
    lives = world(first_life, 2, plan, save_at_end=False)
    losses, states = lives[0][0], [state for _, state in lives]
    for found in world(lambda w: second_life(w, states, [0, 1]), 2, plan, save_at_end=False):
        assert found == losses[LATER:]
    if layout.stages > 1:
        with pytest.raises(WorkersFailed, match="nothing of that name: all workers must prepare the same model"):
            world(lambda w: second_life(w, states, [1, 0]), 2, plan, save_at_end=False)
