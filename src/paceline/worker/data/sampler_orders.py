"""What a torch sampler is here: an order of samples that is a pure function of seed, epoch and position.

Torch's own samplers are known by their class, and get an order of the same kind, which begins anywhere at no cost. Any
other is read, as its list of indices for each epoch, with random state that is seeded by the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.schedule.index_orders import ListedOrder, SubsetOrder, UniformOrder, WeightedSubset
from paceline.schedule.sample_order import IndexOrder, WeightedDraws
from paceline.worker.data import random_state

__all__ = ["order_of_sampler"]

OURS = "the order of samples is Paceline's, by the plan's seed"
SAMPLER_SEED = 6  # among the uses of random state that are seeded by a stream's seed
ALWAYS = "the same on any number of workers"

Order = tuple[IndexOrder | None, bool | None, list[str]]


def order_of_sampler(sampler: Any, num_indices: int, *, seed: int) -> Order:
    """Return the order (None: a shuffle, or the dataset's), whether it is shuffled, and what differs from torch's.

    `seed`: the stream's. Raises ValueError for a sampler whose list cannot be had twice, with the remedy.
    """
    known: dict[type, Callable[[Any, int], Order]] = {
        SequentialSampler: lambda sampler, num_indices: (None, False, []),
        RandomSampler: _of_random,
        WeightedRandomSampler: _of_weighted,
        SubsetRandomSampler: lambda sampler, num: (SubsetOrder(sampler.indices, num), True, [f"{OURS}, {ALWAYS}"]),
        DistributedSampler: _of_distributed,
    }
    stateful = {"RandomSampler": _of_random, "StatefulDistributedSampler": _of_distributed}  # torchdata's own
    of_kind = known.get(type(sampler))
    if type(sampler).__module__.partition(".")[0] == "torchdata":
        of_kind = stateful.get(type(sampler).__name__)
    if of_kind is not None and _is_of(sampler, num_indices):
        return of_kind(sampler, num_indices)
    return _listed(sampler, num_indices, seed)


def _is_of(sampler: Any, num_indices: int) -> bool:
    """Whether a sampler of numbers is one of the loader's own dataset, and of no other."""
    source = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    return source is None or len(source) == num_indices


def _of_random(sampler: RandomSampler, num_indices: int) -> Order:
    said = [f"{OURS}, {ALWAYS}"]
    if not sampler.replacement and sampler.num_samples == num_indices:
        return None, True, said
    return UniformOrder(num_indices, sampler.num_samples, with_replacement=sampler.replacement), True, said


def _of_weighted(sampler: WeightedRandomSampler, num_indices: int) -> Order:
    weights, count = sampler.weights.detach().cpu().numpy(), sampler.num_samples
    if len(weights) != num_indices:
        raise ValueError(
            f"the WeightedRandomSampler has {len(weights)} weights, and the dataset {num_indices} samples: give one "
            "weight for each sample"
        )
    draws: IndexOrder = (
        WeightedDraws(weights, num_draws=count) if sampler.replacement else WeightedSubset(weights, count)
    )
    return draws, True, [f"the draws are Paceline's, by the plan's seed, {ALWAYS}"]


def _of_distributed(sampler: DistributedSampler[Any], num_indices: int) -> Order:
    said = [f"the DistributedSampler divides nothing, and set_epoch is not needed: workers share each step, {ALWAYS}"]
    if not sampler.shuffle:
        return None, False, said
    return None, True, [*said, *([f"its seed={sampler.seed} is not used: the plan's is"] if sampler.seed else [])]


def _listed(sampler: Any, num_indices: int, seed: int) -> Order:
    """The order of a sampler that is known by its list alone."""
    name = type(sampler).__name__

    def read(seed: int, epoch: int) -> list[int]:
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        with random_state.PreservedRandomState():
            random_state.seed_all(seed, SAMPLER_SEED, epoch)
            return [int(index) for index in sampler]

    if getattr(sampler, "num_replicas", 1) not in (None, 1):
        raise ValueError(
            f"the sampler {name} has num_replicas={sampler.num_replicas}: it gives each worker a part, and a step is "
            "divided among workers here. Make it with num_replicas=1, rank=0"
        )
    if read(seed, 0) != read(seed, 0):
        raise ValueError(
            f"the sampler {name} gives other indices each time it is read, so neither another worker nor a resumed run "
            "could have the same: have it draw from torch's, numpy's or Python's global generator, or from one that "
            "it makes in __iter__ and seeds by set_epoch(epoch)"
        )
    return ListedOrder(read, num_indices, seed=seed, what=f"the sampler {name}"), True, []
