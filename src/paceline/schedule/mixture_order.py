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
from paceline.schedule.source_turns import BLOCK, MIXTURE, SourceTurns

__all__ = ["MixtureOrder"]

Indices = NDArray[np.int64]


class MixtureOrder:
    """Positions of a mixture, as indices into its datasets one behind the other."""

    def __init__(self, sizes: Mapping[str, int], shares: Mapping[str, float], *, num_samples: int) -> None:
        """`sizes` and `shares` by the datasets' names. `num_samples`: of an epoch of the mixture."""
        self.names, self.num_samples = tuple(sizes), num_samples
        self.num_indices = sum(sizes.values())
        self._sizes = [sizes[name] for name in self.names]
        self._offsets = [0, *np.cumsum(self._sizes).tolist()]
        self.shares = dict(shares)
        self._turns = SourceTurns([shares[name] for name in self.names])
        told = ",".join(f"{name}={shares[name]:.6g}/{size}" for name, size in sizes.items())
        self.checksum = f"{zlib.crc32(f'{told} {num_samples}'.encode()):08x}"

    @property
    def name(self) -> str:
        return f"mixture {self.checksum}"

    def counts_before(self, position: int) -> list[int]:
        """How many samples of each dataset come before a position that is a whole number of blocks."""
        return self._turns.counts_before(position)

    def drawn_before(self, *, seed: int, epoch: int, position: int) -> dict[str, int]:
        """How many samples of each dataset come before any position of an epoch, in all epochs."""
        number, rest = divmod(position + epoch * self.num_samples, BLOCK)
        sources = self._turns.block(mix(seed, MIXTURE) >> 1, number)[:rest]
        counts = np.array(self.counts_before(number * BLOCK)) + np.bincount(sources, minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))

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
        sources = self._turns.block(mix(seed, MIXTURE) >> 1, number)
        ranks = np.empty_like(sources)
        for source, count in enumerate(self.counts_before(number * BLOCK)):
            chosen = sources == source
            ranks[chosen] = count + np.arange(int(chosen.sum()))
        return sources, ranks
