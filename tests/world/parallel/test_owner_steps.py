"""Optimizers that look at whole parameters, where workers hold parts: owners step them, as one process does."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_optimizer import CAME, LARS, Lamb, Shampoo
from torch import nn

import quick
from forked import WorkersFailed, World
from layout_runs import EXACT, RESUME, ROWS, Net, Text, assert_same, beside, next_word, workers_of
from paceline.plan import Layout, Plan
from paceline.planner.owner_steps import owner_traffic

KINDS: dict[str, Any] = {
    "lars": functools.partial(LARS, lr=0.5, trust_coefficient=0.1),
    "lamb": functools.partial(Lamb, lr=0.02),
    "came": functools.partial(CAME, lr=0.02),
    "shampoo": functools.partial(Shampoo, lr=0.02),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.02),
}


def optimizers(worker: Any, model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    if kind != "muon":
        return [worker.prepare(KINDS[kind](model.parameters()))]
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "words" not in name]
    known = {id(one) for one in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    of_matrices = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
    return [worker.prepare(of_matrices), worker.prepare(torch.optim.AdamW(others, lr=0.01))]


def trained(worker: Any, kind: str = "muon", epochs: int = 2) -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0), buffers={"seen": "mean"})
    optims = optimizers(worker, model, kind)
    falls = worker.prepare(torch.optim.lr_scheduler.LambdaLR(optims[0], lambda step: 0.8**step))
    step = worker.stepper(model, optims, next_word, clip_norm=0.5)
    losses: dict[int, float] = {}
    for batch in worker.batches(Text(ROWS), epochs=epochs):
        loss = float(step(batch))
        falls.step()
        losses[worker.step] = loss
    kept = [sum(map(numel, values.values())) for values in optims[0].state.values()]
    return {"losses": losses, "kept": kept}


def numel(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def found(kind: str, epochs: int = 2) -> dict[str, Any]:
        world, train = World(tmp_path_factory.mktemp("alone")), functools.partial(trained, kind=kind, epochs=epochs)
        return world.one_process(train, Plan(batch=RESUME, compute=EXACT), save_at_end=False)

    return found


CASES = [
    ("muon", Layout(shard=3)),
    ("muon", Layout(tensor=2)),
    ("muon", Layout(shard=2, tensor=2)),
    ("lamb", Layout(replicas=2, shard=2)),
    quick.further("shampoo", Layout(shard=2, zero=1)),
    quick.further("muon", Layout(shard=2, stages=2, zero=2)),
    quick.further("muon", Layout(shard=2, context=2)),
    quick.further("lamb", Layout(stages=2, tensor=2)),
    quick.further("lars", Layout(tensor=2)),
    quick.further("came", Layout(shard=2)),
    quick.further("adafactor", Layout(shard=2, tensor=2)),
]


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=str)
def test_owners_take_the_steps_of_one_process(world: World, alone: Any, kind: str, layout: Layout) -> None:
    """Accumulation, clipping, a scheduler, tied weights, rows that do not divide, parameters that are never used."""
    oracle, train = alone(kind), functools.partial(trained, kind=kind)
    found = world(train, workers_of(layout), Plan(layout=layout, batch=RESUME, compute=EXACT), save_at_end=False)
    assert_same(
        [{"losses": one["losses"]} for one in found],
        {"losses": oracle["losses"]},
        tolerance=1e-6 if kind in ("came", "adafactor") else 1e-9,  # they divide by roots of means in single precision
    )


def test_each_worker_keeps_about_its_share_of_the_state(world: World, alone: Any) -> None:
    whole, plan = alone("muon")["kept"], Plan(layout=Layout(shard=2), batch=RESUME, compute=EXACT)
    found = [one["kept"] for one in world(trained, 2, plan, save_at_end=False)]
    assert sorted(itertools.chain(*found)) == sorted(whole), "each state is on one worker, and whole"
    assert max(map(sum, found)) <= sum(whole) / 2 + max(whole) / 2


def sent_in_steps(world: World, workers: int) -> list[int]:
    """What all workers together have sent in each step, as their events say."""
    found: list[list[int]] = []
    for rank in range(workers):
        lines = map(json.loads, (world.worker_dir(rank) / "events.jsonl").read_text().splitlines())
        found.append([one["num_bytes_sent"] for one in lines if one["event"] == "StepDone"])
    return [sum(each) for each in zip(*found, strict=True)]


def by_number(worker: Any) -> None:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0), buffers={"seen": "mean"})
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word, clip_norm=0.5)
    for batch in worker.batches(Text(ROWS), epochs=1):
        step(batch)


@pytest.mark.parametrize("layout", [Layout(shard=2), quick.further(Layout(shard=3))], ids=str)
def test_the_bytes_that_parts_travel_are_counted_and_as_many_as_the_planner_says(
    world: World, tmp_path: Path, layout: Layout
) -> None:
    plan, size = Plan(layout=layout, batch=RESUME, compute=EXACT), layout.workers_each
    world(functools.partial(trained, epochs=1), size, plan, save_at_end=False)
    other = beside(tmp_path)
    other(by_number, size, plan, save_at_end=False)
    moved = [a - b for a, b in zip(sent_in_steps(world, size), sent_in_steps(other, size), strict=True)]
    stepped = sum(p.numel() for name, p in Net().named_parameters() if p.ndim == 2 and "words" not in name)
    idle = Net().idle.weight.numel()  # is in no step
    expected = owner_traffic(8.0 * (stepped - idle), [size])
    assert moved == pytest.approx([expected] * len(moved), rel=0.05), "rows that do not divide make a small difference"


def test_a_checkpoint_of_owners_goes_on_under_any_layout(world: World, tmp_path: Path, alone: Any) -> None:
    oracle = alone("lamb", epochs=4)["losses"]
    found: dict[int, float] = {}
    for layout, until in [(Layout(shard=2), 3), (Layout(), 5), (Layout(tensor=2), 8), (Layout(shard=3), 12)]:
        plan = Plan(layout=layout, batch=RESUME, compute=EXACT)
        train = functools.partial(trained, kind="lamb", epochs=4)
        results = world(train, workers_of(layout), plan, max_steps=until)
        assert all(one["losses"] == results[0]["losses"] for one in results)
        assert min(results[0]["losses"]) == len(found) + 1
        found |= results[0]["losses"]
    assert found == pytest.approx(oracle, rel=1e-9)


def with_state_at_once(worker: Any) -> None:
    model = worker.prepare(nn.Linear(6, 4))
    optim = Lamb(model.parameters(), lr=0.02)
    optim.state[model.weight] = {"exp_avg": torch.zeros(3, 2)}
    worker.prepare(optim)


def test_state_that_is_made_of_parts_before_is_refused(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"Lamb has exp_avg .*, made of a part of it, and needs the whole"):
        world(with_state_at_once, 2, Plan(layout=Layout(shard=2)), save_at_end=False)
