"""What is summed in shared memory: of which types, which part by whom, in which order; and the mark of a sum.

Sums are taken in the order of the members, so that all get the same bits; of two members either order gives the same. A
*mark* is one number, by which members see whether all of them sum the same: how many numbers, of which type, and in
which segment they lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "BARRIER",
    "BROADCAST",
    "EXCHANGED",
    "GATHERED",
    "GATHERED_TO_ONE",
    "LAST_PLACE",
    "MAXIMUM",
    "MINIMUM",
    "PRODUCT",
    "REDUCED_TO_ONE",
    "REDUCE_SCATTERED",
    "SCATTERED_FROM_ONE",
    "SUMMED",
    "is_barrier",
    "mark_of",
    "mark_text",
    "ordered_sum",
    "part_bounds",
    "sum_in_place",
]

SUMMED = (  # the place in this row is the type's number in a mark
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
ROUNDED = (torch.float16, torch.bfloat16)  # summed in float32, and rounded once
CACHED_BYTES = 512 * 1024  # summed at a time, of all members together: they stay in a core's own cache

TYPE_SHIFT, PLACE_SHIFT = 36, 40  # of a mark: how many numbers, then their type, then the segment
BARRIER, GATHERED, REDUCE_SCATTERED, EXCHANGED = range(2**24 - 1, 2**24 - 5, -1)  # in place of the segment
BROADCAST, GATHERED_TO_ONE, SCATTERED_FROM_ONE, REDUCED_TO_ONE, MINIMUM, MAXIMUM, PRODUCT = range(
    EXCHANGED - 1, EXCHANGED - 8, -1
)
LAST_PLACE = PRODUCT - 1  # of a segment, in pages; those behind it have the same mark
VERBS = {
    GATHERED: "gathers",
    REDUCE_SCATTERED: "sums and scatters",
    EXCHANGED: "exchanges",
    BROADCAST: "broadcasts",
    GATHERED_TO_ONE: "gathers for one",
    SCATTERED_FROM_ONE: "scatters",
    REDUCED_TO_ONE: "sums for one",
    MINIMUM: "takes the least of",
    MAXIMUM: "takes the largest of",
    PRODUCT: "multiplies",
}


def part_bounds(numel: int, index: int, size: int) -> tuple[int, int]:
    """The bounds of a member's part, at multiples of 64 numbers, so that no cache line belongs to two."""
    first, last = (numel * place // size // 64 * 64 for place in (index, index + 1))
    return first, numel if index == size - 1 else last


def sum_in_place(parts: Sequence[Tensor], start: int, stop: int) -> None:
    """Write the sum of the parts, from `start` to `stop`, into all of them."""
    step = CACHED_BYTES // (len(parts) * parts[0].itemsize)
    shares = [part[start:stop] for part in parts]
    cut = [shares] if stop - start <= step else zip(*(share.split(step) for share in shares), strict=True)
    for pieces in cut:
        summed = ordered_sum(pieces, out=pieces[0])
        for piece in pieces if summed is not pieces[0] else pieces[1:]:
            piece.copy_(summed)


def ordered_sum(parts: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """The sum in the order of the parts: in `out` where given and exact enough, else in a tensor of its own."""
    if parts[0].dtype in ROUNDED:
        summed = parts[0].float()
    elif out is not None:
        summed = out
    else:
        summed = parts[0].clone()
    for part in parts[1:]:
        summed.add_(part)
    return summed


def mark_of(part: Tensor, *, place: int) -> int:
    """The mark of a collective. `place`: the segment that the numbers lie in, 0 where they were copied to be summed, or
    one of the constants above."""
    return place << PLACE_SHIFT | SUMMED.index(part.dtype) << TYPE_SHIFT | part.numel()


def is_barrier(mark: int) -> bool:
    return mark >> PLACE_SHIFT == BARRIER


def mark_text(mark: int) -> str:
    """What a member joined for, in words."""
    if is_barrier(mark):
        return "waits in a barrier"
    place = mark >> PLACE_SHIFT
    numel, kind = mark & 2**TYPE_SHIFT - 1, SUMMED[mark >> TYPE_SHIFT & 2 ** (PLACE_SHIFT - TYPE_SHIFT) - 1]
    where = f" (bucket at page {place})" if place and place not in VERBS else ""
    return f"{VERBS.get(place, 'sums')} {numel:,} numbers of {str(kind).removeprefix('torch.')}{where}"
