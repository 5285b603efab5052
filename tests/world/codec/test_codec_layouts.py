"""Wires that round, between replicas of several workers: what these have in common stays equal, and nothing is lost."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import quick
from expert_models import MoeNet
from forked import World
from layout_runs import RESUME, Text, next_word, prepared, workers_of
from paceline.plan import AllReduce, Int8, Layout, LocalSGD, OneBit, Plan, Sync, TopK, Wire

BUCKETS = AllReduce(bucket_bytes=4096)
CUT, WITH_SLICES = Layout(replicas=2, tensor=2), Layout(replicas=2, tensor=2, sequence=True)
STAGES = Layout(replicas=2, stages=2)


def here(worker: Any, model: Any, optim: Any) -> dict[str, Tensor]:
    """After some steps: the parameters of which this worker has neither a part nor nothing."""
    step = worker.stepper(model, optim, next_word)
    for batch in worker.batches(Text(), epochs=2):
        step(batch)
    parts = worker._models.layout.slices(model)
    return {name: p.detach().clone() for name, p in model.named_parameters() if name not in parts and not p.is_meta}


def trained(worker: Any) -> dict[str, Tensor]:
    return here(worker, *prepared(worker, drop=0.0))


def routed(worker: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = worker.prepare(MoeNet())
    return here(worker, model, worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02)))


@pytest.mark.parametrize(
    ("layout", "sync", "wire"),
    [
        (CUT, BUCKETS, Int8()),
        quick.further(CUT, AllReduce(), OneBit()),
        quick.further(CUT, BUCKETS, TopK(ratio=0.1)),
        (WITH_SLICES, AllReduce(), OneBit()),
        (CUT, LocalSGD(every=2), TopK(ratio=0.1)),
        (STAGES, LocalSGD(every=2), OneBit()),
        quick.further(Layout(replicas=2, context=2), LocalSGD(every=2), Int8()),
        (Layout(replicas=2, experts=2), LocalSGD(every=2), OneBit()),
    ],
    ids=str,
)
def test_what_several_workers_of_a_replica_have_stays_the_same_to_the_bit(
    world: World, layout: Layout, sync: Sync, wire: Wire
) -> None:
    plan = Plan(layout=layout, sync=sync, wire=wire, batch=RESUME)
    function = trained if layout.experts == 1 else routed
    found = world(function, workers_of(layout), plan, max_steps=3, save_at_end=False)
    shared = set(found[0]) & set(found[1])  # two workers of one replica
    assert "words.weight" in shared if layout.tensor == 1 else "norm.weight" in shared
    for name in {*found[0], *found[1]}:
        values = [one[name] for one in found if name in one]
        assert len(values) == (workers_of(layout) if name in shared else layout.replicas)
        assert all(torch.equal(value, values[0]) for value in values), name


def owed(worker: Any, *, takes_steps: bool) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """What is still to be sent, as this worker has it, and as a checkpoint has it for each replica: after the run's
    steps, or before the next one."""
    model, optim = prepared(worker, drop=0.0)
    step = worker.stepper(model, optim, next_word)
    for batch in worker.batches(Text(), epochs=2):
        if not takes_steps:
            break
        step(batch)
    gradients = worker._models.reducers.sum_over([model])
    own = gradients.memory().copied().own
    stored = {name: [one.clone() for one in values] for name, values in gradients.gathered_own(keeps=True).items()}
    assert all(torch.equal(gradients.memory().own[name], value) for name, value in own.items()), "it is only told"
    return dict(own), stored


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (STAGES, "model.words.weight"),
        (WITH_SLICES, "model.norm.weight"),
        (Layout(replicas=2, stages=2, context=2), "model.words.weight"),
    ],
    ids=str,
)
def test_what_is_to_be_sent_of_parts_of_a_gradient_is_stored_as_their_sum(
    world: World, layout: Layout, name: str
) -> None:
    def run(layout: Layout, *, takes_steps: bool = False, **job: Any) -> list[Any]:
        plan = Plan(layout=layout, wire=TopK(ratio=0.1), sync=BUCKETS, batch=RESUME)
        return world(functools.partial(owed, takes_steps=takes_steps), workers_of(layout), plan, **job)

    def in_all(found: list[Any]) -> Tensor:
        return torch.stack([own[name] for own, _ in found if name in own]).sum(0)

    def assert_stored(found: list[Any], totals: list[Tensor]) -> None:
        for stored in (stored[name] for _, stored in found if name in stored):
            torch.testing.assert_close(stored, totals)

    before, each = run(layout, takes_steps=True, max_steps=2), layout.workers_each
    totals = [in_all(before[first : first + each]) for first in (0, each)]
    assert all(bool(total.any()) for total in totals)
    assert_stored(before, totals)
    after = run(layout, save_at_end=False)
    torch.testing.assert_close([in_all(after[first : first + each]) for first in (0, each)], totals)
    for alone in (Layout(stages=2), Layout()):  # it sends nothing to others: it takes all into its next step
        found = run(alone, save_at_end=False)
        torch.testing.assert_close(in_all(found), totals[0] + totals[1])
        assert_stored(found, [totals[0] + totals[1]])
