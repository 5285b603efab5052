"""The order of a mixture of datasets: which one each position takes a sample of, and which sample of it.

Positions are counted over all epochs of the mixture, in blocks. In each block a dataset has its share of the positions,
to one sample, and what rounding leaves is made up for in later blocks. The places within a block are shuffled. So how
many samples of a dataset came before a position is known without looking at those positions. Each dataset goes through
epochs of its own, each a shuffle of all its samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.schedule.sample_order import mix, sample_indices

__all__ = ["MixtureOrder"]

BLOCK = 1024  # positions over which shares are exact
SCALE = 1 << 40  # shares are whole numbers of this, so that all machines round alike
MIXTURE = 23  # mixed into the seed, beside the datasets' own numbers

Indices = NDArray[np.int64]


class MixtureOrder:
    """Positions of a mixture, as indices into its datasets one behind the other."""

    def __init__(self, sizes: Mapping[str, int], shares: Mapping[str, float], *, num_samples: int) -> None:
        """`sizes` and `shares` by the datasets' names. `num_samples`: of an epoch of the mixture."""
        self.names, self.num_samples = tuple(sizes), num_samples
        self.num_indices = sum(sizes.values())
        self._sizes = [sizes[name] for name in self.names]
        self._offsets = [0, *np.cumsum(self._sizes).tolist()]
        bounds = np.cumsum([shares[name] for name in self.names])
        self._bounds = [round(float(bound) / float(bounds[-1]) * SCALE) for bound in bounds]
        told = ",".join(f"{name}={shares[name]:.6g}/{size}" for name, size in sizes.items())
        self.checksum = f"{zlib.crc32(f'{told} {num_samples}'.encode()):08x}"

    @property
    def name(self) -> str:
        return f"mixture {self.checksum}"

    def counts_before(self, position: int) -> list[int]:
        """How many samples of each dataset come before a position that is a whole number of blocks."""
        reached = [position * bound // SCALE for bound in self._bounds]
        return [stop - start for start, stop in zip([0, *reached], reached, strict=False)]

    def sources(self, *, seed: int, epoch: int, positions: NDArray[Any]) -> tuple[Indices, Indices]:
        """Return the number of the dataset at each position of an epoch, and how many of its samples came before."""
        places = np.asarray(positions, dtype=np.int64) + epoch * self.num_samples
        numbers, sources, ranks = places // BLOCK, np.empty_like(places), np.empty_like(places)
        for number in map(int, np.unique(numbers)):
            chosen = numbers == number
            of_block, ranks_of_block = self._block(seed, number)
            sources[chosen] = of_block[places[chosen] - number * BLOCK]
            ranks[chosen] = ranks_of_block[places[chosen] - number * BLOCK]
        return sources, ranks

    def indices(self, *, seed: int, epoch: int, positions: NDArray[Any]) -> Indices:
        """Return the indices at `positions` of an epoch, same shape."""
        sources, ranks = self.sources(seed=seed, epoch=epoch, positions=positions)
        found = np.empty_like(sources)
        for source in map(int, np.unique(sources)):
            size, chosen = self._sizes[source], sources == source
            epochs, places = np.divmod(ranks[chosen], size)
            drawn = np.empty_like(places)
            for one in map(int, np.unique(epochs)):
                drawn[epochs == one] = sample_indices(
                    seed=mix(seed, MIXTURE, source) >> 1, epoch=one, num_samples=size, positions=places[epochs == one]
                )
            found[chosen] = drawn + self._offsets[source]
        return found

    def _block(self, seed: int, number: int) -> tuple[Indices, Indices]:
        """The dataset at each place of a block, and how many of its samples came before."""
        before = self.counts_before(number * BLOCK)
        after = self.counts_before((number + 1) * BLOCK)
        shares = [stop - start for start, stop in zip(before, after, strict=True)]
        slots = np.repeat(np.arange(len(shares)), shares)
        order = sample_indices(
            seed=mix(seed, MIXTURE) >> 1, epoch=number, num_samples=BLOCK, positions=np.arange(BLOCK)
        )
        sources = slots[order].astype(np.int64)
        ranks = np.empty_like(sources)
        for source, count in enumerate(before):
            chosen = sources == source
            ranks[chosen] = count + np.arange(int(chosen.sum()))
        return sources, ranks
