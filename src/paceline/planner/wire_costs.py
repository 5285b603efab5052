"""What a wire sends for so many gradients, and what its coding costs the device: bytes, memory traffic, kernels.

Payloads are those of the codecs (`schedule/payload_sizes.py`), bucket by bucket. Coding is counted, too: the bytes that
the operations of each codec read and write for a number, and how many operations there are. A test runs the codecs and
counts them again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from paceline.plan import Cast, Int8, OneBit, PowerSGD, Raw, Sparse, TopK, Wire
from paceline.schedule.payload_sizes import (
    INT8,
    ONE_BIT,
    SCALE_BYTES,
    TOP_K_BLOCK,
    TOP_K_BYTES,
    block_split,
    coded_bytes,
    factor_elements,
    is_factored,
    top_k_count,
)

__all__ = ["FEEDBACK_BYTES", "NUMBER_BYTES", "QR_LAUNCHES", "Coding", "WireTraffic", "coding", "traffic"]

NUMBER_BYTES = 4.0  # gradients are in fp32
FEEDBACK_BYTES = 8.0  # of error feedback, for each number: that of committed steps and that of the current one
FEEDBACK_TRAFFIC, FEEDBACK_LAUNCHES = 32.0, 3.0  # added, copied, subtracted
FACTOR_LAUNCHES, QR_LAUNCHES = 3.0, 20.0  # of a matrix; of its thin orthonormal factor, assumed: column by column

Shape = tuple[int, int, int]  # rows and columns of parameters, as codecs see them, and how many these are


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WireTraffic:
    """Bytes of one replica's payloads in a step: what is summed on the way, what goes from each to all others, and rows
    of which each other replica gets one.
    """

    summed: float = 0.0
    gathered: float = 0.0
    scattered: float = 0.0

    def sent_bytes(self, replicas: int) -> float:
        """Return what a replica sends, as a run counts it in `metrics.jsonl`."""
        away = (replicas - 1) / replicas
        return 2 * away * self.summed + (replicas - 1) * self.gathered + away * self.scattered


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """What encoding and decoding cost the device in a step: bytes of memory traffic, and kernels."""

    moved: float
    launches: float


def traffic(wire: Wire, numbers: float, shapes: Sequence[Shape], *, replicas: int, bucket_bytes: int) -> WireTraffic:
    """Return what travels of so many gradients in fp32. `shapes`: of the parameters that they are a part of; only
    PowerSGD looks at them. Sparse counts as if every row were touched.
    """
    match wire:
        case Raw() | Sparse():
            return WireTraffic(summed=NUMBER_BYTES * numbers)
        case Cast():
            return WireTraffic(summed=NUMBER_BYTES / 2 * numbers)
        case PowerSGD(rank=rank):
            return WireTraffic(summed=NUMBER_BYTES / 2 * numbers * _sent_share(shapes, rank))
        case TopK(ratio=ratio):
            buckets, size = _buckets(numbers, bucket_bytes)
            whole, rest = divmod(size, TOP_K_BLOCK)
            sent = whole * top_k_count(TOP_K_BLOCK, ratio) + top_k_count(rest, ratio)
            return WireTraffic(gathered=buckets * TOP_K_BYTES * sent)
        case Int8() | OneBit():
            buckets, size = _buckets(numbers, bucket_bytes)
            length, bits = INT8 if isinstance(wire, Int8) else ONE_BIT
            shared = block_split(size, length, replicas)
            if shared is None:
                return WireTraffic(gathered=buckets * coded_bytes(size, length, bits))
            each, padded = (blocks * (SCALE_BYTES + length * bits / 8) for blocks in shared)
            return WireTraffic(scattered=buckets * padded, gathered=buckets * each)


def coding(wire: Wire, numbers: float, shapes: Sequence[Shape], *, replicas: int, bucket_bytes: int) -> Coding:
    """Return what coding so many gradients costs, with `replicas` whose payloads are decoded."""
    if isinstance(wire, Raw):
        return Coding(moved=0.0, launches=0.0)
    buckets, size = _buckets(numbers, bucket_bytes)
    moved, launches = _coding_of_bucket(wire, size, replicas)
    if isinstance(wire, PowerSGD):
        total = max(1.0, float(sum(math.prod(shape) for shape in shapes)))
        factored = sum(count for rows, columns, count in shapes if is_factored(rows, columns, wire.rank))
        launches += factored * numbers / total / buckets * (FACTOR_LAUNCHES + QR_LAUNCHES)
    if wire.feedback:
        moved, launches = moved + FEEDBACK_TRAFFIC, launches + FEEDBACK_LAUNCHES
    return Coding(moved=moved * numbers, launches=launches * buckets)


def _coding_of_bucket(wire: Wire, size: int, replicas: int) -> tuple[float, float]:
    """Bytes of memory traffic for each number, and kernels of a bucket; without error feedback."""
    n = replicas
    match wire:
        case Int8():  # own payload; then those of all, or those of a share and its sum
            is_split = block_split(size, INT8[0], n) is not None
            return (141 + 131 / n, 48 + 5 * n) if is_split else (104 + 30 * n, 20 + 7 * n)
        case OneBit():
            is_split = block_split(size, ONE_BIT[0], n) is not None
            return (103 + 83 / n, 66 + 13 * n) if is_split else (68 + 27 * n, 35 + 10 * n)
        case TopK(ratio=ratio):
            return 36 + (178 + 80 * n) * ratio, 14 + 5 * n + 3 * -(-size // TOP_K_BLOCK)
        case PowerSGD():
            return 20.5, 7.0
        case Sparse():
            return 13.0, 10.0  # compared, and added up: of tables
        case Cast() | Raw():
            return 18.0, 3.0


def _buckets(numbers: float, bucket_bytes: int) -> tuple[int, int]:
    """How many buckets there are, and how many numbers each has; all the same, as runs of parameters nearly are."""
    buckets = max(1, round(numbers * NUMBER_BYTES / bucket_bytes))
    return buckets, max(1, round(numbers / buckets))


def _sent_share(shapes: Sequence[Shape], rank: int) -> float:
    """The share of all numbers that travels when matrices are sent as factors."""
    total, sent = 0.0, 0.0
    for rows, columns, count in shapes:
        total += count * rows * columns
        sent += count * (factor_elements(rows, columns, rank) if is_factored(rows, columns, rank) else rows * columns)
    return sent / total if total else 1.0
