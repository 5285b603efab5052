"""Copies that are read from files: the same numbers as the mapping's, and none where the file is not what is mapped."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.parallel import file_reads, file_weights
from paceline.parallel.file_reads import read_at
from paceline.parallel.file_weights import WeightFiles

ROWS = 6000  # of 256 numbers: 5.9 MiB


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    numbers = {"a": torch.randn(ROWS, 256, generator=generator), "b": torch.randn(7, generator=generator)}
    save_file({**numbers, "c": torch.randn(3, 5, generator=generator).bfloat16()}, path)
    return path


@pytest.fixture
def offsets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Where files are read."""
    found: list[int] = []

    def noted(fd: int, offset: int, like: Tensor) -> Tensor | None:
        found.append(offset)
        return read_at(fd, offset, like)

    monkeypatch.setattr(file_weights, "read_at", noted)
    yield found


def resident_kib(file: Path) -> int:
    with open("/proc/self/smaps") as lines:
        found = re.search(rf"{re.escape(str(file))}\n(?:.*\n)*?Rss: +(\d+) kB", lines.read())
    return int(found[1]) if found else 0


def test_copies_are_read_and_the_mapping_is_not_looked_at(file: Path, offsets: list[int]) -> None:
    weights = load_file(file)
    files = WeightFiles(weights.values())
    before = resident_kib(file)
    copies = {name: files.copy(one) for name, one in weights.items()}
    copies["rows"] = files.copy(weights["a"][100:5000])
    assert len(offsets) == 4 and resident_kib(file) <= before
    for name, one in {**load_file(file), "rows": load_file(file)["a"][100:5000]}.items():
        assert torch.equal(copies[name], one) and copies[name].dtype == one.dtype
    copies["a"].zero_()
    assert torch.equal(weights["a"], load_file(file)["a"]), "memory of its own"


def test_what_is_no_row_of_a_file_is_cloned(file: Path, offsets: list[int]) -> None:
    weights = load_file(file)
    files = WeightFiles(weights.values())
    columns = weights["a"][:, 3:9]
    assert torch.equal(files.copy(columns), columns) and files.copy(columns).is_contiguous()
    own = torch.ones(5)
    assert torch.equal(files.copy(own), own) and files.copy(own).data_ptr() != own.data_ptr()
    assert files.copy(weights["a"][:0]).shape == (0, 256)
    assert offsets == []


def test_what_was_changed_is_copied_as_it_is_now(file: Path, offsets: list[int]) -> None:
    weights = load_file(file)
    files = WeightFiles(weights.values())
    weights["a"][17] = 5.0
    assert torch.equal(files.copy(weights["a"]), weights["a"]) and offsets == []
    assert torch.equal(files.copy(weights["a"][3000:]), load_file(file)["a"][3000:]) and len(offsets) == 1


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_of_a_file_whose_name_has_gone_the_mapping_is_copied(file: Path, offsets: list[int], how: str) -> None:
    expected = {name: one.clone() for name, one in load_file(file).items()}
    weights = load_file(file)
    files = WeightFiles(weights.values())
    if how == "replaced":
        save_file({name: torch.zeros_like(one) for name, one in expected.items()}, file.with_suffix(".new"))
        os.rename(file.with_suffix(".new"), file)
    else:
        file.unlink()
    assert all(torch.equal(files.copy(weights[name]), one) for name, one in expected.items())
    assert offsets == []


def test_reads_go_on_where_the_system_gives_less(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reads, "MOST_AT_ONCE", 100_001)
    like = load_file(file)["a"]
    with open(file, "rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
        found = read_at(opened.fileno(), begin, like)
        assert found is not None and torch.equal(found.view(torch.uint8), like.view(torch.uint8))
        assert read_at(opened.fileno(), begin + 1000, like) is None, "the file ends before"
