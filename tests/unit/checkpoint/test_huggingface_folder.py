"""Folders as transformers and peft read them: what a checkpoint may name, what is refused, and where it is written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.export import main_export
from paceline.checkpoint.huggingface_folder import export_huggingface
from paceline.errors import CheckpointError

ADAPTERS = {
    "default": {"config": "{}", "names": {"a.lora_A.weight": "a.lora_A.default.weight"}},
    "other": {"config": "{}", "names": {"a.lora_A.weight": "a.lora_A.default.weight"}},
}
FROZEN = {"model.a.base_layer.weight": 7}


def saved(directory: Path, *, frozen: dict[str, int] | None = None, **known: Any) -> Path:
    """A checkpoint of a model of which this is known."""
    about = {"config": json.dumps({"hidden_size": 2}), "generation": None, "files": {}, **known}
    writer = AsyncWriter(directory, keep=1, on_event=lambda event: None)
    name = "model.a.lora_A.default.weight" if "adapters" in known else "model.a.weight"
    run: dict[str, Any] = {} if frozen is None else {"run": {"frozen": frozen}}
    writer.save(
        5, {name: torch.ones(2, 2), "model.b.weight": torch.ones(2)}, {"huggingface": {"model": about}, **run}, {}
    )
    path = writer.close()
    assert path is not None
    return path


def export(checkpoint: Path, folder: Path, *, config: Path | None = None, size: int = 10**9) -> list[Path]:
    return export_huggingface(checkpoint, folder, max_shard_bytes=size, config=config)


def names(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*"))


@pytest.mark.parametrize("name", ["../evil.json", "/tmp/evil.json", "a/b", "..", "", "model.safetensors", 3])
def test_a_checkpoint_names_files_of_a_tokenizer_alone(tmp_path: Path, name: Any) -> None:
    checkpoint = saved(tmp_path / "checkpoints", files={"tokenizer.json": b"{}", name: b"evil"})
    with pytest.raises(CheckpointError, match=r"names a file .*, which is none of a tokenizer's"):
        export(checkpoint, tmp_path / "out")
    assert names(tmp_path) == [one for one in names(tmp_path) if one.startswith("checkpoints")]
    with pytest.raises(CheckpointError, match="damaged or forged"):
        export(saved(tmp_path / "again", files={"tokenizer.json": "no bytes"}), tmp_path / "out")


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/b", "..", ".", "", "a\\b", "a\0b", 3])
def test_an_adapter_lies_inside_of_the_folder(tmp_path: Path, name: Any) -> None:
    checkpoint = saved(tmp_path / "checkpoints", adapters={**ADAPTERS, name: ADAPTERS["other"]})
    with pytest.raises(CheckpointError, match=r"names an adapter .*, which would lie outside of .*/out: it is"):
        export(checkpoint, tmp_path / "out")
    assert names(tmp_path) == [one for one in names(tmp_path) if one.startswith("checkpoints")]


def test_adapters_have_folders_by_their_names(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "checkpoints", adapters=ADAPTERS, files={"tokenizer.json": b"{}"}, frozen=FROZEN)
    export(checkpoint, tmp_path / "out")
    assert names(tmp_path / "out") == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "other",
        "other/adapter_config.json",
        "other/adapter_model.safetensors",
        "tokenizer.json",
    ]


def test_a_folder_of_weights_alone_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = saved(tmp_path / "checkpoints")
    assert main_export(checkpoint, tmp_path / "out") == 0
    assert "weights alone; from_pretrained of transformers loads a folder of --format" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("{}")
    assert main_export(checkpoint, tmp_path / "out.safetensors") == 0
    assert main_export(checkpoint, tmp_path / "whole", is_huggingface=True) == 0
    assert main_export(checkpoint, tmp_path / "with", config=tmp_path / "config.json") == 0
    assert "weights alone" not in capsys.readouterr().out


@pytest.mark.parametrize("is_huggingface", [True, False])
def test_adapters_alone_are_no_weights_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_huggingface: bool
) -> None:
    checkpoint = saved(tmp_path / "checkpoints", adapters=ADAPTERS, frozen=FROZEN)
    (tmp_path / "config.json").write_text("{}")
    options: dict[str, Any] = {"is_huggingface": is_huggingface, "config": tmp_path / "config.json"}
    assert main_export(checkpoint, tmp_path / "out", **options) == 1
    said = capsys.readouterr().err
    assert "leave out --config" in said and "adapters alone" in said and "peft" in said
    assert not (tmp_path / "out").exists()


def test_a_file_of_adapters_alone_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = saved(tmp_path / "checkpoints", adapters=ADAPTERS, frozen=FROZEN)
    assert main_export(checkpoint, tmp_path / "x.safetensors") == 0
    assert f"adapters alone; the base that they adapt is not in {checkpoint}" in capsys.readouterr().out
    assert main_export(checkpoint, tmp_path / "out", is_huggingface=True) == 0
    assert main_export(saved(tmp_path / "whole"), tmp_path / "whole.safetensors") == 0
    assert "adapters alone" not in capsys.readouterr().out


@pytest.mark.thorough
def test_a_folder_with_other_weights_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00001-of-00009.safetensors").write_bytes(b"")
    monkeypatch.setattr("paceline.checkpoint.weight_files.write_safetensors", None)
    monkeypatch.setattr("paceline.checkpoint.huggingface_folder.write_safetensors", None)
    forms: tuple[dict[str, Any], ...] = ({}, {"adapters": ADAPTERS})
    for number, known in enumerate(forms):
        with pytest.raises(CheckpointError, match="has other weights already"):
            export(saved(tmp_path / str(number), **known), out)
    assert names(out) == ["model-00001-of-00009.safetensors"]


def test_a_folder_on_another_file_system_is_written_again(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "checkpoints")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        if os.stat(place).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("/dev/shm is on the same file system")
        (tmp_path / "out").symlink_to(place)
        for _ in range(2):
            export(checkpoint, tmp_path / "out", size=1)
        assert names(Path(place)) == [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
        assert load_file(Path(place) / "model-00001-of-00002.safetensors")["a.weight"].tolist() == [[1, 1], [1, 1]]


def test_a_place_that_cannot_be_written_is_an_error_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="out cannot be written: Not a directory"):
        export(saved(tmp_path / "checkpoints"), tmp_path / "file" / "out")
