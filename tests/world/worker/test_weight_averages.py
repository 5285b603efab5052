"""Averages of weights are those of a plain loop of torch under every layout, and go from one layout to another."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from expert_models import AttendingMoeNet
from forked import World
from layout_runs import EXACT, Text, next_word, workers_of
from paceline.errors import PlanError
from paceline.plan import Batch, Layout, LocalSGD, ParameterServer, Plan

DECAY = 0.8
# Each goes on from the last one's checkpoint.
LAYOUTS = [
    Layout(replicas=2),
    Layout(tensor=2),
    Layout(shard=2),
    Layout(stages=2),
    Layout(experts=2),
]


def plan(layout: Layout) -> Plan:
    return Plan(layout=layout, batch=Batch(size=8, micro=4), compute=EXACT)


def step_loss(model: Any, micro: tuple[Tensor, Tensor]) -> Tensor:
    return next_word(model(micro[0]), micro[1]) + 0.1 * model.auxiliary


def begin(worker: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(3)
    model = worker.prepare(AttendingMoeNet())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    return model, worker.stepper(model, optim, forward=step_loss), worker.batches(Text(), epochs=2)


def by_hand(worker: Any) -> dict[int, dict[str, Tensor]]:
    """The averages after each step, as a plain loop has them."""
    model, step, batches = begin(worker)
    averages = {name: one.detach().clone() for name, one in model.named_parameters()}
    found: dict[int, dict[str, Tensor]] = {}
    for num, batch in enumerate(itertools.islice(batches, len(LAYOUTS))):
        step(batch)
        decay = min(DECAY, (1 + num) / (10 + num))
        for name, one in model.named_parameters():
            averages[name].mul_(decay).add_(one.detach(), alpha=1 - decay)
        found[worker.step] = {name: one.clone() for name, one in averages.items()}
    return found


def run(worker: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(AttendingMoeNet())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    average = worker.prepare(paceline.ExponentialMovingAverage(model, decay=DECAY, warmup=True))
    step = worker.stepper(model, optim, forward=step_loss)
    for batch in worker.batches(Text(), epochs=2):
        step(batch)
        average.update()
        break
    own = worker.state_dict(model)
    averaged, loss = {}, float("nan")
    with pytest.raises(KeyError), average.swapped_in():
        averaged = worker.state_dict(model)
        loss = worker.evaluate(model, Text(4), {"loss": next_word})["loss"]
        for call in (worker.save, average.update, average.swapped_in().__enter__):
            with pytest.raises(RuntimeError, match="while the averages of"):
                call()
        raise KeyError
    after = worker.state_dict(model)
    assert own.keys() == after.keys() and all(torch.equal(own[name], after[name]) for name in own)
    worker.save()
    return {"averaged": averaged, "loss": loss, "step": worker.step, "updates": average.num_updates}


def test_averages_are_those_of_a_plain_loop_and_go_on_under_any_layout(world: World) -> None:
    expected = world.one_process(by_hand, plan(Layout()))
    tied = "head.weight"  # the embedding's second name
    for number, layout in enumerate(LAYOUTS, 1):
        found = world(run, workers_of(layout), plan(layout), save_at_end=False)
        assert {one["step"] for one in found} == {one["updates"] for one in found} == {number}
        assert len({one["loss"] for one in found}) == 1
        averages = expected[number]
        assert found[0]["averaged"].keys() - {tied} == averages.keys()
        for name, value in averages.items():  # gradients of a key's bias are rounding errors, which Adam lifts to 1e-11
            torch.testing.assert_close(found[0]["averaged"][name], value, rtol=1e-9, atol=1e-9, msg=f"{layout} {name}")


def test_averages_are_refused_where_replicas_have_other_weights(world: World) -> None:
    def refused(worker: Any) -> None:
        model = worker.prepare(torch.nn.Linear(2, 1))
        with pytest.raises(PlanError, match=r"ExponentialMovingAverage under .*sync=AllReduce\(\)"):
            worker.prepare(paceline.ExponentialMovingAverage(model))

    world(refused, 1, Plan(sync=LocalSGD(every=2)), save_at_end=False)
    world(refused, 1, Plan(sync=ParameterServer()), save_at_end=False)


def test_averages_of_a_model_that_is_not_prepared_and_decays_out_of_range_are_refused(world: World) -> None:
    def refused(worker: Any) -> None:
        with pytest.raises(ValueError, match="parameters of no prepared model"):
            worker.prepare(paceline.ExponentialMovingAverage(torch.nn.Linear(2, 1)))
        with pytest.raises(ValueError, match=r"decay=1\.5.*between 0 and 1"):
            paceline.ExponentialMovingAverage(torch.nn.Linear(2, 1), decay=1.5)

    world(refused, 1, save_at_end=False)
