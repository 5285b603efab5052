"""Which dataset of a mixture each position takes its sample of: a pure function of seed and position.

Positions come in blocks. In each block a dataset has its share of the positions, to one sample, and what rounding
leaves is made up for in later blocks. The places within a block are shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.schedule.sample_order import sample_indices

__all__ = ["BLOCK", "MIXTURE", "SourceTurns"]

BLOCK = 1024  # positions over which shares are exact
SCALE = 1 << 40  # shares are whole numbers of this, so that all machines round alike
MIXTURE = 23  # mixed into the seed, beside the datasets' own numbers

Indices = NDArray[np.int64]


class SourceTurns:
    """The turns of datasets with these shares, which need not add up to 1."""

    def __init__(self, shares: Sequence[float]) -> None:
        bounds = np.cumsum(shares)
        self._bounds = [round(float(bound) / float(bounds[-1]) * SCALE) for bound in bounds]
        self._newest: tuple[int, int, Indices] | None = None  # seed, number and turns of a block

    def counts_before(self, position: int) -> list[int]:
        """How many samples of each dataset come before a position that is a whole number of blocks."""
        reached = [position * bound // SCALE for bound in self._bounds]
        return [stop - start for start, stop in zip([0, *reached], reached, strict=False)]

    def block(self, seed: int, number: int) -> Indices:
        """The dataset at each place of a block."""
        if self._newest is not None and self._newest[:2] == (seed, number):
            return self._newest[2]
        before, after = self.counts_before(number * BLOCK), self.counts_before((number + 1) * BLOCK)
        shares = [stop - start for start, stop in zip(before, after, strict=True)]
        order = sample_indices(seed=seed, epoch=number, num_samples=BLOCK, positions=np.arange(BLOCK))
        turns = np.repeat(np.arange(len(shares)), shares)[order].astype(np.int64)
        self._newest = seed, number, turns
        return turns

    def between(self, seed: int, start: int, stop: int) -> Indices:
        """The datasets at positions [start, stop)."""
        numbers = range(start // BLOCK, -(-stop // BLOCK))
        parts = [self.block(seed, number)[max(0, start - number * BLOCK) : stop - number * BLOCK] for number in numbers]
        empty: NDArray[Any] = np.empty(0, np.int64)
        return np.concatenate([empty, *parts]).astype(np.int64)
