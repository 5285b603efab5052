"""Whether the wire that a plan has pays on the network that it has: what a step was measured to need, and a verdict.

A codec costs processor time, in every step, and saves time of the network, as far as nobody computes meanwhile. A wire
is judged to cost more than it saves only where that is so even if nothing of the network's time were hidden; another
wire is said to pay only where what it saves is waited for in fact.

    link_s(bytes)   what the network takes for so many bytes, by the table of what was timed
    (`comm/algorithm_selection.py`) wire in use     costs more than it saves:  encoding_s > link_s(raw) - link_s(sent)
    another one     saves  min(waited_s, link_s(raw) - link_s(what it would send)) - what encoding would take
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

LEAST_SAVED = 0.1  # of a step: below, no other wire is worth a word
ALIKE = 0.1  # of what is saved: of two that save about as much the gentler one is named
RUNS = 3  # of each codec that is timed
TELLING_BYTES = 1 << 20  # of sums so large, and larger ones, the link's rate is known;
NEAR = 4.0  # smaller ones tell of no more than so many times their size

Table = Mapping[int, Mapping[str, float]]  # by bytes and algorithm: seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """What steps took and sent, each, on one worker."""

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
    """`kind` "costs": the wire in use takes more time than it saves; "memory": so it does, where memory is shared;
    "pays": `wire`, another one, would save `saved_s`."""

    kind: Literal["costs", "memory", "pays"]
    wire: str
    link_s: float  # of the raw bytes of a step; 0.0 where memory is shared
    step_s: float
    encoding_s: float
    saved_s: float  # in a step; below 0: lost


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
    """Return what there is to be said of the wire in use, named `wire`; None: nothing.

    `is_exact`: it is raw, or as good as that. `table`: what is known of the network. `others`: wires
    that the plan could have instead, the gentler ones first.
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
    """Whether the table says what the network takes for the raw bytes of a step."""
    largest = min(bucket_bytes, num_raw * replicas / (2 * (replicas - 1)))
    return len(table) > 1 and (max(table) >= TELLING_BYTES or largest <= NEAR * max(table))


def link_seconds(table: Table, num_bytes: float, *, replicas: int, num_raw: float, bucket_bytes: int) -> float:
    """Return what the network takes for the bytes that a worker sends in a step, in as many buckets as the raw ones
    are in; between the sizes of the table, two at least, it goes straight, and beyond them as between the last ones."""
    tensor_bytes = num_bytes * replicas / (2 * (replicas - 1))  # of which a sum sends so much
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
    """Time a wire's codec here on a bucket of such matrices, as one of so many replicas who all send the same."""
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
    """Return the median of each number; raises ValueError where there are none."""
    names = [field.name for field in dataclasses.fields(StepTimes)]
    return StepTimes(**{name: statistics.median(getattr(one, name) for one in measured) for name in names})
