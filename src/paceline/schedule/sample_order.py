"""The order of samples: a pure function of (seed, epoch, position) that needs neither memory nor iteration.

A shuffled epoch is a pseudo-random permutation of 0..n-1. It is made by a Feistel network (Luby & Rackoff, 1988) over
the smallest power of two that holds n, with cycle walking (Black & Rogaway, "Ciphers with Arbitrary Finite Domains",
2002): a value that falls outside 0..n-1 is encrypted again until it falls inside. Each position costs the same,
wherever it lies, so a resume is O(1), and any worker can find any sample of any step by itself.

With weights, each position is a draw of its own, with replacement: the inverse of the weights' cumulative sum, at a
random number that is a hash of seed, epoch and position. That is as pure, and as cheap to begin anywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["IndexOrder", "WeightedDraws", "checksum_of", "mix", "sample_indices", "uniform_numbers"]

UInts = NDArray[np.uint64]
NUM_ROUNDS = 12
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LEAST_BITS = 6  # smaller Feistel halves shuffle poorly; a tiny epoch takes a few more cycles instead


def sample_indices(
    *, seed: int, epoch: int, num_samples: int, positions: NDArray[Any], shuffle: bool = True
) -> NDArray[np.int64]:
    """Return the dataset indices at `positions` (0 <= position < num_samples) of an epoch's order, same shape."""
    places = np.asarray(positions, dtype=np.int64)
    if places.size and not (places.min() >= 0 and places.max() < num_samples):
        raise ValueError(
            f"positions run from {places.min()} to {places.max()}, outside an epoch of {num_samples} samples"
        )
    if not shuffle or num_samples < 2:
        return places.copy()
    bits = max(LEAST_BITS, (num_samples - 1).bit_length())
    keys = [np.uint64(mix(seed, epoch, index)) for index in range(NUM_ROUNDS)]
    flat = _encrypt(places.astype(np.uint64).ravel(), keys, bits)
    outside = np.flatnonzero(flat >= num_samples)
    while outside.size:
        flat[outside] = _encrypt(flat[outside], keys, bits)
        outside = outside[flat[outside] >= num_samples]
    return flat.astype(np.int64).reshape(places.shape)


class IndexOrder(Protocol):
    """An order other than a shuffle: which dataset index is at each position of an epoch. A pure function, so every
    worker finds any sample of any step by itself, and a resume costs the same anywhere."""

    num_samples: int  # positions of an epoch
    num_indices: int  # samples of the dataset
    checksum: str  # equal for equal orders

    @property
    def name(self) -> str:
        """What the order goes by, with its checksum: "weights 1a2b3c4d"."""
        ...

    def indices(self, *, seed: int, epoch: int, positions: NDArray[Any]) -> NDArray[np.int64]:
        """Return the dataset indices at `positions` of an epoch, same shape."""
        ...


class WeightedDraws:
    """Draws of dataset indices with replacement, each with a probability in proportion to its weight."""

    def __init__(self, weights: Sequence[float] | NDArray[Any], *, num_draws: int | None = None) -> None:
        """`num_draws`: those of an epoch; None: as many as weights. Raises ValueError for weights that are not one
        finite number of at least 0 for each sample, or all 0."""
        values = np.asarray(weights, dtype=np.float64)
        if values.ndim != 1:
            raise ValueError(f"weights have the shape {list(values.shape)}; give one number for each sample")
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if wrong.size:
            raise ValueError(
                f"weight {int(wrong[0])} is {values[wrong[0]]}; each must be a finite number of at least 0"
            )
        self._sums = np.cumsum(values)
        if not values.size or not 0 < self._sums[-1] < np.inf:
            raise ValueError("the weights' sum must be more than 0 and finite: no sample could be drawn")
        self._last = int(np.flatnonzero(values)[-1])  # that can be drawn
        self.num_indices = len(values)
        self.num_samples = len(values) if num_draws is None else num_draws
        self.checksum = checksum_of(values)

    @property
    def name(self) -> str:
        return f"weights {self.checksum}"

    def indices(self, *, seed: int, epoch: int, positions: NDArray[Any]) -> NDArray[np.int64]:
        """Return the dataset indices that are drawn at `positions` of an epoch, same shape."""
        parts = uniform_numbers(seed=seed, epoch=epoch, positions=positions)
        found = np.searchsorted(self._sums, parts * self._sums[-1], side="right")
        return np.minimum(found, self._last).astype(np.int64)


def uniform_numbers(*, seed: int, epoch: int, positions: NDArray[Any]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each position of an epoch: a hash of all three."""
    places = np.asarray(positions, dtype=np.int64)
    begin = np.uint64(mix(seed, epoch, NUM_ROUNDS))  # the rounds of shuffles have the numbers below
    with np.errstate(over="ignore"):
        numbers = _scramble(_scramble(places.astype(np.uint64) * GOLDEN + begin) + GOLDEN)
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def checksum_of(values: NDArray[Any]) -> str:
    """A checksum of numbers, the same on any machine."""
    return f"{zlib.crc32(values.astype('<f8').tobytes()):08x}"


def mix(*numbers: int) -> int:
    """Hash integers (of any size and sign) into 64 well-mixed bits: the source of all of Paceline's seeds."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) & 0xFFFFFFFFFFFFFFFF
        state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF  # splitmix64 (Steele, Lea & Flood, OOPSLA 2014)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def _encrypt(values: UInts, keys: list[np.uint64], bits: int) -> UInts:
    """One pass of the network: a bijection of 0..2**bits-1; the halves may differ by one bit."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (_scramble(high + key) & low_mask)
        else:
            high = high ^ (_scramble(low + key) & high_mask)
    return (high << low_bits) | low


def _scramble(values: UInts) -> UInts:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
