"""Every codec, by a one-process driver that stands for all replicas: same bits, bounded errors, nothing lost, bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import quick
from codec_driver import exchanged, telescoped
from gpt_example import demo
from paceline.codec.base import Codec, CodecContext
from paceline.codec.build import build_codec
from paceline.plan import Cast, Int8, OneBit, PowerSGD, Raw, Sparse, TopK, Wire

PLAIN = [Raw(), Cast(dtype="bf16"), Cast(dtype="fp16")]
FED_BACK = [Cast(dtype="bf16", feedback=True), Int8(), OneBit(), TopK(ratio=0.05), PowerSGD(rank=2)]
EVERY = [*PLAIN, *FED_BACK, Int8(feedback=False), Sparse()]
LARGEST_ERROR = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # half a unit in the last place, relative


def built(wire: Wire, *shapes: tuple[int, int], replicas: int = 1) -> list[Codec]:
    return [build_codec(wire, shapes=shapes) for _ in range(replicas)]


def drawn(size: int, *, replicas: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for _ in range(replicas)]


@pytest.mark.parametrize("wire", PLAIN, ids=str)
@given(num_replicas=st.integers(1, 5), size=st.integers(1, 70), seed=st.integers(0, 1000))
def test_every_replica_ends_with_the_same_sum_within_the_wires_rounding(
    wire: Raw | Cast, num_replicas: int, size: int, seed: int
) -> None:
    flats = drawn(size, replicas=num_replicas, seed=seed)
    exact = torch.stack(flats).double().sum(0)
    largest = torch.stack(flats).abs().double().sum(0)
    results, _ = exchanged(built(wire, (size, 1), replicas=num_replicas), [flat.clone() for flat in flats])
    bound = 1e-6 if isinstance(wire, Raw) else LARGEST_ERROR[wire.dtype] * num_replicas
    for result in results:
        assert torch.equal(result, results[0])
        assert bool(((result.double() - exact).abs() <= bound * largest + 1e-9).all())


@pytest.mark.parametrize("wire", FED_BACK, ids=str)
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("shapes", [[(1, 1)], [(1, 1), (8, 8)], [(40, 40), (7, 1), (33, 40)]], ids=str)
def test_what_came_and_what_is_held_back_are_what_was_given(
    wire: Wire, num_replicas: int, shapes: list[tuple[int, int]]
) -> None:
    size = sum(map(math.prod, shapes))
    steps = [drawn(size, replicas=num_replicas, seed=step) for step in range(4)]
    codecs = built(wire, *shapes, replicas=num_replicas)
    given_, came, held = telescoped(codecs, steps, num_parameters=len(shapes))
    # Only the sum itself of what travels in bf16 is rounded behind everybody's back.
    tolerance = 0.1 if isinstance(wire, Cast | PowerSGD) and num_replicas > 1 else 1e-4
    torch.testing.assert_close(came + held, given_, rtol=0.0, atol=tolerance)
    if size >= 600:
        assert float(held.norm()) > 0


@pytest.mark.parametrize("wire", EVERY, ids=str)
@pytest.mark.parametrize("size", quick.some([1, 7, 8, 9, 255, 257, 1023, 1025], step=3))
def test_odd_lengths_and_zeros_come_through(wire: Wire, size: int) -> None:
    results, _ = exchanged(built(wire, (size, 1), replicas=2), [torch.zeros(size) for _ in range(2)])
    assert all(torch.equal(result, torch.zeros(size)) for result in results)
    ones, _ = exchanged(built(wire, (size, 1), replicas=2), [torch.ones(size) for _ in range(2)])
    if not isinstance(wire, TopK):
        torch.testing.assert_close(ones[0], torch.full((size,), 2.0), rtol=1e-2, atol=0.0)
    else:
        assert ones[0].count_nonzero() >= math.ceil(0.05 * size)


@pytest.mark.parametrize("wire", EVERY, ids=str)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_seen_by_all_and_are_not_remembered(wire: Wire, broken: float) -> None:
    codecs = built(wire, (40, 40), (5, 1), replicas=2)
    for place in (3, 1602):
        flats = drawn(1605, replicas=2)
        flats[1][place] = broken
        results, _ = exchanged(codecs, flats)
        assert all(not bool(torch.isfinite(result).all()) for result in results)
        for codec in codecs:
            codec.drop()
    results, _ = exchanged(codecs, drawn(1605, replicas=2))
    assert bool(torch.isfinite(results[0]).all())


@pytest.mark.parametrize("wire", FED_BACK, ids=str)
def test_a_step_that_is_dropped_and_taken_again_gives_the_same_bits(wire: Wire) -> None:
    first, second = drawn(1605, replicas=2, seed=1), drawn(1605, replicas=2, seed=2)
    results: list[Tensor] = []
    for is_disturbed in (False, True):
        codecs = built(wire, (40, 40), (5, 1), replicas=2)
        exchanged(codecs, [flat.clone() for flat in first], seed=5)
        for codec in codecs:
            codec.settle([True, True])
        if is_disturbed:
            exchanged(codecs, drawn(1605, replicas=2, seed=9), seed=6)
            replicas = [CodecContext(index=k, count=2, seed=6 + k) for k in range(2)]
            running = [codecs[k].exchange(second[k].clone(), replicas[k]) for k in range(2)]
            for rounds, codec in zip(running, codecs, strict=True):
                next(rounds)
                rounds.close()  # left in the middle
                codec.drop()
        found, _ = exchanged(codecs, [flat.clone() for flat in second], seed=6)
        for codec in codecs:
            codec.settle([True, True])
        results.append(torch.cat([found[0], *codecs[0].own().values(), *codecs[1].own().values()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("wire", FED_BACK, ids=str)
def test_of_a_parameter_that_nobody_used_all_is_still_held_back(wire: Wire) -> None:
    codecs = built(wire, (40, 40), (30, 30), replicas=2)
    exchanged(codecs, drawn(2500, replicas=2))
    for codec in codecs:
        codec.settle([True, True])
    before = [{place: part.clone() for place, part in codec.own().items()} for codec in codecs]
    starts = {place: dict(named) for place, named in codecs[0].common().items()}
    exchanged(codecs, drawn(2500, replicas=2, seed=1))
    for codec, old in zip(codecs, before, strict=True):
        codec.settle([False, True])
        assert torch.equal(codec.own()[0], old[0])
        assert not torch.equal(codec.own()[1], old[1])
    if starts:
        assert codecs[0].common()[0].keys() == starts[0].keys()
        assert codecs[0].common()[1].keys() != starts[1].keys()


@pytest.mark.parametrize("wire", FED_BACK, ids=str)
def test_a_memory_goes_on_in_another_codec(wire: Wire) -> None:
    codecs = built(wire, (40, 40), (30, 30), replicas=2)
    exchanged(codecs, drawn(2500, replicas=2))
    for codec in codecs:
        codec.settle([True, True])
    others = built(wire, (40, 40), (30, 30), replicas=2)
    for codec, other in zip(codecs, others, strict=True):
        other.fill(codec.own(), codec.common())
    flats = drawn(2500, replicas=2, seed=1)
    first, _ = exchanged(codecs, [flat.clone() for flat in flats], seed=3)
    second, _ = exchanged(others, [flat.clone() for flat in flats], seed=3)
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    ("wire", "most"),
    [
        (Raw(), 1.0),
        (Cast(dtype="bf16"), 0.5),
        (Int8(), 0.27),
        (OneBit(), 1 / 28),
        (TopK(ratio=0.01), 1 / 40),
        (PowerSGD(rank=4), 1 / 50),
    ],
    ids=str,
)
def test_payloads_of_the_demos_matrices_have_so_many_bytes_at_most(wire: Wire, most: float) -> None:
    width = 128
    shapes = [(256, width), *[(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * 4]
    size = sum(map(math.prod, shapes))
    codecs = built(wire, *shapes, replicas=2)
    total = 0
    for seed in range(2):  # factors take turns
        total += exchanged(codecs, drawn(size, replicas=2, seed=seed))[1]
        for codec in codecs:
            codec.settle([True] * len(shapes))
    assert total <= most * 2 * 4 * size


def test_a_codec_that_may_be_given_slices_makes_the_same_of_them_as_of_the_whole() -> None:
    for wire in EVERY:
        codec = build_codec(wire, shapes=[(10, 1)])
        assert codec.elementwise == wire.elementwise
        if not codec.elementwise:
            continue
        whole = torch.arange(10.0).repeat_interleave(2**16)  # slices are multiples of every block
        parts = [whole[: 4 * 2**16].clone(), whole[4 * 2**16 :].clone()]
        for part in parts:
            exchanged(built(wire, (part.numel(), 1)), [part])
        together = whole.clone()
        exchanged(built(wire, (whole.numel(), 1)), [together])
        if not isinstance(wire, Int8):  # which draws other chances
            assert torch.equal(torch.cat(parts), together), wire


def test_an_overflow_in_fp16_stays_visible() -> None:
    flats = [torch.tensor([60000.0, 1.0]) for _ in range(2)]
    results, _ = exchanged(built(Cast(dtype="fp16"), (2, 1), replicas=2), flats)
    assert results[0].tolist() == [float("inf"), 2.0]


@pytest.mark.parametrize("wire", EVERY, ids=str)
def test_gradients_of_other_types_keep_them(wire: Wire) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        flats = [torch.ones(1605, dtype=dtype) for _ in range(2)]
        codecs = [build_codec(wire, shapes=[(40, 40), (5, 1)], dtype=dtype) for _ in flats]
        results, _ = exchanged(codecs, flats)
        assert results[0].dtype == dtype
        assert float(results[0].abs().max()) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(
    ("wire", "most"),
    [(Int8(), 0.27), (OneBit(), 1 / 28), (TopK(ratio=0.01), 1 / 40), (PowerSGD(rank=4), 1 / 50)],
    ids=str,
)
@pytest.mark.parametrize("only_matrices", [True, False])
def test_of_the_demos_gradients_a_wire_sends_no_more_than_is_promised(
    wire: Wire, most: float, only_matrices: bool
) -> None:
    model = demo().GPT()
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(p), p.numel() // len(p)) for p in model.parameters() if p.ndim == 2 or not only_matrices]
    size = sum(map(math.prod, shapes))
    flats = [torch.randn(size, generator=generator) for _ in range(2)]
    _, num_bytes = exchanged([build_codec(wire, shapes=shapes) for _ in range(2)], flats)
    assert 0 < num_bytes <= most * 4 * size
