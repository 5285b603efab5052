"""Who holds which tokens: arithmetic, for many lengths and numbers of workers."""

from __future__ import annotations

import itertools

import pytest

from paceline.parallel.context.token_slices import (
    agree,
    folded,
    head_ranges,
    key_heads,
    num_tokens,
    overlaps,
    slice_of,
    slices,
)

SIZES = range(1, 9)
LENGTHS = (1, 2, 7, 8, 12, 17, 64, 101)


def positions(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [place for first, stop in ranges for place in range(first, stop)]


@pytest.mark.parametrize("size", SIZES)
def test_slices_cover_each_section_once_and_differ_by_one_at_most(size: int) -> None:
    for length in LENGTHS:
        held = [slice_of(length, size=size, index=index) for index in range(size)]
        assert positions(tuple(held)) == list(range(length))
        lengths = [stop - first for first, stop in held]
        assert max(lengths) - min(lengths) <= 1
        sections = (length, 3, length)
        everybody = [positions(slices(sections, size=size, index=index)) for index in range(size)]
        assert sorted(itertools.chain(*everybody)) == list(range(sum(sections)))


@pytest.mark.parametrize("size", SIZES)
def test_folded_pieces_cover_all_tokens_and_give_equal_causal_work(size: int) -> None:
    for pieces in (1, 4, 5):
        length = 2 * size * pieces
        held = [positions(folded(length, size=size, index=index)) for index in range(size)]
        assert sorted(itertools.chain(*held)) == list(range(length))
        work = {sum(place + 1 for place in own) for own in held}  # keys that a causal mask shows
        assert len(work) == 1
    odd = [positions(folded(17, size=size, index=index)) for index in range(size)]
    assert sorted(itertools.chain(*odd)) == list(range(17))


def test_meetings_say_where_shared_tokens_are_in_both_lists() -> None:
    held, wanted = ((0, 3), (10, 13)), ((2, 11), (12, 20))
    assert overlaps(held, wanted) == [(2, 0, 1), (3, 8, 1), (5, 9, 1)]
    have, want = positions(held), positions(wanted)
    for place, other, length in overlaps(held, wanted):
        assert have[place : place + length] == want[other : other + length]
    assert overlaps(((0, 4),), ((4, 8),)) == []


def test_views_agree_where_slices_stay_the_same_numbers() -> None:
    assert agree((2, 7, 4), 1, (7,), (14, 4), 0, (7, 7), size=2)
    assert agree((3, 8), 1, (8,), (3, 4, 2), 1, (4,), size=2)
    assert not agree((1, 6), 1, (6,), (1, 3, 2), 1, (3,), size=2)  # 3 tokens and 3; but a pair would be 2 and 4
    assert num_tokens(slices((7, 7), size=2, index=1)) == 8


@pytest.mark.parametrize(("heads", "keys", "size"), [(8, 8, 4), (8, 2, 4), (8, 1, 8), (12, 3, 2), (6, 2, 3)])
def test_each_worker_gets_the_keys_of_its_heads(heads: int, keys: int, size: int) -> None:
    for own, (first, stop) in zip(head_ranges(heads, size=size), key_heads(heads, keys, size=size), strict=True):
        needed = {head * keys // heads for head in range(*own)}
        assert set(range(first, stop)) == needed
