"""Digests of parts of a tensor, whose sum is the digest of the whole: the same whichever workers hold which part.

A tensor is a matrix m of words, its first dim by all others. Its digest is the bilinear hash sum r_i c_j m_ij mod 2^64,
with odd 64-bit keys for rows and columns that depend on their indices in the whole tensor alone. So a part needs its
offsets and nothing of the other parts. A change of one word always changes the digest: an odd factor times a difference
below 2^32 is not 0 mod 2^64. As the digests of `paceline.worker.health.weight_digest`, these detect accidents, not
malice; those are faster, and need whole tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

__all__ = ["MASK", "part_digest"]

MASK = (1 << 64) - 1
WORDS = {"cpu": 1 << 16, "cuda": 1 << 24}  # multiplied at once: they fit a core's own cache; on a GPU keep it busy
MOST_ROWS = 1 << 16  # of which keys are made at once: codes of 4 bits are one long column
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes of an element


@torch.no_grad()
def part_digest(part: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Return the digest of a block of numbers at `offsets` of a tensor of `shape`, from 0 to 2^64 - 1.

    The digests of blocks that cover a tensor without overlap add up to the tensor's, mod 2^64. Waits for the device.
    """
    words, (row, *columns) = _matrix(part), _matrix_offsets(part, shape, offsets)
    if not words.numel():
        return 0
    column_keys = functools.reduce(
        lambda keys, one: numpy.multiply.outer(keys, one).reshape(-1),
        (_keys(dim, first, size) for dim, (first, size) in enumerate(columns, 1)),
        numpy.ones(1, numpy.uint64),
    )
    at_once = max(1, WORDS.get(words.device.type, 1 << 20) // words.shape[1])
    factors, found = _on(column_keys, words.device), 0
    for rows in words.split(MOST_ROWS):
        sums = [(block.to(torch.int64) * factors).sum(dim=1) for block in rows.split(at_once)]
        found += int((torch.cat(sums) * _on(_keys(0, row, rows.shape[0]), words.device)).sum())
        row += rows.shape[0]
    return found & MASK


def _matrix(part: Tensor) -> Tensor:
    """The words of a block, its first dim by the others; of what has one dim, a row."""
    local = part.detach().contiguous()
    rows = local.shape[0] if local.dim() > 1 else 1
    flat = local.reshape(rows, -1) if local.numel() else local.new_empty(0, 1)
    return flat.view(INTEGERS.get(flat.element_size(), torch.int32))


def _matrix_offsets(
    part: Tensor, shape: Sequence[int], offsets: Sequence[int]
) -> tuple[int, *tuple[tuple[int, int], ...]]:
    """The first row, and of each further dim the first index and their number; of elements of several words, the last
    dim counts words."""
    words = max(1, part.element_size() // 4)
    if len(shape) < 2:
        return 0, (offsets[0] * words if offsets else 0, part.numel() * words)
    dims = list(zip(offsets[1:], part.shape[1:], strict=True))
    last, size = dims.pop()
    return offsets[0], *dims, (last * words, size * words)


@functools.lru_cache(maxsize=64)
def _keys(dim: int, first: int, count: int) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint64]]:
    """The odd keys of indices of a dim: splitmix64 (Steele, Lea & Flood, 2014) of dim and index."""
    with numpy.errstate(over="ignore"):
        mixed = numpy.arange(first, first + count, dtype=numpy.uint64) + numpy.uint64((dim + 1) << 48)
        mixed *= numpy.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> numpy.uint64(shift))) * numpy.uint64(factor)
        mixed ^= mixed >> numpy.uint64(31)
    return mixed | numpy.uint64(1)


def _on(keys: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint64]], device: torch.device) -> Tensor:
    return torch.from_numpy(keys.view(numpy.int64)).to(device)
