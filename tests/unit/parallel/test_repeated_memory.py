"""Numbers that are repeated take the memory of one period."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paceline.parallel.number_pools import PERIOD, NumberPools
from paceline.parallel.repeated_memory import repeated


def shared_kib() -> int:
    """Of this process, each page counted once for all places where it is mapped."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = (one for one in lines if one.startswith("Pss_Shmem:"))
    return int(line.split()[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_period_is_repeated_in_its_own_memory(dtype: torch.dtype) -> None:
    one = torch.randn(PERIOD, dtype=torch.float32).to(dtype)
    before, maps = shared_kib(), Path("/proc/self/maps").read_text().count("paceline-numbers")
    many = repeated(one, 20 * PERIOD + 7)
    assert many.shape == (20 * PERIOD + 7,) and many.is_contiguous()
    assert all(torch.equal(many[number * PERIOD :][:PERIOD], one) for number in range(20))
    assert torch.equal(many[-7:], one[:7])
    assert shared_kib() - before < 1.5 * one.nbytes / 1024, "all was read"
    part = many[PERIOD:]
    del many
    assert torch.equal(part[:PERIOD], one), "it is there as long as a part of it"
    del part
    assert Path("/proc/self/maps").read_text().count("paceline-numbers") == maps


@pytest.mark.parametrize("length", [1000, PERIOD])
def test_what_cannot_be_mapped_is_copied(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if length == PERIOD:
        monkeypatch.delattr(os, "memfd_create")
    one = torch.randn(length)
    assert torch.equal(repeated(one, 3 * length + 5), torch.cat([one, one, one, one[:5]]))
    assert torch.equal(repeated(one, 5), one[:5])


def test_a_pool_is_as_large_as_a_period_and_copies_of_its_numbers_are_apart() -> None:
    pools, table = (
        NumberPools(torch.float32),
        torch.empty(20 * PERIOD // 512, 512),
    )
    pools.reserve([table])
    before = shared_kib()
    window = pools.window(table, 3)
    assert len(window) == table.numel() and float(window.std()) == pytest.approx(512**-0.5, rel=0.02)
    assert shared_kib() - before < 1.5 * 4 * PERIOD / 1024
    own = pools.numbers(table, 2 * PERIOD)
    own[0] = 7.0
    assert float(own[PERIOD]) != 7.0
