"""Folders of weights, by their headers: what is there, and what an incomplete one is refused for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import CheckpointError
from paceline.hub.stored_weights import INDEX, read_config, stored_weights


def sharded(folder: Path) -> dict[str, str]:
    """Two files and their index; returns what is where."""
    folder.mkdir()
    save_file({"a": torch.zeros(3, 2, dtype=torch.bfloat16)}, folder / "one.safetensors")
    save_file({"b": torch.zeros(2), "c": torch.zeros(7, dtype=torch.int64)}, folder / "two.safetensors")
    places = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return places


def test_one_file_and_several_are_known_by_their_headers(tmp_path: Path) -> None:
    places = sharded(tmp_path / "many")
    found = stored_weights(tmp_path / "many")
    assert {name: one.file for name, one in found.tensors.items()} == places
    assert found.tensors["a"].shape == (3, 2)
    assert found.num_bytes == 12 + 8 + 56
    assert found.dtype == torch.bfloat16, "the floating type of most bytes: integers do not count"
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert stored_weights(tmp_path).dtype == torch.float32


def test_incomplete_folders_are_refused_by_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    places = sharded(folder)
    whole = (folder / "two.safetensors").read_bytes()
    (folder / "two.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"two.safetensors was cut short: it has \d+ bytes"):
        stored_weights(folder)
    (folder / "two.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(CheckpointError, match=r"two.safetensors is no safetensors file, or was cut short"):
        stored_weights(folder)
    (folder / "two.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(CheckpointError, match="its header cannot be read"):
        stored_weights(folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 files .* \(two.safetensors\)"):
        stored_weights(folder)
    (folder / "two.safetensors").write_bytes(whole)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**places, "d": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names 1 tensors that are not in the files .* \(d\)"):
        stored_weights(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        stored_weights(folder)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("pytorch_model.bin", "which no worker can read in parts: convert it once"),
        ("model-00001-of-00002.safetensors", "has 1 parts .* and no model.safetensors.index.json"),
        ("readme.md", "name a folder as save_pretrained"),
    ],
)
def test_folders_without_weights_say_what_to_do(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=said):
        stored_weights(tmp_path)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config.json, which says what model"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no JSON object"):
        read_config(tmp_path)
