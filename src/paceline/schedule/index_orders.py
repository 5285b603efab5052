"""Orders of samples beside the shuffle of all: subsets, several passes, draws, and groups of similar length.

Each is an `IndexOrder`: a pure function of (seed, epoch, position). Those that need the whole epoch at once (draws
without replacement, a sampler's own list) keep the last two epochs, of which a worker reads ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.schedule.micro_batches import micro_batches
from paceline.schedule.sample_order import checksum_of, mix, sample_indices, uniform_numbers

__all__ = ["ListedOrder", "SimilarLengths", "SubsetOrder", "UniformOrder", "WeightedSubset"]

Indices = NDArray[np.int64]
EPOCHS_KEPT = 2  # a worker reads ahead into the next epoch
BLOCK_ORDER = 17  # mixed into the seed of a second permutation, of what the first has put together
MEGABATCH_STEPS = 50  # steps whose samples are sorted together; Hugging Face's trainer has as many


class UniformOrder:
    """Each sample alike: draws with replacement, or passes over the dataset, each in an order of its own."""

    def __init__(self, num_indices: int, num_samples: int, *, with_replacement: bool) -> None:
        self.num_indices, self.num_samples = num_indices, num_samples
        self._draws = with_replacement
        self.checksum = f"{num_samples}-of-{num_indices}"

    @property
    def name(self) -> str:
        return f"{'draws' if self._draws else 'passes'} {self.checksum}"

    def indices(self, *, seed: int, epoch: int, positions: NDArray[Any]) -> Indices:
        """Return the dataset indices at `positions` of an epoch, same shape."""
        if self._draws:
            parts = uniform_numbers(seed=seed, epoch=epoch, positions=positions)
            return np.minimum((parts * self.num_indices).astype(np.int64), self.num_indices - 1)
        passes = -(-self.num_samples // self.num_indices)
        numbers, places = np.divmod(np.asarray(positions, dtype=np.int64), self.num_indices)
        found = np.empty_like(places)
        for number in np.unique(numbers):
            one = numbers == number
            found[one] = sample_indices(
                seed=seed, epoch=epoch * passes + int(number), num_samples=self.num_indices, positions=places[one]
            )
        return found


class SubsetOrder:
    """Some of a dataset's samples, shuffled."""

    def __init__(self, chosen: Sequence[int] | NDArray[Any], num_indices: int) -> None:
        """Raises ValueError for indices outside of the dataset."""
        self._chosen = _as_indices(chosen, num_indices, what="SubsetRandomSampler")
        self.num_indices, self.num_samples = num_indices, len(self._chosen)
        self.checksum = checksum_of(self._chosen)

    @property
    def name(self) -> str:
        return f"subset {self.checksum}"

    def indices(self, *, seed: int, epoch: int, positions: NDArray[Any]) -> Indices:
        """Return the dataset indices at `positions` of an epoch, same shape."""
        return self._chosen[sample_indices(seed=seed, epoch=epoch, num_samples=self.num_samples, positions=positions)]


class WeightedSubset:
    """Draws without replacement, by weights: the order of u ** (1 / w) (Efraimidis & Spirakis, 2006)."""

    def __init__(self, weights: Sequence[float] | NDArray[Any], num_draws: int) -> None:
        """Raises ValueError where fewer samples than `num_draws` have a weight above 0."""
        values = np.asarray(weights, dtype=np.float64)
        if not (np.isfinite(values) & (values >= 0)).all() or int((values > 0).sum()) < num_draws:
            raise ValueError(
                f"{num_draws} draws without replacement, of {int((values > 0).sum())} samples with a finite weight "
                "above 0: draw fewer, or with replacement=True"
            )
        self._weights, self.num_indices, self.num_samples = values, len(values), num_draws
        self.checksum = checksum_of(values)
        self._kept: dict[tuple[int, int], Indices] = {}

    @property
    def name(self) -> str:
        return f"weights without replacement {self.checksum}"

    def indices(self, *, seed: int, epoch: int, positions: NDArray[Any]) -> Indices:
        """Return the dataset indices at `positions` of an epoch, same shape."""
        order = _kept(self._kept, (seed, epoch), lambda: self._order(seed, epoch))
        return order[np.asarray(positions, dtype=np.int64)]

    def _order(self, seed: int, epoch: int) -> Indices:
        numbers = uniform_numbers(seed=seed, epoch=epoch, positions=np.arange(self.num_indices))
        with np.errstate(divide="ignore"):
            keys = np.log1p(-numbers) / self._weights  # of weight 0: minus infinity, and last
        keys[self._weights == 0] = -np.inf
        return np.argsort(-keys, kind="stable")[: self.num_samples].astype(np.int64)


class ListedOrder:
    """A list for each epoch, as a sampler of the user's gives it."""

    def __init__(
        self, read: Callable[[int, int], Sequence[int]], num_indices: int, *, seed: int, what: str = "the sampler"
    ) -> None:
        """`read(seed, epoch)` gives the list; all have as many indices. Raises ValueError for indices outside."""
        self._read, self._what, self.num_indices = read, what, num_indices
        self._kept: dict[tuple[int, int], Indices] = {}
        first = self._order(seed, 0)
        self.num_samples, self.checksum = len(first), checksum_of(first)
        self._kept[seed, 0] = first

    @property
    def name(self) -> str:
        return f"sampler {self.checksum}"

    def indices(self, *, seed: int, epoch: int, positions: NDArray[Any]) -> Indices:
        """Return the dataset indices at `positions` of an epoch, same shape."""
        order = _kept(self._kept, (seed, epoch), lambda: self._order(seed, epoch))
        if len(order) != self.num_samples:
            raise ValueError(
                f"{self._what} gives {len(order)} indices in epoch {epoch + 1}, and gave {self.num_samples} in the "
                "first: have it give as many in each"
            )
        return order[np.asarray(positions, dtype=np.int64)]

    def _order(self, seed: int, epoch: int) -> Indices:
        return _as_indices(self._read(seed, epoch), self.num_indices, what=self._what)


class SimilarLengths:
    """Samples of similar length in one step, and of the most similar ones in one micro-batch, so that padding is
    little. Each sample comes once an epoch.

    A shuffled epoch is cut into megabatches of `steps` steps. In each the samples are sorted by length and cut into
    steps, which then come in a random order, as do the micro-batches of a step: else the first worker would always
    have the longest. What does not fill a step at the end of the epoch is chosen before anything is sorted.
    """

    def __init__(
        self, lengths: Sequence[float] | NDArray[Any], *, batch: int, micro: int, steps: int = MEGABATCH_STEPS
    ) -> None:
        """Raises ValueError for lengths that are not one finite number for each sample."""
        values = np.asarray(lengths, dtype=np.float64)
        if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
            raise ValueError(
                f"lengths have the shape {list(values.shape)}, or are not finite; give one number for each sample"
            )
        self._lengths, self._batch, self._micro, self._size = values, batch, micro, batch * steps
        self.num_indices = self.num_samples = len(values)
        self.checksum = f"{checksum_of(values)}-{batch}-{micro}"
        self._kept: dict[tuple[int, int, int], Indices] = {}

    @property
    def name(self) -> str:
        return f"lengths {self.checksum}"

    def indices(self, *, seed: int, epoch: int, positions: NDArray[Any]) -> Indices:
        """Return the dataset indices at `positions` of an epoch, same shape."""
        places = np.asarray(positions, dtype=np.int64)
        numbers, found = places // self._size, np.empty_like(places)
        for number in map(int, np.unique(numbers)):
            order = _kept(self._kept, (seed, epoch, number), lambda number=number: self._mega(seed, epoch, number))
            found[numbers == number] = order[places[numbers == number] - number * self._size]
        return found

    def _mega(self, seed: int, epoch: int, number: int) -> Indices:
        """The samples of one megabatch, in their order."""
        start, stop = number * self._size, min((number + 1) * self._size, self.num_samples)
        drawn = sample_indices(
            seed=seed, epoch=epoch, num_samples=self.num_samples, positions=np.arange(start, stop), shuffle=True
        )
        num_steps = len(drawn) // self._batch
        whole, rest = np.split(drawn, [num_steps * self._batch])
        steps = list(self._sorted(whole).reshape(num_steps, self._batch)) if num_steps else []
        order = _shuffled(num_steps, mix(seed, BLOCK_ORDER, number), epoch)
        put = [self._in_micros(steps[step], mix(seed, BLOCK_ORDER, number, step), epoch) for step in order]
        if len(rest):
            put.append(self._in_micros(self._sorted(rest), mix(seed, BLOCK_ORDER, number), epoch))
        return np.concatenate(put)

    def _sorted(self, indices: Indices) -> Indices:
        return indices[np.argsort(self._lengths[indices], kind="stable")]

    def _in_micros(self, indices: Indices, seed: int, epoch: int) -> Indices:
        """A step's samples, sorted, with its micro-batches in a random order."""
        sizes = [one.num_samples for one in micro_batches(0, len(indices), self._micro)]
        order = _shuffled(len(sizes), seed, epoch)  # which part of the sorted ones is at a place
        taken = np.empty(len(sizes), dtype=np.int64)  # samples of each part: as many as its place in the step has
        taken[order] = sizes
        starts = np.concatenate([[0], np.cumsum(taken)])
        return np.concatenate([indices[starts[part] : starts[part + 1]] for part in order])


def _shuffled(count: int, seed: int, epoch: int) -> list[int]:
    return sample_indices(seed=seed >> 1, epoch=epoch, num_samples=count, positions=np.arange(count)).tolist()


def _kept(kept: dict[Any, Indices], key: Any, make: Callable[[], Indices]) -> Indices:
    """A value that was made before, or is made now; the oldest of more than two is dropped."""
    if key not in kept:
        while len(kept) >= EPOCHS_KEPT:
            kept.pop(next(iter(kept)))
        kept[key] = make()
    return kept[key]


def _as_indices(given: Sequence[int] | NDArray[Any], num_indices: int, *, what: str) -> Indices:
    found = np.asarray(given, dtype=np.int64)
    if found.ndim != 1 or not len(found):
        raise ValueError(f"{what} gives no list of indices, but the shape {list(found.shape)}: give one index a sample")
    if found.min() < 0 or found.max() >= num_indices:
        wrong = int(found.min() if found.min() < 0 else found.max())
        raise ValueError(f"{what} gives the index {wrong}, and the dataset has {num_indices} samples")
    return found
