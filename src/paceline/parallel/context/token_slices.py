"""Which tokens each worker holds: arithmetic without tensors.

A dim of `length` tokens is split into consecutive slices whose lengths differ by one at most, so any length will do. A
dim that was merged from (batch, tokens) has one *section* per sample, each split by itself. A worker holds its slice of
every section, one after the other. A *range* is half-open: (first, stop).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

__all__ = [
    "Range",
    "Ranges",
    "agree",
    "folded",
    "head_ranges",
    "key_heads",
    "num_tokens",
    "overlaps",
    "slice_of",
    "slices",
]

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def slice_of(length: int, *, size: int, index: int) -> Range:
    """Return what worker `index` of `size` holds of `length` tokens."""
    return length * index // size, length * (index + 1) // size


@functools.lru_cache(maxsize=4096)
def slices(sections: tuple[int, ...], *, size: int, index: int) -> Ranges:
    """Return what a worker holds of a dim in sections, in the order in which it holds them."""
    found, start = [], 0
    for length in sections:
        first, stop = slice_of(length, size=size, index=index)
        found.append((start + first, start + stop))
        start += length
    return tuple(found)


def num_tokens(ranges: Sequence[Range]) -> int:
    """Return the length of some ranges together."""
    return sum(stop - first for first, stop in ranges)


def folded(length: int, *, size: int, index: int) -> Ranges:
    """Return a piece from the front and its mirror image from the back, so that all workers have equal causal work.

    This is the zig-zag of Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2): of 2 n
    pieces worker k gets number k and number 2 n - 1 - k.
    """
    pieces = 2 * size
    return (
        slice_of(length, size=pieces, index=index),
        slice_of(length, size=pieces, index=pieces - 1 - index),
    )


def overlaps(held: Sequence[Range], wanted: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Return which tokens are in both lists of ranges: (place in what is held, place in what is wanted, length).

    Places count tokens in the order of each list. Overlaps are listed in the order of what is wanted.
    """
    found: list[tuple[int, int, int]] = []
    at_wanted = 0
    for first, stop in wanted:
        at_held = 0
        for begin, end in held:
            low, high = max(first, begin), min(stop, end)
            if low < high:
                found.append((at_held + low - begin, at_wanted + low - first, high - low))
            at_held += end - begin
        at_wanted += stop - first
    return found


def agree(
    shape: tuple[int, ...],
    dim: int,
    sections: tuple[int, ...],
    new_shape: tuple[int, ...],
    new_dim: int,
    new_sections: tuple[int, ...],
    *,
    size: int,
) -> bool:
    """Return whether slices of a tensor's dim are the same numbers as slices of a dim of another view of it."""
    if all(length % size == 0 for length in (*sections, *new_sections)):
        return True
    return all(
        _flat(shape, dim, slices(sections, size=size, index=index))
        == _flat(new_shape, new_dim, slices(new_sections, size=size, index=index))
        for index in range(size)
    )


def _flat(shape: tuple[int, ...], dim: int, ranges: Ranges) -> list[Range]:
    """Return ranges of the flattened tensor, with adjacent ones joined."""
    after = math.prod(shape[dim + 1 :])
    found: list[Range] = []
    for number in range(math.prod(shape[:dim])):
        start = number * shape[dim] * after
        for first, stop in ranges:
            one = (start + first * after, start + stop * after)
            if found and found[-1][1] == one[0]:
                one = (found.pop()[0], one[1])
            found.append(one)
    return found


def head_ranges(num_heads: int, *, size: int) -> Ranges:
    """Return each worker's heads."""
    return tuple(slice_of(num_heads, size=size, index=index) for index in range(size))


def key_heads(num_heads: int, num_key_heads: int, *, size: int) -> Ranges:
    """Return the heads of keys that each worker's heads of queries need; several workers may need the same."""
    group = num_heads // num_key_heads
    return tuple((first // group, -(-stop // group)) for first, stop in head_ranges(num_heads, size=size))
