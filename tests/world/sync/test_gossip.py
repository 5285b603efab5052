"""Gossip against a reference of a few lines: replicas of one worker, and of several."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forked import World
from layout_runs import RESUME, by_stepper
from local_sgd_reference import Reference
from local_sgd_runs import BATCH, EXACT, OPTIMIZERS, STEPS, assert_same, model_of, plan_of, samples, train
from paceline.plan import Gossip, Layout, Plan
from paceline.schedule.gossip_mixing import mixing_row


class Gossiping(Reference):
    """Local SGD, whose replicas mix weights between two averages."""

    gossip: Gossip
    step = 0

    def _step(self, replica: int, ranges: Sequence[tuple[int, int]]) -> float:
        loss = super()._step(replica, ranges)
        if replica == self.replicas - 1:
            self.step += 1
            if self.step % self.gossip.every == 0 and self.step % self.gossip.average_every:
                self._mix()
        return loss

    @torch.no_grad()
    def _mix(self) -> None:
        count, peers = self.replicas, self.gossip.peers
        rows = [mixing_row(peers, one, count=count, step=self.step, seed=0) for one in range(count)]
        for each in zip(*(model.parameters() for model in self.models), strict=True):
            mixed = [sum(weight * each[other] for other, weight in row.items()) for row in rows]
            for parameter, value in zip(each, mixed, strict=True):
                parameter.copy_(torch.as_tensor(value))


@pytest.mark.parametrize(
    ("sync", "replicas", "by_hand"),
    [
        (Gossip(average_every=5), 4, False),
        (Gossip(peers="random", every=2, average_every=8), 3, True),
        (Gossip(average_every=64), 2, False),
    ],
    ids=str,
)
def test_replicas_mix_and_average_as_the_reference_does(
    world: World, sync: Gossip, replicas: int, by_hand: bool
) -> None:
    run = functools.partial(train, optimizer="momentum", by_hand=by_hand)
    found = world(run, replicas, plan_of(sync, replicas), save_at_end=False)
    inputs, targets = samples().tensors
    reference = Gossiping(
        model=model_of().double(),
        make=lambda model: OPTIMIZERS["momentum"](model.parameters()),
        inputs=inputs.double(),
        targets=targets,
        batch=BATCH.size,
        micro=BATCH.resolved_micro,
        replicas=replicas,
        every=sync.average_every,
    )
    reference.gossip = sync
    losses = reference.run(3 * STEPS)
    for replica, result in enumerate(found):
        assert result["losses"] == pytest.approx([each[replica] for each in losses], rel=1e-9, nan_ok=True)
        assert_same(result, reference.model.state_dict(), tolerance=1e-9)
        assert all(torch.equal(value, found[0]["state"][name]) for name, value in result["state"].items())
        assert result["sent"].num_sent > 0


def run_of(worker: Any) -> dict[str, Any]:
    return by_stepper(worker, drop=0.0)


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(tensor=2, sequence=True)], ids=str)
def test_replicas_of_several_workers_mix_as_whole_ones_do(world: World, tmp_path: Any, layout: Layout) -> None:
    plan = Plan(sync=Gossip(average_every=3), batch=RESUME, compute=EXACT)
    (tmp_path / "whole").mkdir()
    oracle = World(tmp_path / "whole")(run_of, 2, plan, save_at_end=False)
    found = world(run_of, 4, Plan(layout=layout, sync=plan.sync, batch=RESUME, compute=EXACT), save_at_end=False)
    for rank, result in enumerate(found):
        whole = oracle[rank // layout.workers_each]
        for key in ("losses", "norms", "evaluated"):
            assert result[key] == pytest.approx(whole[key], rel=1e-9, nan_ok=True), key
