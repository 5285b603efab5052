"""What the planner prices of a wire, beside the codecs themselves: their bytes, their memory traffic, their kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from paceline.codec.base import CodecContext, GatherPayload, Payload, SumPayload
from paceline.codec.build import build_codec
from paceline.plan import Cast, Int8, OneBit, PowerSGD, Raw, TopK, Wire
from paceline.planner.wire_costs import QR_LAUNCHES, coding, traffic

SHAPES = [(1024, 1024), (4096, 256), (1024, 1), (40, 33)]
SIZE = sum(math.prod(shape) for shape in SHAPES)
WIRES = [
    Raw(),
    Cast(dtype="bf16"),
    Cast(dtype="bf16", feedback=True),
    Int8(),
    Int8(feedback=False),
    OneBit(),
    TopK(ratio=0.01),
    TopK(ratio=0.1),
    PowerSGD(rank=4),
]
FREE = {"view", "split", "_unsafe_view", "_reshape_alias", "empty_like", "empty", "new_empty", "expand", "detach"}


class _Counter(TorchDispatchMode):
    """Counts the bytes that operations read and write, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if is_view or name in FREE:
            return result
        read, written = args[1:] if name in ("copy_", "zero_", "fill_") else args, result
        if name.startswith(("index_add", "index_copy")):  # touches as much of its target as it is given
            read, written = args[1:], args[1:]
        elif name.startswith("index"):
            read = result
        self.moved += sum(one.nbytes for one in tree_leaves((read, written)) if isinstance(one, Tensor))
        self.launches += 1
        return result


def answer(payload: Payload, replicas: int) -> Tensor:
    """What a replica is answered where all send the same."""
    tensor = payload.tensor
    return tensor.expand(replicas, -1).contiguous() if isinstance(payload, GatherPayload) else tensor


def sent_by(payload: Payload, replicas: int) -> float:
    if isinstance(payload, SumPayload):
        return 2 * (replicas - 1) / replicas * payload.tensor.nbytes
    return (replicas - 1) * payload.tensor.nbytes / (1 if isinstance(payload, GatherPayload) else replicas)


def steps(wire: Wire, replicas: int, count: int) -> tuple[float, float, float]:
    """The means of so many steps of one bucket, after a first one: bytes sent, bytes moved, kernels."""
    codec, counter, sent = build_codec(wire, shapes=SHAPES), _Counter(), 0.0
    flat = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    for number in range(-1, count):
        mode = counter if number >= 0 else _Counter()
        with mode:
            rounds = codec.exchange(flat.clone(), CodecContext(index=0, count=replicas, seed=1))
            try:
                payload = next(rounds)
                while True:
                    sent += sent_by(payload, replicas) if number >= 0 else 0.0
                    with _disable_current_modes():
                        reply = answer(payload, replicas)
                    payload = rounds.send(reply)
            except StopIteration:
                codec.settle([True] * len(SHAPES))
    copies = count * 2 * 4 * SIZE  # the clone above
    return sent / count, (counter.moved - copies) / count, counter.launches / count - 1


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [2, 4, 16])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_bytes_and_memory_traffic_are_those_of_the_codec(wire: Wire, replicas: int) -> None:
    sent, moved, launches = steps(wire, replicas, 2)
    shapes = [(*shape, 1) for shape in SHAPES]
    found = traffic(wire, SIZE, shapes, replicas=replicas, bucket_bytes=64 << 20)
    assert found.sent_bytes(replicas) == pytest.approx(sent, rel=1e-9)
    coded = coding(wire, SIZE, shapes, replicas=replicas, bucket_bytes=64 << 20)
    assert coded.moved == pytest.approx(moved, rel=0.02)
    if isinstance(wire, PowerSGD):  # qr is one operation of the host, and many kernels
        launches += 3 * (QR_LAUNCHES - 1)
    assert coded.launches == pytest.approx(launches, rel=0.15)


@pytest.mark.parametrize("wire", [Int8(), OneBit(), TopK(ratio=0.01)], ids=str)
def test_many_buckets_send_what_one_does_to_a_percent(wire: Wire) -> None:
    one, many = (traffic(wire, 1e9, [], replicas=8, bucket_bytes=size).sent_bytes(8) for size in (1 << 40, 8 << 20))
    assert many == pytest.approx(one, rel=0.01)


def test_small_buckets_are_not_split_among_replicas() -> None:
    small = traffic(Int8(), 5000, [], replicas=4, bucket_bytes=8 << 20)
    assert small.scattered == 0 < small.gathered
    assert traffic(Int8(), 1e6, [], replicas=4, bucket_bytes=8 << 20).scattered > 0
