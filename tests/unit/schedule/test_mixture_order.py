"""Mixtures: shares are exact by position, each dataset has epochs of its own, and any position is found by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.data.mixture import Mixture
from paceline.schedule.mixture_order import MixtureOrder

SIZES, SHARES = {"web": 700, "code": 90, "rare": 5}, {"web": 0.6, "code": 0.3, "rare": 0.1}
ORDER = MixtureOrder(SIZES, SHARES, num_samples=1500)


def all_of(epochs: int) -> np.ndarray[Any, Any]:
    return np.concatenate([ORDER.indices(seed=7, epoch=one, positions=np.arange(1500)) for one in range(epochs)])


@pytest.mark.thorough
def test_any_positions_give_what_the_whole_epoch_has_there() -> None:
    whole = all_of(4).reshape(4, 1500)
    draw = np.random.default_rng(0)
    for epoch in (3, 0, 2):
        places = draw.integers(1500, size=60)
        assert ORDER.indices(seed=7, epoch=epoch, positions=places).tolist() == whole[epoch][places].tolist()


@pytest.mark.thorough
def test_shares_are_exact_over_each_block_and_rounding_never_adds_up() -> None:
    found = all_of(8)
    bounds = np.array([0, 700, 790, 795])
    for stop in (1024, 5 * 1024, 11 * 1024):
        counts = np.histogram(found[:stop], bounds)[0]
        assert abs(counts - stop * np.array([0.6, 0.3, 0.1])).max() <= 1
    places = np.flatnonzero(found[:1024] >= 790)
    assert places.min() < 60 and places.max() > 960 and len(set(np.diff(places))) > 3, "shuffled within a block"


@pytest.mark.thorough
def test_each_dataset_has_epochs_of_its_own_in_other_orders() -> None:
    found = all_of(8)
    for start, size in ((0, 700), (700, 90), (790, 5)):
        own = found[(found >= start) & (found < start + size)]
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert len(epochs) > 9 and all(sorted(one) == list(range(start, start + size)) for one in epochs.tolist())
        assert len({tuple(one) for one in epochs.tolist()}) > 9


def test_a_mixture_reads_the_datasets_one_behind_the_other() -> None:
    mixture = Mixture({"a": "xyz", "b": [1, 2]})
    assert [mixture[index] for index in range(5)] == ["x", "y", "z", 1, 2]
    assert mixture.shares == {"a": 0.6, "b": 0.4} and mixture.order.num_samples == 5
    with pytest.raises(IndexError):
        mixture[5]


def test_a_temperature_brings_small_datasets_up() -> None:
    mixture = Mixture({"a": range(900), "b": range(100)}, temperature=2.0, size=50)
    assert mixture.shares == pytest.approx({"a": 0.75, "b": 0.25}) and mixture.order.num_samples == 50


@pytest.mark.parametrize(
    ("datasets", "options", "says"),
    [
        ({}, {}, "give at least one"),
        ({"a": []}, {}, "none that is empty"),
        ({"a": [1]}, {"weights": {"b": 1.0}}, r"weights for \['b'\], and datasets \['a'\]"),
        ({"a": [1]}, {"weights": {"a": -1.0}}, "a=-1.0: each must be a finite number above 0"),
        ({"a": [1]}, {"temperature": 0.0}, "temperature=0.0"),
        ({"a": [1]}, {"size": 0}, "size=0"),
        ({"a": iter([1])}, {}, "'a' is a list_iterator without"),
    ],
)
def test_what_is_no_mixture_is_refused(datasets: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        Mixture(datasets, **options)
