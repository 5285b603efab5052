"""Orders beside the shuffle: each is a pure function of seed, epoch and position, and gives the samples it should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.schedule.index_orders import ListedOrder, SimilarLengths, SubsetOrder, UniformOrder, WeightedSubset
from paceline.schedule.micro_batches import micro_batches
from paceline.schedule.sample_order import IndexOrder, WeightedDraws

RNG = np.random.default_rng(0)
LENGTHS = RNG.lognormal(5.0, 0.8, size=5003).astype(int) + 1
ORDERS: dict[str, IndexOrder] = {
    "draws": UniformOrder(50, 130, with_replacement=True),
    "passes": UniformOrder(50, 130, with_replacement=False),
    "part": UniformOrder(50, 13, with_replacement=False),
    "subset": SubsetOrder([3, 8, 30, 49], 50),
    "weights": WeightedDraws([1.0, 0.0, 3.0] * 20, num_draws=31),
    "no replacement": WeightedSubset([1.0, 0.0, 3.0] * 20, 31),
    "lengths": SimilarLengths(LENGTHS, batch=64, micro=8),
    "listed": ListedOrder(lambda seed, epoch: [4, 2, epoch], 50, seed=0),
}


def all_of(order: IndexOrder, epoch: int, *, seed: int = 3) -> list[int]:
    return order.indices(seed=seed, epoch=epoch, positions=np.arange(order.num_samples)).tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_any_positions_in_any_sequence_give_what_the_whole_epoch_has_there(order: IndexOrder) -> None:
    whole = {epoch: all_of(order, epoch) for epoch in (0, 1, 5)}
    assert all(0 <= index < order.num_indices for found in whole.values() for index in found)
    for epoch in (5, 0, 1, 5):
        places = RNG.integers(order.num_samples, size=40)
        found = order.indices(seed=3, epoch=epoch, positions=places)
        assert found.tolist() == [whole[epoch][place] for place in places]


@pytest.mark.parametrize("kind", [kind for kind in ORDERS if kind != "listed"])
def test_epochs_and_seeds_have_other_orders(kind: str) -> None:
    order = ORDERS[kind]
    seen = [all_of(order, 0), all_of(order, 1), all_of(order, 0, seed=4)]
    assert len({tuple(one) for one in seen}) > 1


def test_passes_have_each_sample_once_before_any_comes_again() -> None:
    found = all_of(ORDERS["passes"], 2)
    assert sorted(found[:50]) == sorted(found[50:100]) == list(range(50))
    assert found[:50] != found[50:100] and len(set(found[100:])) == 30
    assert set(all_of(ORDERS["passes"], 3)[:50]) == set(range(50))


def test_draws_with_replacement_are_uniform() -> None:
    counts = np.bincount(all_of(UniformOrder(10, 100_000, with_replacement=True), 0), minlength=10)
    assert abs(counts / 10_000 - 1).max() < 0.05


def test_draws_without_replacement_prefer_heavy_samples_and_never_repeat_one() -> None:
    order = WeightedSubset([1.0] * 50 + [9.0] * 50 + [0.0], 20)
    heavy = []
    for epoch in range(300):
        found = all_of(order, epoch)
        assert len(set(found)) == 20 and 100 not in found
        heavy.append(sum(index >= 50 for index in found) / 20)
    assert 0.83 < np.mean(heavy) < 0.91  # 0.9 for the first, and less as heavy ones are used up
    with pytest.raises(ValueError, match="3 draws without replacement, of 2 samples"):
        WeightedSubset([1.0, 1.0, 0.0], 3)


def padding(indices: list[int], *, batch: int, micro: int) -> float:
    """The share of a padded micro-batch that is padding, over an epoch."""
    cells = tokens = 0
    for start in range(0, len(indices), batch):
        for one in micro_batches(start, min(start + batch, len(indices)), micro):
            sizes = LENGTHS[indices[one.start : one.stop]]
            cells, tokens = cells + int(sizes.max()) * len(sizes), tokens + int(sizes.sum())
    return 1 - tokens / cells


def test_similar_lengths_save_nearly_all_padding_and_each_sample_comes_once() -> None:
    grouped = all_of(ORDERS["lengths"], 0)
    assert sorted(grouped) == list(range(len(LENGTHS)))
    shuffled = RNG.permutation(len(LENGTHS)).tolist()
    assert padding(shuffled, batch=64, micro=8) > 0.45
    assert padding(grouped, batch=64, micro=8) < 0.03


def test_steps_and_their_micro_batches_come_in_no_order_of_length() -> None:
    grouped = all_of(ORDERS["lengths"], 0)
    whole = LENGTHS[np.array(grouped[: 64 * 50])].reshape(50, 8, 8)  # one megabatch
    of_steps, of_micros = whole.mean(axis=(1, 2)), whole.mean(axis=2)
    assert abs(np.corrcoef(of_steps, np.arange(50))[0, 1]) < 0.4
    first = [int(np.argsort(np.argsort(row))[0]) for row in of_micros]  # the rank of each step's first micro-batch
    assert 2 < np.mean(first) < 5, "the first worker would always have the longest, or the shortest"


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128 * 50 + 7])
def test_lengths_of_any_number_of_samples_are_a_permutation(count: int) -> None:
    order = SimilarLengths(RNG.integers(1, 9, size=count), batch=64, micro=9)
    assert sorted(all_of(order, 1)) == list(range(count))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SubsetOrder([0, 9], 9), "gives the index 9, and the dataset has 9 samples"),
        (lambda: SubsetOrder([], 9), "no list of indices"),
        (lambda: ListedOrder(lambda seed, epoch: [-1], 9, seed=0), "gives the index -1"),
        (lambda: SimilarLengths(np.ones((1, 1)), batch=2, micro=1), r"shape \[1, 1\]"),
        (lambda: SimilarLengths([1.0, float("nan")], batch=2, micro=1), "not finite"),
    ],
)
def test_what_is_no_order_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_a_list_that_changes_its_length_is_refused_in_that_epoch() -> None:
    order = ListedOrder(lambda seed, epoch: [0] * (3 + epoch), 5, seed=0, what="the sampler S")
    with pytest.raises(ValueError, match="the sampler S gives 4 indices in epoch 2, and gave 3"):
        order.indices(seed=0, epoch=1, positions=np.arange(2))
