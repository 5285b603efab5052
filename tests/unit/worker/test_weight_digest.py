"""A digest changes with every bit, and not with how the bits lie in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import quick
from paceline.worker.health.replica_comparison import WeightReport, majority_verdict
from paceline.worker.health.weight_digest import WORDS, WeightDigester, combined_digest

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)


def digest(tensor: Tensor) -> int:
    return WeightDigester().digests([tensor])[0]


def flipped(tensor: Tensor, bit: int) -> Tensor:
    raw = tensor.clone().contiguous().reshape(-1).view(torch.uint8)
    raw[bit // 8] ^= 1 << (bit % 8)
    return raw.view(tensor.dtype).reshape(tensor.shape)


def numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 50).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", quick.some([1, 2, 3, 7], step=3))
def test_every_single_bit_is_seen(dtype: torch.dtype, count: int) -> None:
    tensor = numbers(count, dtype)
    plain = digest(tensor)
    bits = tensor.numel() * tensor.element_size() * 8
    if dtype is torch.bool:
        bits = 1  # other bits of a bool are no values
    assert all(digest(flipped(tensor, bit)) != plain for bit in range(bits))


@given(st.integers(0, 2 * WORDS * 32 + 95), st.integers(0, 2 * WORDS * 32 + 95))
def test_two_flipped_bits_are_seen_within_and_across_blocks(one: int, other: int) -> None:
    tensor = numbers(2 * WORDS + 3)
    changed = flipped(flipped(tensor, one), other)
    assert (digest(changed) == digest(tensor)) == (one == other)


def test_two_flipped_signs_do_not_cancel() -> None:
    tensor = numbers(64)
    plain = digest(tensor)
    signs = [flipped(flipped(tensor, 31), 31 + 32 * place) for place in range(1, 64)]
    assert all(digest(changed) != plain for changed in signs)


def test_numbers_that_change_places_are_seen() -> None:
    tensor = numbers(WORDS + 10)
    swapped = tensor.clone()
    swapped[[3, WORDS + 3]] = swapped[[WORDS + 3, 3]]
    assert digest(swapped) != digest(tensor)


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_bits_have_equal_digests_wherever_they_lie(dtype: torch.dtype) -> None:
    tensor = numbers(WORDS + 30, dtype)
    shifted = torch.cat([tensor[:1], tensor])[1:]  # begins in the middle of a word, where numbers are short
    strided = torch.stack([tensor, tensor], dim=1)[:, 0]
    assert digest(shifted) == digest(strided) == digest(tensor) == digest(tensor.reshape(2, -1))


def test_nothing_and_scalars_have_digests() -> None:
    assert digest(torch.zeros(0)) == 0
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(-1.0))
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0)), "bits are compared, not values"


def test_many_tensors_are_the_same_as_each_alone() -> None:
    tensors = [numbers(count) for count in (1, WORDS, 0, WORDS + 1, 5)]
    assert WeightDigester().digests(tensors) == list(map(digest, tensors))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=6), st.data())
def test_digests_are_combined_in_their_order(digests: list[int], data: st.DataObject) -> None:
    other = data.draw(st.permutations(digests))
    assert 0 <= combined_digest(digests) < 2**64
    assert (combined_digest(other) == combined_digest(digests)) == (other == digests)


def voices(*digests: tuple[int, ...]) -> list[WeightReport]:
    return [WeightReport(worker_rank=10 + place, host="h", pid=1, digests=told) for place, told in enumerate(digests)]


def test_the_minority_is_named_and_the_first_tensor_that_differs() -> None:
    found = majority_verdict(voices((1, 2, 3), (1, 9, 8), (1, 2, 3)))
    assert (found.differing, found.source, found.num_equal, found.first) == ((1,), 0, 2, 1)


def test_the_first_worker_may_be_the_odd_one() -> None:
    found = majority_verdict(voices((7,), (1,), (1,), (2,), (1,)))
    assert (found.differing, found.source, found.num_equal) == ((0, 3), 1, 3)


@pytest.mark.parametrize("digests", [(1, 2), (1, 1, 2, 2), (1, 2, 3), (1, 1, 2, 3)])
def test_without_more_than_half_nobody_is_believed(digests: tuple[int, ...]) -> None:
    found = majority_verdict(voices(*((digest,) for digest in digests)))
    assert found.source is None
    assert found.differing == tuple(range(len(digests)))
