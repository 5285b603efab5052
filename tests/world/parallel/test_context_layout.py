"""Replicas whose workers share sequences train like one process, alone and as several replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import quick
from forked import World
from layout_runs import (
    EXACT,
    RESUME,
    ROWS,
    Text,
    assert_same,
    beside,
    by_plain_loop,
    next_word,
    plan_of,
    prepared,
    train,
    without_dropout,
    workers_of,
)
from paceline.errors import PlanError
from paceline.plan import Batch, Layout, Plan
from tensor_models import hugging_face

LAYOUTS = [
    pytest.param(Layout(context=2), id="context2"),
    pytest.param(Layout(context=3), id="context3"),  # eight tokens, four heads: neither divides
    pytest.param(Layout(context=4), id="context4"),
    pytest.param(Layout(replicas=2, context=2), id="2xcontext2"),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return World(tmp_path_factory.mktemp("oracle")).one_process(without_dropout, plan_of(Layout()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_like_one_process(world: World, oracle: dict[str, Any], layout: Layout) -> None:
    assert_same(world(without_dropout, workers_of(layout), plan_of(layout)), oracle)


def plainly(worker: Any) -> dict[str, Any]:
    return by_plain_loop(worker, drop=0.0)


def test_the_plain_loop_does_too(world: World, oracle: dict[str, Any]) -> None:
    assert_same(world(plainly, 2, plan_of(Layout(context=2))), oracle)


def asked_for(worker: Any) -> str:
    model, _ = prepared(worker, drop=0.0)
    words, next_words = torch.utils.data.default_collate([Text(2)[0], Text(2)[1]])
    try:
        torch.autograd.grad(next_word(model(words), next_words), [model.norm.weight])
    except PlanError as error:
        return str(error)
    return ""


def test_a_gradient_over_a_slice_of_the_tokens_is_refused(world: World) -> None:
    for said in world(asked_for, 2, plan_of(Layout(context=2))):
        assert "norm.weight: under Layout(context=2)" in said


@pytest.mark.parametrize("recompute", ["blocks", "selective"])
def test_recomputed_blocks_give_the_same(world: World, oracle: dict[str, Any], recompute: str) -> None:
    assert_same(world(without_dropout, 2, plan_of(Layout(context=2), recompute=recompute)), oracle)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_bf16_is_near_and_fp32_is_nearer(
    world: World, oracle: dict[str, Any], precision: str, tolerance: float
) -> None:
    for result in world(without_dropout, 2, plan_of(Layout(context=2), precision=precision)):
        assert result["losses"] == pytest.approx(oracle["losses"], rel=tolerance)


def without(worker: Any) -> dict[int, float]:
    return train(worker, drop=0.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(Layout(replicas=2), Layout(context=2), id="dp2-to-context2"),
        quick.further(Layout(context=4), Layout(tensor=2), id="context4-to-tensor2"),
        pytest.param(Layout(replicas=2, context=2), Layout(shard=2), id="2xcontext2-to-shard2"),
    ],
)
def test_a_checkpoint_goes_on_under_another_layout(world: World, tmp_path: Path, before: Layout, after: Layout) -> None:
    whole = beside(tmp_path).one_process(without, Plan(batch=RESUME, compute=EXACT))
    first = world(without, workers_of(before), Plan(layout=before, batch=RESUME, compute=EXACT), max_steps=4)
    second = world(without, workers_of(after), Plan(layout=after, batch=RESUME, compute=EXACT))
    for result in first:
        assert result == pytest.approx({step: whole[step] for step in range(1, 5)}, rel=1e-9)
    for result in second:
        assert result == pytest.approx({step: whole[step] for step in range(5, 25)}, rel=1e-9)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers_work_as_they_are(world: World, tmp_path: Path, kind: str) -> None:
    def run(worker: Any) -> list[float]:
        torch.manual_seed(3)
        model = worker.prepare(hugging_face(kind))
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        step = worker.stepper(
            model, optim, forward=lambda one, micro: one(input_ids=micro[0], labels=micro[0], use_cache=False).loss
        )
        return [float(step(batch)) for batch in worker.batches(Text(ROWS))]

    pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")  # once, for all workers
    batch = Batch(size=16, micro=4)
    expected = beside(tmp_path).one_process(run, Plan(batch=batch, compute=EXACT))
    for found in world(run, 2, Plan(layout=Layout(context=2), batch=batch, compute=EXACT)):
        assert found == pytest.approx(expected, rel=1e-6)  # the model computes its loss in single precision
