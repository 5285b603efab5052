"""A spike is what stands out of the losses before it: an outlier is found, and drops, noise and plateaus are let be."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PlanError
from paceline.plan import Guard, Plan
from paceline.worker.step.losses import LossSpike, LossSpikeDetector, spike_limit

SKIP = Guard(on_spike="skip", window=32)


def judged(losses: Iterable[float], guard: Guard = SKIP) -> list[int]:
    """The places of the losses that are spikes."""
    watch, found = LossSpikeDetector(guard), []
    for place, loss in enumerate(losses):
        spike = watch.judge("train", loss, finite=True)
        watch.settled("train", loss, spike)
        if spike is not None:
            found.append(place)
    return found


def falling(steps: int, *, noise: float, seed: int = 1) -> list[float]:
    """What training looks like: from 9 to 2, with noise in proportion."""
    draw = random.Random(seed)
    return [(2 + 7 * math.exp(-step / 60)) * (1 + draw.gauss(0, noise)) for step in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.02, 0.1])
def test_training_with_noise_has_no_spike(noise: float) -> None:
    assert judged(falling(1000, noise=noise)) == []


@pytest.mark.parametrize("place", [16, 40, 500])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_one_outlier_is_found_and_nothing_else(place: int, noise: float) -> None:
    losses = falling(600, noise=noise)
    losses[place] *= 5
    assert judged(losses) == [place]


def test_a_sudden_drop_is_no_spike_and_a_rise_back_is() -> None:
    low = [1.0 + 0.01 * math.sin(step) for step in range(60)]
    assert judged([4.0] * 40 + low) == []
    assert judged([4.0] * 40 + low + [4.0]) == [100]


def test_a_plateau_without_noise_bears_small_rises() -> None:
    assert judged([2.0] * 50 + [2.1, 2.0, 1.9] + [2.0] * 20) == []
    assert judged([2.0] * 50 + [2.3]) == [50]


def test_losses_that_have_come_to_nothing_bear_rounding() -> None:
    assert judged([0.0] * 50 + [1e-7] + [0.0] * 5) == []
    assert judged([0.0] * 50 + [1.0]) == [50]


def test_negative_losses_are_measured_by_their_size() -> None:
    assert judged([-5.0] * 50 + [-4.8]) == []
    assert judged([-5.0] * 50 + [-1.0]) == [50]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_spike_from_the_first_step_on(bad: float) -> None:
    assert judged([bad, 1.0, bad]) == [0, 2]


def test_gradients_that_are_not_finite_make_a_spike_of_a_good_loss() -> None:
    spike = LossSpikeDetector(SKIP).judge("train", 1.5, finite=False)
    assert spike == LossSpike(loss=1.5, limit=None, in_a_row=1)
    assert str(spike) == "loss 1.5, but its gradients are not finite"


def test_nothing_is_judged_before_half_a_window_is_known() -> None:
    assert judged([1.0] * 15 + [100.0]) == []
    assert judged([1.0] * 16 + [100.0]) == [16]


def test_spikes_do_not_raise_what_is_expected() -> None:
    assert judged([1.0] * 40 + [50.0] * 100 + [1.0, 50.0]) == [*range(40, 140), 141]


def test_a_step_without_a_loss_is_none() -> None:
    watch = LossSpikeDetector(SKIP)
    assert watch.judge("train", None, finite=True) is None
    assert watch.judge("train", None, finite=False) is not None


def test_each_series_is_measured_by_itself() -> None:
    watch = LossSpikeDetector(SKIP)
    for _ in range(40):
        for series, loss in (("a", 1.0), ("b", 30.0)):
            assert watch.judge(series, loss, finite=True) is None
            watch.settled(series, loss, None)
    assert watch.judge("a", 30.0, finite=True) is not None


def test_spikes_in_a_row_are_counted_until_a_good_step() -> None:
    watch, counts = LossSpikeDetector(SKIP), []
    for loss in [*[1.0] * 20, 9.0, 9.0, 9.0, 1.0, 9.0]:
        spike = watch.judge("train", loss, finite=True)
        watch.settled("train", loss, spike)
        if spike is not None:
            counts.append(spike.in_a_row)
    assert counts == [1, 2, 3, 1]


def test_without_a_guard_nothing_is_judged() -> None:
    assert judged([1.0] * 200 + [1e9, math.nan], Guard()) == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=16, max_size=64), st.floats(-1e6, 1e6))
def test_what_it_knows_survives_being_sent(losses: list[float], following: float) -> None:
    one, other = LossSpikeDetector(SKIP), LossSpikeDetector(SKIP)
    for loss in losses:
        one.settled("train", loss, one.judge("train", loss, finite=True))
    other.load_state_dict(one.state_dict())
    assert other.judge("train", following, finite=True) == one.judge("train", following, finite=True)


@given(st.lists(st.floats(0.1, 10), min_size=8, max_size=40))
def test_the_limit_is_above_the_median_and_does_not_depend_on_the_order(losses: list[float]) -> None:
    limit = spike_limit(losses, factor=10)
    assert limit > sorted(losses)[len(losses) // 2 - 1]
    assert limit == spike_limit(sorted(losses), factor=10)


def test_the_guard_is_a_part_of_the_plan_with_a_text_form() -> None:
    plan = Plan(guard=Guard(on_spike="rollback", factor=6.0, check_every=500))
    assert str(plan) == "guard(on_spike=rollback,factor=6.0,check_every=500)"
    assert Plan.parse(str(plan)) == plan
    assert str(Plan(guard=Guard())) == "default"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"on_spike": "ignore"}, "it must be 'none', 'stop', 'skip' or 'rollback'"),
        ({"on_spike": "stop", "factor": 0.0}, "Guard.factor is 0.0; it must be more than 0"),
        ({"on_spike": "stop", "factor": math.inf}, "Guard.factor is inf; it must be more than 0"),
        ({"on_spike": "stop", "window": 7}, "Guard.window is 7; it must be at least 8 steps"),
        ({"on_spike": "rollback", "snapshot_every": 0}, "Guard.snapshot_every is 0, and on_spike='rollback' goes back"),
        ({"snapshot_every": -1}, "Guard.snapshot_every is -1; it must be a number of steps, 0 (never), or left out"),
        ({"check_every": -1}, "Guard.check_every is -1; it must be 0 (never) or a number of steps"),
        ({"factor": 5.0}, "on_spike='none' does not use it"),
        ({"on_spike": "none", "window": 64}, "or use on_spike='stop' or 'skip' or 'rollback'"),
    ],
)
def test_a_guard_that_makes_no_sense_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Guard(**fields)
    assert says in str(caught.value)
