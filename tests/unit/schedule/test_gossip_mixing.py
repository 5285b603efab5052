"""Gossip: mixing matrices keep the average, and bring replicas together."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

import quick
from paceline.errors import PlanError
from paceline.plan import Gossip, Plan
from paceline.schedule.gossip_mixing import mixing_row

Peers = Literal["ring", "random"]


def matrix(peers: Peers, count: int, step: int, seed: int = 0) -> np.ndarray:
    rows = [mixing_row(peers, index, count=count, step=step, seed=seed) for index in range(count)]
    return np.array([[row.get(other, 0.0) for other in range(count)] for row in rows])


@pytest.mark.parametrize("peers", ["ring", "random"])
@pytest.mark.parametrize("count", quick.some(range(1, 17), step=4))
def test_mixing_is_doubly_stochastic_symmetric_and_with_few_peers(peers: Peers, count: int) -> None:
    for step in range(1, 6):
        mixing = matrix(peers, count, step)
        np.testing.assert_allclose(mixing.sum(0), 1.0)
        np.testing.assert_allclose(mixing.sum(1), 1.0)
        np.testing.assert_array_equal(mixing, mixing.T)  # who sends to another is sent to by it
        assert (mixing.diagonal() > 0).all()
        assert (np.count_nonzero(mixing, axis=1) <= (3 if peers == "ring" else 2)).all()
        if peers == "random":
            assert np.count_nonzero(mixing.diagonal() == 1.0) == count % 2


@pytest.mark.parametrize("peers", ["ring", "random"])
@pytest.mark.parametrize("count", [2, 5, 16])
def test_replicas_come_together_at_their_average(peers: Peers, count: int) -> None:
    first = values = np.random.default_rng(1).standard_normal(count)
    for step in range(1, 201):
        values = matrix(peers, count, step) @ values
    np.testing.assert_allclose(values, np.full(count, first.mean()), atol=1e-3)


def test_pairs_are_others_in_each_step_and_for_each_seed_and_the_same_again() -> None:
    drawn = [matrix("random", 8, step, seed) for step in range(20) for seed in range(2)]
    assert len({one.tobytes() for one in drawn}) > 30
    assert (matrix("random", 8, 7, 3) == matrix("random", 8, 7, 3)).all()


def test_the_setting_is_text_and_its_numbers_are_checked() -> None:
    plan = Plan(sync=Gossip(peers="random", every=2, average_every=32))
    assert Plan.parse(str(plan)) == plan
    assert plan.is_local
    with pytest.raises(PlanError, match=r"average_every is 3; it must be at least every=4"):
        Gossip(every=4, average_every=3)
    with pytest.raises(PlanError, match=r"Gossip.every is 0"):
        Gossip(every=0)
