"""A torch DataLoader is taken over: what is kept, what is told, and what is refused by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.plan import Batch
from paceline.worker.data.data_request import read_request


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index**2


class Words(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter("abc")


class Listed(Sampler[int]):
    """The same list in each epoch, by what it is given."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.epoch = draw, 0

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self.epoch))

    def __len__(self) -> int:
        return 5


class Epochs(Listed):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


DATA, PLAN = Squares(), Batch()


def order(loader: DataLoader[Any], epoch: int = 0) -> list[int]:
    found = read_request(loader, PLAN).draws
    assert found is not None
    return found.indices(seed=0, epoch=epoch, positions=np.arange(found.num_samples)).tolist()


def test_the_parts_of_a_loader_are_kept() -> None:
    def begin(number: int) -> None: ...

    loader = DataLoader(
        DATA, 32, shuffle=True, collate_fn=sum, num_workers=2, prefetch_factor=5, drop_last=True, worker_init_fn=begin
    )
    found = read_request(loader, PLAN)
    assert (found.dataset, found.collate, found.loaders, found.prefetch) == (DATA, sum, 2, 5)
    assert (found.draws, found.shuffle, found.drop_last, found.pin) == (None, True, True, False)
    assert found.begin_loader is begin and found.batch_size is None
    assert found.takeover == "the order of samples is Paceline's, by the plan's seed, the same on any number of workers"


def test_a_loader_as_the_plan_has_it_is_taken_over_without_a_word() -> None:
    assert read_request(DataLoader(DATA, 32), PLAN).takeover == ""


def test_arguments_count_before_the_loaders() -> None:
    found = read_request(DataLoader(DATA, 32, num_workers=2), PLAN, loaders=0, collate=sum, prefetch=3)
    assert (found.loaders, found.collate, found.prefetch) == (0, sum, 3)


@pytest.mark.parametrize(
    ("size", "batch", "wanted", "says"),
    [
        (8, Batch(), 8, "a step has its batch_size of 8 samples over all workers, since the plan names no size"),
        (8, Batch(size=64), None, "a step has the plan's 64 samples over all workers, not 8 on each"),
        (8, Batch(micro=2), None, "a step has the plan's 32 samples over all workers, not 8 on each"),
        (64, Batch(size=64), None, ""),
    ],
)
def test_a_loaders_batch_size_counts_where_the_plan_names_none(
    size: int, batch: Batch, wanted: int | None, says: str
) -> None:
    found = read_request(DataLoader(DATA, size), batch)
    assert (found.batch_size, found.takeover) == (wanted, says)


def test_torchs_samplers_become_orders_of_the_same_kind() -> None:
    assert read_request(DataLoader(DATA, 32, sampler=SequentialSampler(DATA)), PLAN).shuffle is False
    some = order(DataLoader(DATA, 32, sampler=SubsetRandomSampler([1, 5, 39])))
    assert sorted(some) == [1, 5, 39]
    more = order(DataLoader(DATA, 32, sampler=RandomSampler(DATA, replacement=True, num_samples=100)))
    assert len(more) == 100 and len(set(more)) < 40
    twice = order(DataLoader(DATA, 32, sampler=RandomSampler(DATA, num_samples=80)))
    assert sorted(twice) == sorted([*range(40)] * 2)
    weights = [0.0] * 30 + [1.0] * 10
    heavy = order(DataLoader(DATA, 32, sampler=WeightedRandomSampler(weights, 25)))
    assert len(heavy) == 25 and min(heavy) >= 30
    alone = order(DataLoader(DATA, 32, sampler=WeightedRandomSampler(weights, 10, replacement=False)))
    assert sorted(alone) == [*range(30, 40)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_shuffles_or_not_and_divides_nothing(shuffle: bool) -> None:
    sampler = DistributedSampler(DATA, num_replicas=4, rank=1, shuffle=shuffle, seed=5)
    found = read_request(DataLoader(DATA, 32, sampler=sampler), PLAN)
    assert (found.draws, found.shuffle) == (None, shuffle)
    assert "divides nothing" in found.takeover and ("seed=5 is not used" in found.takeover) is shuffle


@pytest.mark.parametrize(
    "draw",
    [
        lambda epoch: torch.randperm(40)[:5].tolist(),
        lambda epoch: random.sample(range(40), 5),
        lambda epoch: np.random.permutation(40)[:5],
    ],
    ids=["torch", "random", "numpy"],
)
def test_an_unknown_sampler_is_read_with_random_state_of_the_epoch(draw: Any) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = DataLoader(DATA, 32, sampler=Listed(draw))
    first, second = order(loader, 0), order(loader, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert (order(loader, 0), order(loader, 1)) == (first, second) and first != second


def test_an_unknown_sampler_is_told_the_epoch() -> None:
    loader = DataLoader(DATA, 32, sampler=Epochs(lambda epoch: range(epoch, epoch + 5)))
    assert order(loader, 3) == [3, 4, 5, 6, 7] and order(loader, 0) == [0, 1, 2, 3, 4]


def test_the_order_of_an_iterables_loader_is_its_own() -> None:
    found = read_request(DataLoader(Words(), 32, num_workers=3), PLAN)
    assert (found.draws, found.shuffle, found.loaders) == (None, None, 1)
    assert found.takeover == "one loader process reads the stream, not 3"


class PairBatches:
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1]])

    def __len__(self) -> int:
        return 1


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DataLoader(DATA, batch_sampler=PairBatches()), "batch_sampler is a PairBatches.*pass lengths="),
        (lambda: DataLoader(DATA, batch_size=None), "batch_size=None, so its dataset gives whole batches"),
        (
            lambda: DataLoader(DATA, 32, num_workers=1, multiprocessing_context="spawn"),
            "multiprocessing_context='spawn'.*leave it out",
        ),
        (lambda: DataLoader(Words(), 32, worker_init_fn=print), "has a worker_init_fn.*leave it out"),
        (
            lambda: DataLoader(
                DATA, 32, sampler=Listed(lambda epoch: torch.randperm(40, generator=GENERATOR).tolist())
            ),
            "the sampler Listed gives other indices each time",
        ),
        (lambda: DataLoader(DATA, 32, sampler=Listed(lambda epoch: [40])), "gives the index 40"),
        (lambda: DataLoader(DATA, 32, sampler=WeightedRandomSampler([1.0], 3)), "1 weights, and the dataset 40"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_remedy(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_request(make(), PLAN)


def test_a_sampler_of_one_worker_of_several_is_refused() -> None:
    class Mine(DistributedSampler[Any]):
        pass

    with pytest.raises(ValueError, match=r"Mine has num_replicas=2.*num_replicas=1, rank=0"):
        read_request(DataLoader(DATA, 32, sampler=Mine(DATA, num_replicas=2, rank=0)), PLAN)


def test_a_plain_batch_sampler_is_a_batch_size() -> None:
    found = read_request(DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 8, True)), PLAN)
    assert (found.batch_size, found.drop_last, found.shuffle) == (8, True, False)


@pytest.mark.parametrize("option", ["weights", "lengths"])
def test_two_orders_are_refused(option: str) -> None:
    by: Any = {option: [1.0] * 40}
    with pytest.raises(ValueError, match=f"{option}= is an order of samples, and the DataLoader's sampler is another"):
        read_request(DataLoader(DATA, 32), PLAN, **by)
    with pytest.raises(ValueError, match="give one of them"):
        read_request(DATA, PLAN, weights=[1.0] * 40, lengths=[1.0] * 40)
    assert read_request(DataLoader(DATA, 32, shuffle=True), PLAN, **by).draws is not None


def test_other_things_of_a_loader_that_differ_are_named() -> None:
    loader = DataLoader(DATA, 32, shuffle=True, generator=torch.Generator(), num_workers=1, timeout=7)
    said = read_request(loader, PLAN).takeover
    assert "its generator draws nothing" in said and "not 7 s" in said
    kept = read_request(DataLoader(DATA, 32, shuffle=True), Batch(shuffle=False))
    assert kept.shuffle is False and "batch(shuffle=false) of the plan" in kept.takeover
