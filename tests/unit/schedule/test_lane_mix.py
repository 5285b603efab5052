"""Mixtures of streams: shares by position, and the same steps whenever it is found that a stream ends."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest

import quick
from paceline.schedule.lane_deal import SourceProgress
from paceline.schedule.lane_mix import Exhausted, LaneMix
from paceline.schedule.source_turns import SourceTurns

Item = tuple[int, int, int, int]  # source, its epoch, lane, number
SEED = 7


class TakenSteps:
    """Takes steps of a mixture as workers do: divides a step again until nobody finds a lane too short."""

    def __init__(self, mixing: LaneMix, lengths: list[list[int]], *, knows: bool = False, epochs: int = 40) -> None:
        self.mixing, self.lengths = mixing, lengths
        self.num_lanes = [len(lanes) for lanes in lengths]
        self.ends = {
            (source, epoch, lane): length
            for source, lanes in enumerate(lengths)
            for lane, length in enumerate(lanes)
            for epoch in range(epochs if knows else 0)
        }
        self.progress = mixing.begin(self.num_lanes, 0, None)

    def step(self, epoch: int, start: int, need: int) -> list[Item]:
        while True:
            blocks, after = self.mixing.deal(self.progress, self.ends, seed=SEED, epoch=epoch, start=start, need=need)
            short = {
                (block.source, block.epoch, block.lane): self.lengths[block.source][block.lane]
                for block, _ in blocks
                if block.first + block.count > self.lengths[block.source][block.lane]
            }
            if not short:
                break
            assert not short.keys() & self.ends.keys()
            self.ends.update(short)
        self.progress = after
        found: dict[int, Item] = {}
        for block, places in blocks:
            for number, place in enumerate(places):
                found[place] = block.source, block.epoch, block.lane, block.first + number
        assert sorted(found) == list(range(len(found))), "each place of the step has one item"
        return [found[place] for place in range(len(found))]

    def epoch(self, epoch: int, need: int, *, most: int = 10_000) -> list[Item]:
        items: list[Item] = []
        while len(items) < most:
            step = self.step(epoch, len(items), need)
            items += step
            if not step:
                break
        self.progress = self.mixing.begin(self.num_lanes, epoch + 1, self.progress)
        return items


def mixed(exhausted: Exhausted, *shares: float, size: int = 0) -> LaneMix:
    return LaneMix([f"s{number}" for number in range(len(shares))], shares, exhausted=exhausted, num_samples=size)


@pytest.mark.parametrize("exhausted", ["stop", "repeat", "drop", "size"])
@pytest.mark.parametrize("seed", quick.some(range(8), step=4))
def test_what_is_known_of_ends_and_the_size_of_steps_change_no_position(seed: int, exhausted: str) -> None:
    draw = random.Random(seed)
    lengths = [
        [draw.choice([0, 3, draw.randrange(30)]) for _ in range(draw.randrange(1, 6))] + [draw.randrange(1, 9)]
        for _ in range(3)
    ]
    size = 150 if exhausted == "size" else 0
    way: Any = "repeat" if size else exhausted
    mixing = mixed(way, 3, 1, 2, size=size)
    takers = [TakenSteps(mixing, lengths, knows=knows) for knows in (False, True, False)]
    for epoch in (0, 1):
        alone, known, _ = (taker.epoch(epoch, need) for taker, need in zip(takers, (7, 7, 7), strict=True))
        assert alone == known
    one_by_one = TakenSteps(mixing, lengths)
    sources = [[item[0] for item in one_by_one.epoch(epoch, need)] for epoch, need in ((0, 1), (1, 13))]
    again = TakenSteps(mixing, lengths)
    assert sources == [[item[0] for item in again.epoch(epoch, 7)] for epoch in (0, 1)], (
        "the batch size changes nothing"
    )


def test_stop_ends_where_the_first_stream_has_no_sample_for_its_turn() -> None:
    taker = TakenSteps(mixed("stop", 1, 1), [[1000], [10, 10]])
    counts = collections.Counter(item[0] for item in taker.epoch(0, 8))
    assert counts[1] == 20 and 0 < counts[0] < 60
    again = taker.epoch(1, 8)
    assert {item[1] for item in again} == {1} and sorted(
        item[3] for item in again if item[0] == 1 and item[2] == 0
    ) == [*range(10)]


def test_drop_gives_each_sample_once_and_the_others_keep_their_proportions() -> None:
    taker = TakenSteps(mixed("drop", 4, 2, 1), [[500, 500], [40], [300]])
    items = taker.epoch(0, 16)
    assert len(items) == len(set(items)) == 1340
    sources = [item[0] for item in items]
    last = max(place for place, source in enumerate(sources) if source == 1)
    after = collections.Counter(sources[last + 30 : last + 430])
    assert after[1] == 0 and after[0] / after[2] == pytest.approx(4, rel=0.15)


def test_repeat_ends_when_each_was_used_up_and_counts_epochs_of_its_own() -> None:
    taker = TakenSteps(mixed("repeat", 1, 1), [[60], [7]])
    items = taker.epoch(0, 8)
    seen = collections.Counter((item[0], item[1]) for item in items)
    assert seen[0, 0] == 60 and seen[1, 0] == 7 and max(epoch for source, epoch in seen if source == 1) > 3
    assert not [1 for source, epoch in seen if source == 0 and epoch > 0]
    assert min(item[1] for item in taker.epoch(1, 8) if item[0] == 0) == 1


def test_a_size_is_an_epoch_and_streams_go_on_in_the_next_one() -> None:
    taker = TakenSteps(mixed("repeat", 3, 1, size=1000), [[400, 400], [30]])
    epochs = [taker.epoch(epoch, 64) for epoch in range(4)]
    assert [len(one) for one in epochs] == [1000] * 4
    items = [item for one in epochs for item in one]
    assert len(set(items)) == 4000, "no sample comes twice in an epoch of its stream"
    counts = collections.Counter(item[0] for item in items[: 3 * 1024])
    assert counts == {0: 3 * 768, 1: 3 * 256}
    drawn = collections.Counter(item[0] for item in items)
    assert taker.mixing.drawn(taker.progress) == {"s0": drawn[0], "s1": drawn[1]}


def test_an_empty_stream_is_named() -> None:
    with pytest.raises(ValueError, match="dataset 's1' of the mixture is empty"):
        TakenSteps(mixed("repeat", 1, 1), [[50], [0, 0]]).epoch(0, 8)


def test_turns_are_the_same_from_any_position() -> None:
    turns = SourceTurns([0.7, 0.2, 0.1])
    whole = turns.between(SEED, 0, 5000)
    for start, stop in ((0, 1), (1023, 1025), (1024, 1024), (2000, 4999)):
        assert turns.between(SEED, start, stop).tolist() == whole[start:stop].tolist()
    assert np.abs(np.bincount(whole[:4096]) - 4096 * np.array([0.7, 0.2, 0.1])).max() <= 1


def test_progress_counts_over_epochs() -> None:
    assert SourceProgress(3, (4, 5), before=30).num_taken == 39
