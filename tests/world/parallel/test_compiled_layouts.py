"""`compile=true` by layout: the numbers of one process that compiles nothing, and what is really compiled."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import quick
from expert_models import MoeNet
from forked import World
from layout_runs import HELD_OUT, RESUME, ROWS, Net, Text, assert_same, next_word, workers_of
from paceline.parallel import compiled
from paceline.plan import Compute, Layout, Plan


def trained(worker: Any, kind: str = "dense") -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0) if kind == "dense" else MoeNet(drop=0.0), buffers={"seen": "mean"})
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    step = worker.stepper(model, optim, next_word, clip_norm=0.5)
    losses, norms = [], []
    for batch in worker.batches(Text(ROWS), epochs=2):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    found = worker.evaluate(model, Text(HELD_OUT), next_word)
    return {
        "losses": losses,
        "norms": norms,
        "evaluated": found["loss"],
        "graphs": counters["stats"]["unique_graphs"],
        "calls": counters["stats"]["calls_captured"],
    }


def dropped(worker: Any) -> list[float]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.3), buffers={"seen": "mean"})
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)
    return [float(step(batch)) for batch in worker.batches(Text(ROWS), epochs=1)]


def copied(worker: Any) -> list[float]:
    """How far a copy's outputs are from the model's: as made, and after the copy's experts forgot all."""
    torch.manual_seed(3)
    model = worker.prepare(MoeNet(drop=0.0), buffers={"seen": "mean"}).eval()
    other, words = copy.deepcopy(model), torch.arange(8).view(1, 8)
    with torch.no_grad():
        before, same = model(words), other(words)
        for name, parameter in other.named_parameters():
            if "experts" in name and not parameter.is_meta:
                parameter.zero_()
        found = [(one - before).abs().max().item() for one in (same, other(words), model(words))]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def found(kind: str, precision: Any = "fp32") -> dict[str, Any]:
        world, train = World(tmp_path_factory.mktemp("alone")), functools.partial(trained, kind=kind)
        plan = Plan(batch=RESUME, compute=Compute(precision=precision))
        return world.one_process(train, plan, save_at_end=False)

    return found


CASES: list[tuple[str, Layout, dict[str, Any], str]] = [
    ("dense", Layout(stages=2), {}, "aot_eager"),
    *[
        quick.further(*case)
        for case in (
            ("moe", Layout(experts=2), {}, "aot_eager"),
            ("dense", Layout(replicas=2), {}, "aot_eager"),
            ("dense", Layout(shard=2), {}, "aot_eager"),
            ("dense", Layout(shard=2, zero=1), {"recompute": "selective"}, "aot_eager"),
            ("dense", Layout(shard=2, stages=2), {}, "aot_eager"),
            ("dense", Layout(stages=2, schedule="interleaved", stages_per_worker=2), {}, "aot_eager"),
            ("dense", Layout(stages=2), {"recompute": "blocks"}, "aot_eager"),
            ("dense", Layout(stages=2), {"recompute": "selective"}, "aot_eager"),
            ("moe", Layout(experts=2), {"recompute": "blocks"}, "aot_eager"),
            ("moe", Layout(shard=2, experts=2), {}, "aot_eager"),
            ("dense", Layout(shard=2), {}, "inductor"),
            ("dense", Layout(stages=2), {}, "inductor"),
            ("moe", Layout(experts=2), {}, "inductor"),
        )
    ],
]


@pytest.mark.parametrize(("kind", "layout", "fields", "backend"), CASES, ids=str)
def test_a_layout_compiles_and_has_the_numbers_of_one_process(
    world: World, alone: Any, monkeypatch: pytest.MonkeyPatch, kind: str, layout: Layout, fields: Any, backend: str
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", backend)
    plan = Plan(layout=layout, batch=RESUME, compute=Compute(compile=True, **fields))
    train = functools.partial(trained, kind=kind)
    found = world(train, workers_of(layout), plan, save_at_end=False, limit_s=220)
    oracle = {key: alone(kind)[key] for key in ("losses", "norms", "evaluated")}
    assert_same([{key: one[key] for key in oracle} for one in found], oracle, tolerance=1e-5)
    # Each block has some twenty operations: a graph for each of a few of them would have gained nothing.
    assert all(one["calls"] / one["graphs"] > 5 for one in found), [(one["calls"], one["graphs"]) for one in found]


@pytest.mark.further
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_dropout_draws_the_numbers_of_the_code_as_written(
    world: World, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", backend)
    written = world.one_process(dropped, Plan(batch=RESUME), save_at_end=False)
    plan = Plan(layout=Layout(shard=2), batch=RESUME, compute=Compute(compile=True))
    for one in world(dropped, 2, plan, save_at_end=False, limit_s=220):
        assert one == pytest.approx(written, rel=1e-5)


@pytest.mark.parametrize("compiles", [True, quick.further(False)])
def test_a_copy_calls_its_own_experts(world: World, monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    for found in world(copied, 2, Plan(layout=Layout(experts=2), compute=Compute(compile=compiles)), limit_s=220):
        same, forgetful, again = found
        assert same == again == 0 and forgetful > 0.01
