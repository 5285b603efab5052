"""Lanes: each item once, whole steps to the end, and the same steps whenever it is found that a lane ends."""

from __future__ import annotations

import random

import pytest

import quick
from paceline.schedule.lane_deal import LaneBlock, SourceProgress, deal

Key = tuple[int, int, int]


def settled(
    lengths: list[int], need: int, known: dict[Key, int], progress: SourceProgress
) -> tuple[tuple[LaneBlock, ...], SourceProgress]:
    """A step, divided again until nobody finds a lane too short: as workers do."""
    while True:
        blocks, after = deal(0, progress, known, need)
        short = {
            (0, 0, block.lane): lengths[block.lane]
            for block in blocks
            if block.first + block.count > lengths[block.lane]
        }
        if not short:
            return blocks, after
        assert not short.keys() & known.keys()
        known.update(short)


def steps_of(lengths: list[int], need: int, *, knows: bool) -> list[tuple[LaneBlock, ...]]:
    known: dict[Key, int] = {(0, 0, lane): length for lane, length in enumerate(lengths)} if knows else {}
    progress, found = SourceProgress.begin(len(lengths)), list[tuple[LaneBlock, ...]]()
    while True:
        blocks, progress = settled(lengths, need, known, progress)
        if not blocks:
            return found
        found.append(blocks)


@pytest.mark.parametrize("seed", quick.some(range(40), step=5))
def test_each_item_comes_once_in_whole_steps_and_later_knowledge_changes_no_step(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 3, draw.randrange(40), 25]) for _ in range(draw.randrange(1, 12))]
    need = draw.randrange(1, 20)
    steps = steps_of(lengths, need, knows=False)
    items = [(b.lane, b.first + one) for step in steps for b in step for one in range(b.count)]
    assert sorted(items) == [(lane, one) for lane, length in enumerate(lengths) for one in range(length)]
    assert all(sum(b.count for b in step) == need for step in steps[:-1])
    assert steps == steps_of(lengths, need, knows=True)


def test_a_step_takes_evenly_from_all_lanes_in_order() -> None:
    blocks, after = deal(2, SourceProgress(3, (5, 5, 5, 5)), {}, 10)
    assert blocks == (
        LaneBlock(2, 3, 0, 5, 3),
        LaneBlock(2, 3, 1, 5, 3),
        LaneBlock(2, 3, 2, 5, 2),
        LaneBlock(2, 3, 3, 5, 2),
    )
    assert after == SourceProgress(3, (8, 8, 7, 7))


def test_what_a_short_lane_lacks_the_others_give() -> None:
    blocks, _ = deal(0, SourceProgress.begin(4), {(0, 0, 1): 1, (0, 0, 2): 0}, 12)
    assert [(b.lane, b.count) for b in blocks] == [(0, 6), (1, 1), (3, 5)]


def test_more_lanes_than_samples_take_turns_when_others_end() -> None:
    steps = steps_of([2, 2, 2, 2, 2], 2, knows=False)
    assert [[b.lane for b in step] for step in steps] == [[0, 1], [0, 1], [2, 3], [2, 3], [4]]
