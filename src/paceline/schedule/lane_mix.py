"""Which items of several streams in lanes a step of their mixture has.

Which stream a position takes its item of is a pure function of seed and position (see `source_turns`). Which item that
is follows from how far the stream's lanes have come. What happens where a stream has no item for a position that is its
turn, is the mixture's choice: its epoch ends there, the stream begins its next epoch, or the others go on without it.
That place is the same wherever it is found out, so it is the same on any workers, and after a resume.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.schedule.lane_deal import LaneBlock, LaneEnds, SourceProgress, deal, num_left
from paceline.schedule.sample_order import mix
from paceline.schedule.source_turns import MIXTURE, SourceTurns

__all__ = ["Exhausted", "LaneMix"]

Exhausted = Literal["stop", "repeat", "drop"]
MixedBlocks = tuple[list[tuple[LaneBlock, Sequence[int]]], tuple[SourceProgress, ...]]


class LaneMix:
    """A mixture of streams, by their names, shares and numbers of lanes."""

    def __init__(
        self, names: Sequence[str], shares: Sequence[float], *, exhausted: Exhausted, num_samples: int = 0
    ) -> None:
        """`num_samples`: of an epoch of the mixture, where that is a number (only with "repeat"); 0: it is none."""
        self.names, self.shares = tuple(names), tuple(shares)
        self.exhausted: Exhausted = exhausted
        self.num_samples = num_samples
        self._turns: dict[tuple[int, ...], SourceTurns] = {}

    def order_name(self, num_lanes: Sequence[int], contents: Sequence[str] = ()) -> str:
        """Equal for mixtures whose positions go on from each other's: shares may change in between."""
        told = f"{self.names} {tuple(num_lanes)} {tuple(contents)} {self.exhausted} {self.num_samples}"
        return f"mixture of lanes {zlib.crc32(told.encode()):08x}"

    def begin(
        self, num_lanes: Sequence[int], epoch: int, before: Sequence[SourceProgress] | None
    ) -> tuple[SourceProgress, ...]:
        """How far the streams are at the beginning of an epoch. `before`: at the end of the one before it."""
        if before is None:
            return tuple(SourceProgress(epoch, (0,) * count, first=epoch) for count in num_lanes)
        if self.num_samples:  # an epoch is a number of samples: streams go on where they stand
            return tuple(dataclasses.replace(one, first=one.epoch) for one in before)
        return tuple(dataclasses.replace(_next_epoch(one), first=one.epoch + 1) for one in before)

    def drawn(self, progress: Sequence[SourceProgress]) -> dict[str, int]:
        """How many items of each stream were taken, in all epochs."""
        return {name: one.num_taken for name, one in zip(self.names, progress, strict=True)}

    def deal(
        self, progress: Sequence[SourceProgress], ends: LaneEnds, *, seed: int, epoch: int, start: int, need: int
    ) -> MixedBlocks:
        """Return the blocks of the step of at most `need` items from `start` on, each with the places of its items in
        the step, and how far the streams have come then. At the end of the epoch there are fewer.

        Raises ValueError for a stream that has no item in a whole epoch of its own.
        """
        if self.num_samples:
            need = max(0, min(need, self.num_samples - start))
        blocks: list[tuple[LaneBlock, Sequence[int]]] = []
        reached, place = list(progress), 0
        while place < need:
            active = tuple(number for number, one in enumerate(reached) if not one.is_over)
            if not active:
                break
            turns = self._between(active, seed, epoch, start + place, start + need)
            cut, lacking = self._first_lack(active, reached, ends, turns)
            for source in active:
                places = np.flatnonzero(turns[:cut] == source) + place
                mine, reached[source] = deal(source, reached[source], ends, len(places))
                blocks += _placed(mine, places)
            place += cut
            if lacking is None or not self._goes_on(lacking, reached, ends):
                break
        return blocks, tuple(reached)

    def _between(self, active: tuple[int, ...], seed: int, epoch: int, start: int, stop: int) -> NDArray[Any]:
        """The stream at each of these positions, among those that are left."""
        if active not in self._turns:
            self._turns[active] = SourceTurns([self.shares[number] for number in active])
        shift = epoch * self.num_samples  # where an epoch is no number of samples, it has turns of its own
        own_seed = mix(seed, MIXTURE, *(() if self.num_samples else (epoch,))) >> 1
        found = self._turns[active].between(own_seed, start + shift, stop + shift)
        return np.asarray(active, dtype=np.int64)[found]

    def _first_lack(
        self, active: Sequence[int], reached: Sequence[SourceProgress], ends: LaneEnds, turns: NDArray[Any]
    ) -> tuple[int, int | None]:
        """How many turns can be taken before a stream has no item for its own, and which one that is."""
        cut, lacking = len(turns), None
        for source in active:
            left = num_left(source, reached[source], ends)
            if left is None:
                continue
            wanted = np.flatnonzero(turns == source)
            if len(wanted) > left and wanted[left] < cut:
                cut, lacking = int(wanted[left]), source
        return cut, lacking

    def _goes_on(self, lacking: int, reached: list[SourceProgress], ends: LaneEnds) -> bool:
        """Do what the mixture does where a stream has no item left; returns whether the epoch goes on."""
        one = reached[lacking]
        if not sum(one.counts):
            raise ValueError(
                f"dataset {self.names[lacking]!r} of the mixture is empty: it gave no item in its epoch "
                f"{one.epoch + 1}. Leave it out, or correct its files or its filter"
            )
        if self.exhausted == "stop":
            return False
        if self.exhausted == "drop":
            reached[lacking] = dataclasses.replace(one, is_over=True)
            return True
        others = [other for number, other in enumerate(reached) if number != lacking]
        if not self.num_samples and all(other.epoch > other.first for other in others):
            return False  # each was used up once
        reached[lacking] = _next_epoch(one)
        return True


def _next_epoch(one: SourceProgress) -> SourceProgress:
    return SourceProgress(one.epoch + 1, (0,) * len(one.counts), first=one.first, before=one.num_taken)


def _placed(blocks: Sequence[LaneBlock], places: NDArray[Any]) -> list[tuple[LaneBlock, Sequence[int]]]:
    """Each block with the places of its items, where these are the places of all items together, in order."""
    found: list[tuple[LaneBlock, Sequence[int]]] = []
    first = 0
    for block in blocks:
        found.append((block, places[first : first + block.count].tolist()))
        first += block.count
    return found
