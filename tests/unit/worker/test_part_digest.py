"""Digests of parts: their sum is that of the whole, however it is split, and any change shows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.worker.state.part_digest import MASK, part_digest

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool]


def whole_digest(tensor: Tensor) -> int:
    return part_digest(tensor, tensor.shape, (0,) * tensor.dim())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(13,), (7, 5), (6, 5, 4), (4, 3, 2, 2)], ids=str)
def test_the_digests_of_any_blocks_add_up(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    halves = [((0, size // 2), (size // 2, size - size // 2)) for size in shape]
    total = 0
    for box in itertools.product(*halves):
        part = tensor
        for dim, (first, size) in enumerate(box):
            part = part.narrow(dim, first, size)
        total += part_digest(part, shape, [first for first, _ in box])
    assert total & MASK == whole_digest(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_changed_number_shows(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, 7).to(dtype)
    seen = {whole_digest(tensor)}
    for row, column in itertools.product(range(5), range(7)):
        other = tensor.clone()
        other[row, column] = 1
        seen.add(whole_digest(other))
    assert len(seen) == 1 + 5 * 7


def test_rows_that_are_exchanged_show_and_negative_zeros_too() -> None:
    tensor = torch.randn(64, 8)
    assert whole_digest(tensor) != whole_digest(tensor.flip(0))
    assert whole_digest(tensor) != whole_digest(tensor.flip(1))
    assert whole_digest(torch.zeros(3, 3)) != whole_digest(-torch.zeros(3, 3))


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(3.0), torch.empty(0, 4), torch.empty(4, 0), torch.ones(4, 6).t()],
    ids=["0-d", "0", "0", "t"],
)
def test_odd_shapes(tensor: Any) -> None:
    assert whole_digest(tensor) == whole_digest(tensor.clone().contiguous())
    assert bool(whole_digest(tensor)) == bool(tensor.numel())


def test_large_tensors_are_the_same_in_one_block_and_in_many() -> None:
    tensor = torch.randint(-(2**31), 2**31 - 1, (300, 1000), dtype=torch.int32)
    parts = sum(part_digest(tensor[row : row + 1], tensor.shape, (row, 0)) for row in range(300))
    assert parts & MASK == whole_digest(tensor)


def test_a_long_column_has_the_digest_of_its_parts() -> None:
    column = torch.randint(0, 255, (150_001, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    bounds = [0, 100, 65_537, 150_001]
    parts = [part_digest(column[a:b], column.shape, (a, 0)) for a, b in itertools.pairwise(bounds)]
    assert part_digest(column, column.shape, (0, 0)) == sum(parts) & MASK == 5358237676097111129, (
        "as runs have stored it"
    )
