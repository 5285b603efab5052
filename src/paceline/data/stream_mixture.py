"""`StreamMixture`: several streams as one, of which each step takes samples in given proportions."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import numpy as np

from paceline.data.lane_sources import as_sharded_stream
from paceline.data.sharded_stream import LaneSource, ShardedStream
from paceline.schedule.lane_mix import Exhausted, LaneMix
from paceline.schedule.sample_order import sample_indices

__all__ = ["StreamMixture"]

MOST_MAP_LANES = 8


class StreamMixture:
    """Streams that are mixed by weight, each cut into lanes of its own.

    `datasets` maps names to streams: whatever `worker.batches` reads in lanes, other iterables, and datasets with
    `len()` and `[]`, which are shuffled in each of their epochs. `weights` are proportions, of any sum; by default all
    are alike. With a `temperature` t above 1 each weight becomes its t-th root.

    Which stream a position takes its sample of depends on seed and position alone: it is the same on any number of
    workers, and after a resume. Shares are exact over each 1,024 samples, to one sample.

    `exhausted` says what happens where a stream has no sample left when it is its turn:

    - "stop": the epoch of the mixture ends there (`first_exhausted` of Hugging Face's `interleave_datasets`);
    - "repeat": the stream begins its next epoch, and the mixture's ends when each was used up once (`all_exhausted`);
    - "drop": the others go on without it, so each sample comes once (`all_exhausted_without_replacement`).

    With `size`, an epoch of the mixture is a number of samples; streams are repeated, and go on where they stand in its
    next epoch.

    Raises TypeError for what can not be read, ValueError for other names in `weights`, for numbers that are not above
    0, for another word in `exhausted`, and for `size` with "stop" or "drop". The loop raises ValueError for a stream
    that turns out to be empty. Pass it to `worker.batches`.

    Example::

        web = paceline.ShardedStream(lambda shard, num_shards: range(shard, 900, num_shards), shards=8)
        mixture = paceline.StreamMixture({"web": web, "code": range(100)}, weights={"web": 3, "code": 1})
        assert mixture.shares == {"web": 0.75, "code": 0.25}
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
        temperature: float = 1.0,
        exhausted: Exhausted | None = None,
        size: int | None = None,
    ) -> None:
        exhausted = exhausted or ("stop" if size is None else "repeat")
        if exhausted not in get_args(Exhausted):
            raise ValueError(f"StreamMixture: exhausted={exhausted!r}: it is one of {', '.join(get_args(Exhausted))}")
        if size is not None and exhausted != "repeat":
            raise ValueError(
                f"StreamMixture: size={size} with exhausted={exhausted!r}: an epoch of {size} samples needs streams "
                "that begin anew. Leave out size, or use exhausted='repeat'"
            )
        self.datasets = dict(datasets)
        if not self.datasets:
            raise ValueError("StreamMixture got no datasets: give at least one")
        given = dict.fromkeys(self.datasets, 1.0) if weights is None else dict(weights)
        if given.keys() != self.datasets.keys():
            raise ValueError(
                f"StreamMixture: weights for {sorted(given)}, and datasets {sorted(self.datasets)}: give one for each"
            )
        numbers = {**given, "temperature": temperature, "size": 1 if size is None else size}
        wrong = [f"{name}={value}" for name, value in numbers.items() if not (math.isfinite(value) and value > 0)]
        if wrong:
            raise ValueError(f"StreamMixture: {', '.join(wrong)}: each must be a finite number above 0")
        roots = {name: given[name] ** (1 / temperature) for name in self.datasets}
        self.shares = {name: root / sum(roots.values()) for name, root in roots.items()}
        self.lanes: tuple[LaneSource, ...] = tuple(_lanes_of(name, one) for name, one in self.datasets.items())
        self.mixing = LaneMix(list(self.shares), list(self.shares.values()), exhausted=exhausted, num_samples=size or 0)


def _lanes_of(name: str, dataset: Any) -> LaneSource:
    """What of a dataset is read in lanes."""
    if isinstance(dataset, StreamMixture) or hasattr(dataset, "__next__"):
        what = "a mixture" if isinstance(dataset, StreamMixture) else "an iterator, which can be read only once"
        raise TypeError(
            f"StreamMixture: {name!r} is {what}: give the datasets themselves, each with the weight that it has in all"
        )
    stream = as_sharded_stream(dataset)
    if stream is not None:
        return stream
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        size = len(dataset)
        if not size:
            raise ValueError(f"StreamMixture: {name!r} is empty: leave it out, or correct its files or its filter")
        stream = ShardedStream(functools.partial(_MapPart, dataset), shards=min(MOST_MAP_LANES, size))
        stream.contents = f"{size} samples"
        return stream
    if not hasattr(dataset, "__iter__"):
        raise TypeError(f"StreamMixture: {name!r} is a {type(dataset).__name__}, which can not be iterated over")
    return ShardedStream(functools.partial(_whole, dataset), shards=1)


def _whole(dataset: Iterable[Any], shard: int, num_shards: int) -> Iterable[Any]:
    return dataset


class _MapPart:
    """A part of a dataset with `len()` and `[]`, shuffled anew in each epoch; its state is how much was given."""

    def __init__(self, dataset: Any, shard: int, num_shards: int) -> None:
        self._dataset, self._shard, self._num_shards = dataset, shard, num_shards
        self._epoch = self._given = 0

    def set_epoch(self, epoch: int) -> None:
        """Which of its orders it has."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        size = len(self._dataset)
        while (position := self._shard + self._given * self._num_shards) < size:
            (index,) = sample_indices(
                seed=0, epoch=self._epoch, num_samples=size, positions=np.asarray([position])
            ).tolist()
            self._given += 1
            yield self._dataset[index]

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"given": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self._given = state["given"]
