"""Which part of a split dim each worker holds, and what a change of shape does to it: arithmetic without tensors.

A dim is split in *sections*: consecutive runs of it, each of which is divided among the workers. One section is the
ordinary case (heads, features, tokens). A fused projection of queries, keys and values has three, so that each worker
holds its heads of all three. A dim merged from (batch, heads) has one section per sample.

Worker k holds the k-th part of every section, one after the other. Parts have equal lengths, rounded up, and the last
one is the rest: 101 tokens among 4 workers are 26, 26, 26 and 23. Where a view turns features into heads, lengths must
divide evenly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from paceline.comm.sharded_tensors import rows_of

__all__ = ["CannotSplit", "Sections", "divided", "num_held", "picked", "ranges", "resolve", "shared_out", "viewed"]

Sections = tuple[int, ...]


class CannotSplit(Exception):
    """An operation cannot run on the parts alone; `str()` says why, `bounds` where else the dim might be split."""

    def __init__(self, why: str, *, bounds: frozenset[tuple[int, int]] = frozenset()) -> None:
        super().__init__(why)
        self.bounds = bounds  # fractions of the dim, (numerator, denominator)


@functools.lru_cache(maxsize=4096)
def ranges(sections: Sections, *, size: int, index: int) -> tuple[tuple[int, int], ...]:
    """Return the half-open ranges of the whole dim that worker `index` of `size` holds, in the order in which it holds
    them."""
    found, start = [], 0
    for length in sections:
        first, stop = rows_of(length, index=index, size=size)
        found.append((start + first, start + stop))
        start += length
    return tuple(found)


def num_held(sections: Sections, *, size: int, index: int) -> int:
    """Return the length of the dim's part on worker `index`; worker 0 has most."""
    return sum(stop - first for first, stop in ranges(sections, size=size, index=index))


def shared_out(length: int, size: int) -> bool:
    """Return whether every worker gets a part of `length`; 5 rows among 4 workers are 2, 2, 1 and 0."""
    first, stop = rows_of(length, index=size - 1, size=size)
    return first < stop


def divided(sections: Sections, size: int) -> bool:
    """Return whether each section divides evenly among `size` workers."""
    return all(length % size == 0 for length in sections)


def resolve(shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return `wanted` with its -1 replaced, for a tensor of `shape`; raises CannotSplit where the sizes do not fit."""
    numel, known = math.prod(shape), math.prod(length for length in wanted if length != -1)
    if -1 not in wanted:
        target = tuple(wanted)
    elif known and numel % known == 0:
        target = tuple(numel // known if length == -1 else length for length in wanted)
    else:
        raise CannotSplit(f"a shape {tuple(shape)} cannot be viewed as {tuple(wanted)}")
    if math.prod(target) != numel:
        raise CannotSplit(f"a shape {tuple(shape)} cannot be viewed as {target}")
    return target


@functools.lru_cache(maxsize=4096)
def viewed(shape: tuple[int, ...], dim: int, sections: Sections, target: tuple[int, ...]) -> tuple[int, Sections]:
    """Return (dim, sections) of the split after `shape`, split at `dim`, is viewed as `target`; raises CannotSplit.

    Dims are matched in groups of equal products. Within its group the split moves to the first dim that is again split
    in sections.
    """
    first, last, begin, end = _group(shape, dim, target)
    before = math.prod(shape[first:dim])
    after = math.prod(shape[dim + 1 : last])
    flat = tuple(length * after for length in sections) * before
    for new in range(begin, end):
        if target[new] == 1 and end - begin > 1:
            continue
        repeats = math.prod(target[begin:new])
        inner = math.prod(target[new + 1 : end])
        if len(flat) % repeats or any(length % inner for length in flat):
            continue
        count = len(flat) // repeats
        parts = tuple(length // inner for length in flat[:count])
        is_same = parts * repeats == tuple(length // inner for length in flat)
        if is_same and sum(parts) == target[new] and not (count > 1 and set(parts) == {1}):
            return new, parts
    raise CannotSplit(f"{shape} viewed as {target} mixes the parts of dim {dim}")


def _group(shape: tuple[int, ...], dim: int, target: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return the smallest runs [first, last) of `shape` around `dim` and [begin, end) of `target` with one product."""
    i = j = 0
    while i < len(shape):
        first, begin = i, j
        left, right = shape[i], target[j] if j < len(target) else 1
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left *= shape[i]
                i += 1
            else:
                right *= target[j]
                j += 1
        if first <= dim < i:
            while j < len(target) and target[j] == 1 and target[j - 1] == 1:
                j += 1
            return first, i, begin, min(j, len(target))
    raise CannotSplit(f"{shape} has no dim {dim}")


def picked(sections: Sections, start: int, length: int) -> tuple[Sections, Sections]:
    """Return (sections before, sections within) of a range of a split dim; raises CannotSplit with the bounds."""
    position, whole = 0, sum(sections)
    for first in range(len(sections) + 1):
        if position == start:
            inside, total = [], 0
            while total < length and first + len(inside) < len(sections):
                inside.append(sections[first + len(inside)])
                total += inside[-1]
            if total == length and inside:
                return sections[:first], tuple(inside)
            break
        position += sections[first] if first < len(sections) else 0
    raise CannotSplit(
        f"it takes {length} of the {whole} that are split, from {start} on",
        bounds=frozenset({(start, whole), (start + length, whole)}),
    )
