"""Codecs by a one-process driver that stands for all replicas: sums what each yields and hands the sum back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.codec.base import Codec
from paceline.codec.build import build_codec
from paceline.plan import Cast, Raw

WIRES = [Raw(), Cast(dtype="bf16"), Cast(dtype="fp16")]
LARGEST_ERROR = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # half a unit in the last place, relative


def exchanged(codecs: list[Codec], flats: list[Tensor]) -> tuple[list[Tensor], int]:
    """Drive one codec per replica to its end; returns what each holds afterwards, and the bytes that one has sent."""
    running = [codec.exchange(flat) for codec, flat in zip(codecs, flats, strict=True)]
    payloads = [next(rounds) for rounds in running]
    num_bytes = 0
    while True:
        num_bytes += payloads[0].numel() * payloads[0].element_size()
        total = torch.stack([payload.clone() for payload in payloads]).sum(0)
        for payload in payloads:
            payload.copy_(total)  # in place, as all_reduce does
        ended = 0
        for place, rounds in enumerate(running):
            try:
                payloads[place] = rounds.send(payloads[place])
            except StopIteration:
                ended += 1
        if ended:
            assert ended == len(running), "replicas must make the same rounds"
            return flats, num_bytes


@pytest.mark.parametrize("wire", WIRES, ids=str)
@given(num_replicas=st.integers(1, 5), size=st.integers(1, 70), seed=st.integers(0, 1000))
def test_every_replica_ends_with_the_same_sum_within_the_wires_rounding(
    wire: Raw | Cast, num_replicas: int, size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    flats = [torch.randn(size, generator=generator) for _ in range(num_replicas)]
    exact = torch.stack(flats).double().sum(0)
    largest = torch.stack(flats).abs().double().sum(0)
    results, _ = exchanged([build_codec(wire) for _ in flats], [flat.clone() for flat in flats])
    bound = 1e-6 if isinstance(wire, Raw) else LARGEST_ERROR[wire.dtype] * num_replicas
    for result in results:
        assert torch.equal(result, results[0])
        assert bool(((result.double() - exact).abs() <= bound * largest + 1e-9).all())


def test_raw_is_exact_and_casts_halve_the_bytes() -> None:
    flats = [torch.randn(1000) for _ in range(2)]
    sizes = [exchanged([build_codec(wire) for _ in flats], [f.clone() for f in flats])[1] for wire in WIRES]
    assert sizes == [4000, 2000, 2000]


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_an_additive_codec_decodes_the_sum_of_payloads_to_the_sum(wire: Raw | Cast) -> None:
    codec = build_codec(wire)
    assert codec.additive
    assert codec.elementwise
    whole = torch.arange(10.0)
    parts = [whole[:4].clone(), whole[4:].clone()]
    exchanged([build_codec(wire)], [parts[0]])
    exchanged([build_codec(wire)], [parts[1]])
    together = whole.clone()
    exchanged([build_codec(wire)], [together])
    assert torch.equal(torch.cat(parts), together)  # elementwise: a slice is as good as the whole


def test_an_overflow_in_fp16_stays_visible() -> None:
    flats = [torch.tensor([60000.0, 1.0]) for _ in range(2)]
    results, _ = exchanged([build_codec(Cast(dtype="fp16")) for _ in flats], flats)
    assert results[0].tolist() == [float("inf"), 2.0]
