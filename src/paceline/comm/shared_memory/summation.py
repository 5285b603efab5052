"""The arithmetic of all-reduce in shared memory, and the fingerprints by which members detect mismatched collectives.

Sums are taken in the order of the members, so all members get the same bits. A *fingerprint* is one integer that
describes a collective: its kind, its number of elements, their type, and the segment that holds them. Members compare
fingerprints, as torch.distributed does with TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "AVERAGED",
    "BARRIER",
    "BROADCAST",
    "EXCHANGED",
    "GATHERED",
    "GATHERED_TO_ONE",
    "LAST_PAGE",
    "MAXIMUM",
    "MINIMUM",
    "PRODUCT",
    "REDUCED_TO_ONE",
    "REDUCE_SCATTERED",
    "SCATTERED_FROM_ONE",
    "SUMMED",
    "fingerprint_of",
    "fingerprint_text",
    "is_barrier",
    "ordered_sum",
    "part_bounds",
    "sum_in_place",
]

SUMMED = (  # the position in this tuple is the type's number in a fingerprint
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
AVERAGED = (torch.float32, torch.float64)  # a mean of these is taken on the way
CACHED_BYTES = 512 * 1024  # summed at a time, of all members together: this much stays in a core's own cache

# Bits of a fingerprint: number of elements, then their type, then the origin (a segment's page, or a kind below).
TYPE_SHIFT, ORIGIN_SHIFT = 36, 40
BARRIER, GATHERED, REDUCE_SCATTERED, EXCHANGED = range(2**24 - 1, 2**24 - 5, -1)  # kinds
BROADCAST, GATHERED_TO_ONE, SCATTERED_FROM_ONE, REDUCED_TO_ONE, MINIMUM, MAXIMUM, PRODUCT = range(
    EXCHANGED - 1, EXCHANGED - 8, -1
)
LAST_PAGE = PRODUCT - 1  # segments that begin behind this page share it as their origin
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
    """Return the bounds of a member's part, at multiples of 64 numbers, so no two members write to one cache line."""
    first, last = (numel * place // size // 64 * 64 for place in (index, index + 1))
    return first, numel if index == size - 1 else last


def sum_in_place(parts: Sequence[Tensor], start: int, stop: int, *, divisor: int = 1) -> None:
    """Write the sum of the parts, from `start` to `stop`, divided by `divisor`, into all of them."""
    step = CACHED_BYTES // (len(parts) * parts[0].itemsize)
    shares = [part[start:stop] for part in parts]
    blocks = [shares] if stop - start <= step else zip(*(share.split(step) for share in shares), strict=True)
    for pieces in blocks:
        summed = ordered_sum(pieces, out=pieces[0])
        if divisor != 1:
            summed.div_(divisor)
        for piece in pieces if summed is not pieces[0] else pieces[1:]:
            piece.copy_(summed)


def ordered_sum(parts: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Return the sum in the order of the parts: in `out` if it is given and exact enough, else in a new tensor."""
    if parts[0].dtype in ROUNDED:
        summed = parts[0].float()
    elif out is not None:
        summed = out
    else:
        summed = parts[0].clone()
    for part in parts[1:]:
        summed.add_(part)
    return summed


def fingerprint_of(part: Tensor, *, origin: int) -> int:
    """Return the fingerprint of a collective. `origin`: the page of the segment that holds the numbers, 0 for a staged
    sum, or one of the kinds above."""
    return origin << ORIGIN_SHIFT | SUMMED.index(part.dtype) << TYPE_SHIFT | part.numel()


def is_barrier(fingerprint: int) -> bool:
    return fingerprint >> ORIGIN_SHIFT == BARRIER


def fingerprint_text(fingerprint: int) -> str:
    """Describe a member's collective in words."""
    if is_barrier(fingerprint):
        return "waits in a barrier"
    origin, numel = fingerprint >> ORIGIN_SHIFT, fingerprint & 2**TYPE_SHIFT - 1
    dtype = SUMMED[fingerprint >> TYPE_SHIFT & 2 ** (ORIGIN_SHIFT - TYPE_SHIFT) - 1]
    where = f" (bucket at page {origin})" if origin and origin not in VERBS else ""
    return f"{VERBS.get(origin, 'sums')} {numel:,} numbers of {str(dtype).removeprefix('torch.')}{where}"
