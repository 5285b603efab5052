"""Tensors of safetensors files that are mapped, and not read: as safetensors' own are, but that no page is touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from file_memory import resident_kib
from paceline.hub.mapped_files import mapped
from paceline.hub.stored_weights import stored_weights

MIB = 1 << 20


def write(path: Path, header: Mapping[str, object], data: bytes, *, pad: int = 0) -> None:
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_no_byte_of_a_tensor_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    numbers = {
        "a": torch.randn(MIB),
        "b": torch.randn(3, 4).bfloat16(),
        "none": torch.empty(0, 4),
        "one": torch.ones(()),
    }
    save_file(numbers, file)
    found = mapped(stored_weights(tmp_path)).opened
    assert found is not None and resident_kib(file) == 0
    tensors = found["model.safetensors"]
    assert tensors.keys() == numbers.keys()
    for name, one in numbers.items():
        assert torch.equal(tensors[name], one) and tensors[name].dtype == one.dtype
        assert tensors[name].untyped_storage().nbytes() == one.nbytes, "or torch.save would write the whole file"
    before = file.read_bytes()
    tensors["a"].zero_()  # private
    assert file.read_bytes() == before
    del tensors, found
    assert str(file) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("pad", range(8))
def test_tensors_at_any_place_have_their_numbers(tmp_path: Path, pad: int) -> None:
    data = torch.arange(4, dtype=torch.float32)
    header = {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    file = tmp_path / "model.safetensors"
    write(file, header, data.numpy().tobytes(), pad=pad)
    stored = mapped(stored_weights(tmp_path))
    begin = stored.tensors["x"].offset
    assert (stored.opened is None) == bool(begin % 4), "what is not where its type may begin is left to safetensors"
    if stored.opened is not None:
        assert torch.equal(stored.opened["model.safetensors"]["x"], data)
    assert torch.equal(load_file(file)["x"], data)


@pytest.mark.parametrize(("type", "shape"), [("F4", [8]), ("F32", [3])])
def test_other_types_and_other_sizes_are_left_to_safetensors(tmp_path: Path, type: str, shape: list[int]) -> None:
    header = {"x": {"dtype": type, "shape": shape, "data_offsets": [0, 4]}}
    write(tmp_path / "model.safetensors", header, b"\0" * 4)
    stored = stored_weights(tmp_path)
    assert mapped(stored) is stored
