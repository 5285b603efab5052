"""Each lossy codec against a reference of a few lines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from codec_driver import exchanged
from paceline.codec.error_feedback import ErrorFeedback
from paceline.codec.int8 import Int8Codec
from paceline.codec.onebit import OneBitCodec, bits_of, signs_in
from paceline.codec.powersgd import PowerSGDCodec
from paceline.codec.sparse import SparseCodec
from paceline.codec.topk import TopKCodec


def drawn(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [8, 16, 24, 800])
def test_bits_are_packed_as_numpy_packs_them_and_come_back(size: int) -> None:
    positive = drawn(size, size) > 0
    packed = bits_of(positive)
    assert packed.tolist() == np.packbits(positive.numpy(), bitorder="little").tolist()
    assert torch.equal(signs_in(packed) > 0, positive)


def test_int8_rounds_to_the_level_below_or_above_and_is_right_on_average() -> None:
    flat = drawn(300, 1)
    blocks = [flat[:256], flat[256:]]
    levels = [block / (block.abs().max() / 127) for block in blocks]
    mean, draws = torch.zeros(300), 400
    for seed in range(draws):
        found = exchanged([Int8Codec()], [flat.clone()], seed=seed)[0][0]
        mean += found / draws
        for block, level, part in zip(blocks, levels, found.split([256, 44]), strict=True):
            sent = part / (block.abs().max() / 127)
            torch.testing.assert_close(sent, sent.round(), rtol=0.0, atol=1e-4)
            assert bool(((sent - level).abs() < 1.0 + 1e-4).all())
    step = float(flat.abs().max()) / 127
    assert float((mean - flat).abs().max()) < 4.5 * step / 2 / draws**0.5
    again = exchanged([Int8Codec()], [flat.clone()], seed=7)[0][0]
    assert torch.equal(again, exchanged([Int8Codec()], [flat.clone()], seed=7)[0][0])
    assert not torch.equal(again, exchanged([Int8Codec()], [flat.clone()], seed=8)[0][0])


def test_one_bit_is_the_sign_times_the_mean_magnitude_of_the_block() -> None:
    flats = [drawn(1500, seed) for seed in range(3)]
    wanted = torch.zeros(1500)
    for flat in flats:
        for first, last in ((0, 1024), (1024, 1500)):
            block = flat[first:last]
            wanted[first:last] += torch.where(block >= 0, 1.0, -1.0) * block.abs().mean()
    found = exchanged([OneBitCodec() for _ in flats], [flat.clone() for flat in flats])[0]
    torch.testing.assert_close(found[0], wanted)


@pytest.mark.parametrize("codec", [Int8Codec, OneBitCodec], ids=lambda one: one.__name__)
@pytest.mark.parametrize("size", [5 * 8 * 1024, 5 * 8 * 1024 + 1, 6 * 8 * 1024 - 7])
def test_many_replicas_share_the_sum_out_and_the_owner_of_a_share_counts_its_second_rounding(
    codec: type[Int8Codec] | type[OneBitCodec], size: int
) -> None:
    flats = [drawn(size, seed) for seed in range(5)]
    codecs = [ErrorFeedback(codec(), sizes=[size]) for _ in flats]
    found, num_bytes = exchanged(codecs, [flat.clone() for flat in flats])
    assert all(torch.equal(one, found[0]) for one in found)
    for one in codecs:
        one.settle([True])
    held = torch.stack([one.own()[0] for one in codecs]).sum(0)
    torch.testing.assert_close(found[0] + held, torch.stack(flats).sum(0), rtol=0.0, atol=1e-4)
    assert num_bytes < 1.4 * (0.254 if codec is Int8Codec else 1 / 31) * 4 * size  # all of it once, and a fifth


def test_top_k_keeps_the_largest_of_each_block() -> None:
    size = 2**16 + 1000
    flats = [drawn(size, seed) for seed in range(2)]
    wanted = torch.zeros(size)
    for flat in flats:
        for first, last in ((0, 2**16), (2**16, size)):
            count = -(-(last - first) // 100)
            places = first + flat[first:last].abs().argsort(descending=True)[:count]
            wanted[places] += flat[places].bfloat16().float()
    found = exchanged([TopKCodec(0.01) for _ in flats], [flat.clone() for flat in flats])[0]
    assert torch.equal(found[0], wanted)


def test_power_sgd_takes_turns_in_projecting_on_the_factor_that_came_last() -> None:
    rows, columns, rank = 40, 30, 3
    codecs = [PowerSGDCodec(rank, shapes=[(rows, columns), (7, 1)]) for _ in range(2)]
    for codec in codecs:
        codec._start(0, torch.device("cpu"))
    start = codecs[0].common()[0]["right"].double()
    torch.testing.assert_close(start.t() @ start, torch.eye(rank, dtype=torch.float64), rtol=0.0, atol=1e-5)
    whole = torch.stack([drawn(rows * columns + 7, seed) for seed in range(2)]).sum(0)
    matrix = whole[: rows * columns].view(rows, columns).double()
    for is_right in (True, False, True):
        if is_right:
            other = matrix @ start
            wanted = other @ start.t()
        else:
            other = matrix.t() @ start
            wanted = start @ other.t()
        start = torch.linalg.qr(other).Q
        found = exchanged(codecs, [drawn(rows * columns + 7, seed) for seed in range(2)])[0]
        torch.testing.assert_close(found[0][: rows * columns].view(rows, columns).double(), wanted, rtol=0.0, atol=0.1)
        for codec in codecs:
            codec.settle([True, True])


def test_power_sgd_finds_what_has_its_rank() -> None:
    left, right = drawn(80, 1).view(40, 2), drawn(60, 2).view(30, 2)
    flat = (left @ right.t()).reshape(-1)
    codec = PowerSGDCodec(2, shapes=[(40, 30)])
    found = torch.zeros(0)
    for _ in range(2):
        found = exchanged([codec], [flat.clone()])[0][0]
        codec.settle([True])
    assert float((found - flat).norm()) < 0.01 * float(flat.norm())


def test_rows_that_were_touched_travel_and_the_sum_is_exact() -> None:
    shapes = [(100, 8), (6, 4), (5, 1)]
    flats = []
    for seed in range(3):
        flat = drawn(829, seed)
        flat[:800].view(100, 8)[torch.randperm(100, generator=torch.Generator().manual_seed(seed))[3 + seed :]] = 0.0
        flats.append(flat)
    codecs = [SparseCodec(shapes=shapes) for _ in flats]
    found, num_bytes = exchanged(codecs, [flat.clone() for flat in flats])
    wanted = flats[0] + flats[1] + flats[2]
    torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(one, found[0]) for one in found)
    assert num_bytes == 4 * 2 + 4 * (24 + 5) + 5 * (8 * 4 + 4)  # counts, what is dense, five rows


def test_an_embedding_that_was_touched_all_over_is_summed_as_it_is() -> None:
    flats = [drawn(80, seed) for seed in range(2)]
    found, num_bytes = exchanged([SparseCodec(shapes=[(10, 8)]) for _ in flats], [flat.clone() for flat in flats])
    assert torch.equal(found[0], flats[0] + flats[1])
    assert num_bytes == 4 + 320
