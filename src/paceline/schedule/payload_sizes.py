"""How long the payloads of codecs are: block lengths, bytes of a coded number, what is worth coding at all.

The codecs are built of these numbers and the planner prices by them, so that both change together.
"""

from __future__ import annotations

import math

__all__ = [
    "INT8",
    "ONE_BIT",
    "SCALE_BYTES",
    "TOP_K_BLOCK",
    "TOP_K_BYTES",
    "block_split",
    "coded_bytes",
    "factor_elements",
    "is_factored",
    "top_k_count",
]

INT8, ONE_BIT = (256, 8), (1024, 1)  # numbers of a block, and bits of each
SCALE_BYTES = 4  # of a block, in fp32
LEAST_BLOCKS = 8  # for each replica: of fewer, a second round costs more than it spares
TOP_K_BLOCK = 2**16  # numbers, of each of which the same share is sent
TOP_K_BYTES = 4  # of a number that is sent: 2 for its value in bf16, 2 for its position in the block
WORTH = 4  # a matrix is sent as factors if it shrinks by at least this factor


def block_split(size: int, length: int, replicas: int) -> tuple[int, int] | None:
    """Return how many blocks each replica adds up, and how many there are with empty ones; None: each replica sends
    all of its blocks to all others.
    """
    blocks = -(-size // length)
    if replicas <= 2 or blocks < LEAST_BLOCKS * replicas:
        return None
    each = -(-blocks // replicas)
    return each, each * replicas


def coded_bytes(size: int, length: int, bits: int) -> int:
    """Return the bytes of `size` numbers in blocks, each with its scale; the last block ends with its numbers."""
    blocks = -(-size // length)
    return blocks * (SCALE_BYTES + length * bits // 8) - (blocks * length - size) * bits // 8


def top_k_count(length: int, ratio: float) -> int:
    """Return how many numbers of a block are sent."""
    return min(length, math.ceil(ratio * length))


def is_factored(rows: int, columns: int, rank: int) -> bool:
    """Whether a matrix travels as low-rank factors: it is whole where it would hardly shrink."""
    return WORTH * rank * (rows + columns) // 2 <= rows * columns


def factor_elements(rows: int, columns: int, rank: int) -> float:
    """Return how many numbers of a factored matrix travel in a step: one factor in each, by turns."""
    return rank * (rows + columns) / 2
