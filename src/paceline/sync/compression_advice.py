"""Whether the plan's wire pays on the actual network: what a step was measured to need, and a verdict.

A codec costs processor time in every step. It saves network time, as far as no computation hides that time. The wire in
use is judged too expensive only if that holds even with no network time hidden. Another wire is recommended only if
what it saves is really waited for.

    link_s(bytes)     network time for so many bytes, by the table of measurements (`comm/algorithm_selection.py`)
    wire in use       costs more than it saves if  encoding_s > link_s(raw) - link_s(sent)
    another wire      saves  min(waited_s, link_s(raw) - link_s(what it would send)) - its encoding time
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from paceline.codec.base import CodecContext, GatherPayload, SumPayload
from paceline.codec.build import build_codec
from paceline.plan import Wire

__all__ = ["StepTimes", "Verdict", "WireCost", "is_known", "judge_wire", "link_seconds", "median_of", "priced"]

LEAST_SAVED = 0.1  # of a step: smaller savings are not reported
ALIKE = 0.1  # of what is saved: of two wires that save about as much, the gentler one is named
RUNS = 3  # of each codec that is timed
TELLING_BYTES = 1 << 20  # a measured sum of this size shows the link's rate;
NEAR = 4.0  # smaller ones are valid up to this multiple of their size

Table = Mapping[int, Mapping[str, float]]  # by bytes and algorithm: seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Times and traffic of one step, or their medians, on one worker."""

    step_s: float
    waited_s: float  # for other replicas
    encoding_s: float  # and decoding
    num_sent: float  # bytes, as `SentBytes` counts them
    num_raw: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WireCost:
    """What a wire would cost: the share of the bytes that it would send, and seconds of encoding for each raw byte."""

    ratio: float
    seconds_per_byte: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`kind` "costs": the wire in use takes more time than it saves. "memory": the same, because memory is shared.

    "pays": `wire`, another one, would save `saved_s`.
    """

    kind: Literal["costs", "memory", "pays"]
    wire: str
    link_s: float  # of the raw bytes of a step; 0.0 where memory is shared
    step_s: float
    encoding_s: float
    saved_s: float  # in a step; negative: lost


def judge_wire(
    measured: StepTimes,
    *,
    wire: str,
    is_exact: bool,
    replicas: int,
    shares_memory: bool,
    table: Table,
    bucket_bytes: int,
    others: Mapping[str, WireCost],
) -> Verdict | None:
    """Return a verdict on the wire in use, named `wire`; None if there is nothing to report.

    `is_exact`: it is raw, or as good as that. `table`: measurements of the network. `others`: wires that the plan could
    use instead, the gentler ones first.
    """
    step_s, encoding_s = measured.step_s, measured.encoding_s
    if replicas < 2 or not measured.num_raw:
        return None
    if shares_memory:
        if is_exact or encoding_s <= 0:
            return None
        return Verdict(kind="memory", wire=wire, link_s=0.0, step_s=step_s, encoding_s=encoding_s, saved_s=-encoding_s)
    if not is_known(table, num_raw=measured.num_raw, replicas=replicas, bucket_bytes=bucket_bytes):
        return None

    def link_s(num_bytes: float) -> float:
        return link_seconds(table, num_bytes, replicas=replicas, num_raw=measured.num_raw, bucket_bytes=bucket_bytes)

    raw_s = link_s(measured.num_raw)
    if not is_exact:
        saved_s = raw_s - link_s(measured.num_sent) - encoding_s
        if saved_s >= 0:
            return None
        return Verdict(kind="costs", wire=wire, link_s=raw_s, step_s=step_s, encoding_s=encoding_s, saved_s=saved_s)
    best: Verdict | None = None
    for name, price in others.items():
        cost_s = price.seconds_per_byte * measured.num_raw
        saved_s = min(measured.waited_s, raw_s - link_s(price.ratio * measured.num_raw)) - cost_s
        if saved_s > LEAST_SAVED * step_s and (best is None or saved_s > (1 + ALIKE) * best.saved_s):
            best = Verdict(kind="pays", wire=name, link_s=raw_s, step_s=step_s, encoding_s=cost_s, saved_s=saved_s)
    return best


def is_known(table: Table, *, num_raw: float, replicas: int, bucket_bytes: int) -> bool:
    """Return whether the table tells the network's time for the raw bytes of a step."""
    largest = min(bucket_bytes, num_raw * replicas / (2 * (replicas - 1)))
    return len(table) > 1 and (max(table) >= TELLING_BYTES or largest <= NEAR * max(table))


def link_seconds(table: Table, num_bytes: float, *, replicas: int, num_raw: float, bucket_bytes: int) -> float:
    """Return the network's time for the bytes that a worker sends in a step, in as many buckets as the raw ones.

    Between the sizes of the table, at least two, it is interpolated; beyond them it is extrapolated from the last two.
    """
    tensor_bytes = num_bytes * replicas / (2 * (replicas - 1))  # of which a sum sends this part
    num_buckets = max(1, -(-int(num_raw * replicas / (2 * (replicas - 1))) // bucket_bytes))
    each = tensor_bytes / num_buckets
    points = sorted((size, min(row.values())) for size, row in table.items())
    (first, first_s), (last, last_s) = points[0], points[-1]
    if each <= first:
        return num_buckets * first_s
    below, below_s = points[-2]
    for (left, left_s), (right, right_s) in itertools.pairwise(points):
        if left <= each <= right:
            return num_buckets * (left_s + (right_s - left_s) * (each - left) / (right - left))
    slope = max(0.0, last_s - below_s) / (last - below)
    return num_buckets * (last_s + slope * (each - last))


def priced(wire: Wire, shapes: Sequence[tuple[int, int]], *, replicas: int) -> WireCost:
    """Time a wire's codec on a bucket of such matrices, as one of `replicas` that all send the same."""
    sizes = [rows * columns for rows, columns in shapes]
    flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
    codec = build_codec(wire, shapes=shapes)
    num_sent, took = 0.0, list[float]()
    for run in range(RUNS):
        num_sent, began = 0.0, time.perf_counter()
        rounds = codec.exchange(flat.clone(), CodecContext(index=0, count=replicas, seed=run))
        try:
            payload = next(rounds)
            while True:
                tensor = payload.tensor
                if isinstance(payload, SumPayload):
                    num_sent += 2 * (replicas - 1) * tensor.nbytes / replicas
                    answer = tensor
                elif isinstance(payload, GatherPayload):
                    num_sent += (replicas - 1) * tensor.nbytes
                    answer = tensor.expand(replicas, -1).contiguous()
                else:
                    num_sent += (replicas - 1) * tensor.nbytes / replicas
                    answer = tensor
                payload = rounds.send(answer)
        except StopIteration:
            codec.settle([True] * len(shapes))
        took.append(time.perf_counter() - began)
    num_raw = 2 * (replicas - 1) * flat.nbytes / replicas
    return WireCost(ratio=num_sent / num_raw, seconds_per_byte=min(took) / num_raw)


def median_of(measured: Sequence[StepTimes]) -> StepTimes:
    """Return the median of each number; raises ValueError for an empty sequence."""
    names = [field.name for field in dataclasses.fields(StepTimes)]
    return StepTimes(**{name: statistics.median(getattr(one, name) for one in measured) for name in names})
