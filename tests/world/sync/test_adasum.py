"""Adasum between real replicas: what the reference makes of their own mean gradients, the same bits on all."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from adasum_reference import combined
from forked import World
from layout_runs import BATCH, EXACT, RESUME, Text, assert_same, next_word, prepared, without_dropout
from paceline.plan import AllReduce, Batch, Cast, Layout, Plan

ADASUM = AllReduce(op="adasum", bucket_bytes=9000)


def against_the_reference(worker: Any, *, tolerance: float) -> list[bool]:
    """Train by a plain loop, and hold each step's gradients against those that the replicas tell."""
    model, optim = prepared(worker, drop=0.0)
    named = dict(model.named_parameters())
    idle = []
    for batch in worker.batches(Text(), epochs=1):
        own, num_own = {name: torch.zeros_like(parameter) for name, parameter in named.items()}, 0
        for x, y in batch:
            loss = next_word(model(x), y)
            alone = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
            for name, gradient in zip(named, alone, strict=True):
                own[name] += 0.0 if gradient is None else gradient * len(x)
            num_own += len(x)
            worker.backward(loss)
        told = worker.gather((num_own, own))
        idle.append(num_own == 0)
        for name, parameter in named.items():
            each = [gradients[name] / max(count, 1) for count, gradients in told]
            if parameter.grad is None:
                assert not any(bool(one.any()) for one in each), name
                continue
            torch.testing.assert_close(parameter.grad, combined(each), rtol=tolerance, atol=tolerance, msg=name)
            assert all(torch.equal(parameter.grad, other) for other in worker.gather(parameter.grad)), name
        optim.step()
    return idle


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_every_step_is_the_references_of_the_replicas_own_means(world: World, replicas: int) -> None:
    plan = Plan(sync=ADASUM, batch=BATCH, compute=EXACT)
    told = world(functools.partial(against_the_reference, tolerance=1e-10), replicas, plan, save_at_end=False)
    assert any(map(any, told)), "the last batch of two samples left somebody without a micro-batch"


def test_halves_travel_in_sixteen_bits_and_are_combined_in_more(world: World) -> None:
    plan = Plan(sync=ADASUM, wire=Cast(dtype="bf16"), batch=Batch(size=16, micro=4))
    world(functools.partial(against_the_reference, tolerance=0.02), 2, plan, save_at_end=False)


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(tensor=2, sequence=True), Layout(stages=2)], ids=str)
def test_a_replica_of_several_workers_gives_what_it_would_as_one(
    world: World, whole_replicas: dict[str, Any], layout: Layout
) -> None:
    plan = Plan(layout=layout, sync=ADASUM, batch=RESUME, compute=EXACT)
    assert_same(world(without_dropout, 2 * layout.workers_each, plan, save_at_end=False), whole_replicas)


@pytest.fixture(scope="module")
def whole_replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The oracle of layouts: two replicas of one worker each."""
    plan = Plan(sync=ADASUM, batch=RESUME, compute=EXACT)  # each replica gets the same samples
    return World(tmp_path_factory.mktemp("whole"))(without_dropout, 2, plan, save_at_end=False)[0]
