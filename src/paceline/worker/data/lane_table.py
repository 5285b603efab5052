"""How far the lanes of a stream have come, at any position of it: their counts, known ends, and states.

States are taken every few steps, and after each exchange all workers know those of all lanes. So any worker can open
any lane, at the cost of the few steps since. The table is part of the stream's position in checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.schedule.lane_deal import LaneBlock, SourceProgress, deal
from paceline.schedule.lane_mix import LaneMix

__all__ = ["LaneKey", "LaneState", "LaneTable", "StepDeal"]

LaneKey = tuple[int, int]  # a source, and a lane of it
LaneState = tuple[int, int, Any]  # an epoch of the source, the items that were taken in it, and the state then
KEPT = 64  # older places that steps of a round, which are not over, may still be read at


@dataclasses.dataclass(frozen=True, slots=True)
class StepDeal:
    """Where the samples of a step come from: blocks of lanes, each with the places in the step that its items have."""

    start: int
    stop: int
    blocks: tuple[tuple[LaneBlock, Sequence[int]], ...]
    after: tuple[SourceProgress, ...]

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A position at which the table is known."""

    epoch: int
    position: int
    progress: tuple[SourceProgress, ...]
    states: Mapping[LaneKey, LaneState]


class LaneTable:
    """The lanes of one stream, from the oldest position that may still be read on."""

    def __init__(self, num_lanes: Sequence[int], *, mixing: LaneMix | None = None, seed: int = 0) -> None:
        """`num_lanes`: of each source of the stream; there is one, unless they are mixed. `seed`: of the mixture."""
        self._num_lanes, self._mixing, self._seed = tuple(num_lanes), mixing, seed
        self.ends: dict[tuple[int, int, int], int] = {}
        self._places = [_Place(0, 0, self._begun(0, None), {})]
        self._reached: _Place | None = None  # the newest step that is settled, so that nothing is divided twice

    def begin_epoch(self, epoch: int, before: tuple[SourceProgress, ...] | None = None) -> None:
        """The stream's next epoch begins. `before`: how far the sources came in the one before it."""
        self._add(_Place(epoch, 0, self._begun(epoch, before), self._kept_states()))

    def states_for(self, epoch: int, position: int) -> Mapping[LaneKey, LaneState]:
        """The states from which lanes are opened that stand at this position."""
        return self._known(epoch, position).states

    def progress_at(self, epoch: int, position: int, size: int) -> tuple[SourceProgress, ...]:
        """How far the sources have come at a position, with steps of this size before it."""
        return self._progress(epoch, position, size)

    def note(
        self, epoch: int, position: int, progress: tuple[SourceProgress, ...], states: Mapping[LaneKey, LaneState]
    ) -> None:
        """The lanes had these states at a position, when the step from it on was read."""
        if (epoch, position) > (self._places[-1].epoch, self._places[-1].position):
            self._add(_Place(epoch, position, progress, {**self._places[-1].states, **states}))

    def reached(self, epoch: int, position: int, size: int) -> None:
        """The step that begins here is settled: all its ends are known."""
        self._reached = _Place(epoch, position, self._progress(epoch, position, size), {})

    def state_dict(self, epoch: int, position: int, size: int) -> dict[str, Any]:
        """For a checkpoint of this position: plain values."""
        progress = self._progress(epoch, position, size)
        epochs = {(source, one.epoch) for source, one in enumerate(progress)}
        return {
            "progress": [[one.epoch, list(one.counts), *self._mixed_fields(one)] for one in progress],
            "states": [[*key, *state] for key, state in self._known(epoch, position).states.items()],
            "ends": [[*key, count] for key, count in self.ends.items() if key[:2] in epochs],
        }

    def _mixed_fields(self, one: SourceProgress) -> list[Any]:
        return [] if self._mixing is None else [one.first, one.before, one.is_over]

    def load_state_dict(self, saved: Mapping[str, Any], *, epoch: int, position: int) -> None:
        """Take over what `state_dict` returned for this position."""
        progress = tuple(SourceProgress(at, tuple(counts), *more) for at, counts, *more in saved["progress"])
        states = {(source, lane): (at, count, state) for source, lane, at, count, state in saved["states"]}
        self.ends = {(source, at, lane): count for source, at, lane, count in saved["ends"]}
        self._places = [_Place(epoch, position, progress, states)]

    def _begun(self, epoch: int, before: tuple[SourceProgress, ...] | None) -> tuple[SourceProgress, ...]:
        """How far the sources are where an epoch begins."""
        if self._mixing is not None:
            return self._mixing.begin(self._num_lanes, epoch, before)
        return tuple(SourceProgress.begin(count, epoch=epoch) for count in self._num_lanes)

    def _kept_states(self) -> Mapping[LaneKey, LaneState]:
        """The states from which lanes go on in the stream's next epoch: of a mixture, whose sources have their own."""
        return self._places[-1].states if self._mixing is not None and self._mixing.num_samples else {}

    def _add(self, place: _Place) -> None:
        self._places = [*self._places[-KEPT:], place]
        if self._mixing is None:
            return
        oldest = [min(one.progress[source].epoch for one in self._places) for source in range(len(self._num_lanes))]
        self.ends = {key: count for key, count in self.ends.items() if key[1] >= oldest[key[0]]}

    def _known(self, epoch: int, position: int) -> _Place:
        """The newest known place at or before a position."""
        for place in reversed(self._places):
            if (place.epoch, place.position) <= (epoch, position):
                return place
        raise RuntimeError(f"the lanes at position {position} of epoch {epoch + 1} are not known any more")

    def _progress(self, epoch: int, position: int, size: int) -> tuple[SourceProgress, ...]:
        place = self._known(epoch, position)
        if place.epoch != epoch:  # an epoch that has not begun here: at its first sample nothing of it is taken
            self.begin_epoch(epoch)
            place = self._places[-1]
        near = self._reached
        if near is not None and near.epoch == epoch and place.position < near.position <= position:
            place = near
        progress, at = place.progress, place.position
        while at < position:
            step = self.deal_from(progress, epoch, at, min(size, position - at))
            progress, at = step.after, step.stop
        return progress

    def deal_from(self, progress: tuple[SourceProgress, ...], epoch: int, start: int, size: int) -> StepDeal:
        """Where the samples of the step of at most `size` from `start` on come from, with this progress before it."""
        if self._mixing is not None:
            mixed, reached = self._mixing.deal(
                progress, self.ends, seed=self._seed, epoch=epoch, start=start, need=size
            )
            return StepDeal(start, start + sum(len(places) for _, places in mixed), tuple(mixed), reached)
        own_blocks, after = deal(0, progress[0], self.ends, size)
        blocks: list[tuple[LaneBlock, Sequence[int]]] = []
        num = 0
        for block in own_blocks:
            blocks.append((block, range(num, num + block.count)))
            num += block.count
        return StepDeal(start, start + num, tuple(blocks), (after,))
