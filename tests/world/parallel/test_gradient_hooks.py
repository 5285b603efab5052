"""Backward hooks between split layers: as in one process where numbers meet at the same place, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forked import WorkersFailed, World
from layout_runs import EXACT, ROWS, Net, Text, beside, next_word
from paceline.plan import Batch, Layout, Plan

BATCH = Batch(size=16, micro=4)
TENSOR, CONTEXT = (
    Plan(batch=BATCH, compute=EXACT, layout=Layout(tensor=2)),
    Plan(batch=BATCH, compute=EXACT, layout=Layout(context=2)),
)

Hook = Callable[[Tensor], Tensor]


def halved(gradient: Tensor) -> Tensor:
    return (gradient * 0.5).clamp(-1e-4, 1e-4)  # many are larger, and it matters how large they are


def normed(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1)


def of_module(layer: Any, hook: Hook) -> None:
    layer.register_full_backward_pre_hook(lambda _, outputs: (hook(outputs[0]),))


def of_inputs(layer: Any, hook: Hook) -> None:
    layer.register_full_backward_hook(lambda _, inputs, outputs: (hook(inputs[0]),))


def of_tensor(layer: Any, hook: Hook) -> None:
    def add(_: Any, given: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(hook)

    layer.register_forward_hook(add)


def trained(worker: Any, put: Any, hook: Hook, *, is_before: bool) -> list[float]:
    torch.manual_seed(3)
    model = Net(0.0)
    layer = {of_inputs: "down"}.get(put, "up")
    found = [one for name, one in model.named_modules() if name.rpartition(".")[2] == layer]
    assert found, [name for name, _ in model.named_modules()]
    if is_before:
        put(found[0], hook)
    model = worker.prepare(model)
    if not is_before:
        put(found[0], hook)
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, next_word)
    return [float(step(batch)) for batch in worker.batches(Text(ROWS))]


def losses_of(world: Any, put: Any, hook: Hook, workers: int, plan: Plan, *, is_before: bool) -> list[float]:
    return world(lambda one: trained(one, put, hook, is_before=is_before), workers, plan, save_at_end=False)[0]


@pytest.mark.parametrize("split", [TENSOR, CONTEXT], ids=["tensor", "context"])
@pytest.mark.parametrize("put", [of_module, of_inputs, of_tensor])
def test_a_hook_gets_its_part_and_what_needs_the_whole_is_refused(
    world: World, tmp_path: Path, put: Any, split: Plan
) -> None:
    one, plan = beside(tmp_path), Plan(batch=BATCH, compute=EXACT)
    alone = losses_of(one, put, halved, 1, plan, is_before=False)
    assert losses_of(world, put, halved, 2, split, is_before=False) == pytest.approx(alone, rel=1e-6)
    with pytest.raises(WorkersFailed, match=r"norm\(\) needs the whole of the gradient of what"):
        losses_of(world, put, normed, 2, split, is_before=False)


@pytest.mark.parametrize("put", [of_module, of_inputs, of_tensor])
def test_a_layer_whose_hook_needs_the_whole_stays_whole_if_it_was_there_before(
    world: World, tmp_path: Path, put: Any
) -> None:
    one, plan = beside(tmp_path), Plan(batch=BATCH, compute=EXACT)
    for hook in (halved, normed):
        alone = losses_of(one, put, hook, 1, plan, is_before=True)
        assert losses_of(world, put, hook, 2, TENSOR, is_before=True) == pytest.approx(alone, rel=1e-6)
