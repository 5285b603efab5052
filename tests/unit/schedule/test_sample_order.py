from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.schedule.sample_order import WeightedDraws, mix, sample_indices


def order(n: int, *, seed: int = 0, epoch: int = 0, shuffle: bool = True) -> list[int]:
    return sample_indices(seed=seed, epoch=epoch, num_samples=n, positions=np.arange(n), shuffle=shuffle).tolist()


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 1000))
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(order(n, seed=seed, epoch=epoch)) == list(range(n))


@given(st.integers(1, 10**12), st.integers(0, 10**6), st.data())
def test_a_position_gives_the_same_sample_alone_and_among_others(n: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    together = sample_indices(seed=seed, epoch=3, num_samples=n, positions=positions)
    alone = [
        int(sample_indices(seed=seed, epoch=3, num_samples=n, positions=positions[i : i + 1])[0])
        for i in range(len(positions))
    ]
    assert together.tolist() == alone
    assert all(0 <= index < n for index in alone)


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = [tuple(order(100, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25


def test_without_shuffle_positions_are_samples() -> None:
    assert order(7, shuffle=False) == list(range(7))


@pytest.mark.parametrize("n", [2, 3, 10, 64, pytest.param(257, marks=pytest.mark.thorough)])
def test_every_sample_reaches_every_position_about_equally_often(n: int) -> None:
    counts = np.zeros(n)
    for epoch in range(40 * n if n < 20 else 8 * n):
        counts[sample_indices(seed=1, epoch=epoch, num_samples=n, positions=np.array([0]))[0]] += 1
    expected = counts.sum() / n
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    degrees = n - 1
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5 + 5  # five standard deviations


def test_neighbours_in_the_order_are_not_neighbours_in_the_dataset() -> None:
    steps = np.diff(order(10_000))
    assert np.mean(np.abs(steps) == 1) < 0.002
    assert abs(np.corrcoef(order(10_000), range(10_000))[0, 1]) < 0.05


def test_positions_outside_the_epoch_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="from 3 to 12, outside an epoch of 10"):
        sample_indices(seed=0, epoch=0, num_samples=10, positions=np.array([3, 12]))


def test_order_never_changes_between_versions() -> None:
    """Checkpoints store positions: another order for the same seed would repeat and lose samples on resume."""
    assert order(10) == FIRST_TEN
    assert sample_indices(seed=7, epoch=2, num_samples=10**9, positions=np.array([0, 1, 2])).tolist() == LARGE


def test_mix_depends_on_every_number_and_on_their_order() -> None:
    assert len({mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 0), mix(-1, 2)}) == 5
    assert 0 <= mix(2**200, -(2**90)) < 2**64


FIRST_TEN = [4, 8, 2, 9, 6, 5, 1, 3, 0, 7]
LARGE = [362027731, 423115912, 685334271]


def test_draws_follow_the_weights_and_never_take_what_has_none() -> None:
    weights = np.array([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])
    found = WeightedDraws(weights).indices(seed=5, epoch=1, positions=np.arange(80_000))
    counts = np.bincount(found, minlength=6)
    assert counts[weights == 0].sum() == 0
    expected = weights / weights.sum() * len(found)
    kept = expected > 0
    # Chi-square with two degrees of freedom: beyond 18.4 in one of ten thousand seeds.
    assert ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 18.4
    pairs = np.bincount(found[:-1] * 6 + found[1:], minlength=36).reshape(6, 6) / (len(found) - 1)
    assert np.abs(pairs - np.outer(weights, weights) / 64).max() < 0.006  # neighbors are independent


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=30).filter(lambda ws: 0 < sum(ws) < 1e301), st.data())
def test_a_draw_depends_on_seed_epoch_and_position_alone(weights: list[float], data: st.DataObject) -> None:
    draws = WeightedDraws(weights)
    positions = np.array(data.draw(st.lists(st.integers(0, 10**12), min_size=1, max_size=20)))
    together = draws.indices(seed=3, epoch=2, positions=positions)
    alone = [int(draws.indices(seed=3, epoch=2, positions=positions[i : i + 1])[0]) for i in range(len(positions))]
    assert together.tolist() == alone
    assert all(weights[index] > 0 for index in alone)
    assert draws.checksum == WeightedDraws(np.array(weights)).checksum


def test_draws_differ_between_seeds_epochs_and_shuffles() -> None:
    draws, places = WeightedDraws([1.0] * 1000), np.arange(1000)
    of = [draws.indices(seed=s, epoch=e, positions=places) for s, e in ((0, 0), (0, 1), (1, 0))]
    assert all((one == other).mean() < 0.02 for one, other in ((of[0], of[1]), (of[0], of[2]), (of[1], of[2])))


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([1.0, -1.0], "weight 1 is -1"),
        ([float("nan")], "weight 0 is nan"),
        ([0.0, 0.0], "more than 0"),
        ([], "sum"),
        ([[1.0]], "shape"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights: list[float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        WeightedDraws(weights)
