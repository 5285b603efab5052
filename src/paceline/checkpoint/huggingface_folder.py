"""Writes a checkpoint's model as transformers would save it: a folder that it and vLLM load unchanged.

It has config.json with the class and the type of the weights, the settings of generation, the tokenizer's files, and
model.safetensors, or several files and their index, under the names that the model's makers publish. Of a model of peft
it has the adapters, in peft's form. One tensor at a time is in memory, and the folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint_dir import whole_file
from paceline.checkpoint.published_names import published_names
from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.checkpoint.safetensors_file import TensorInfo, num_bytes_of, write_safetensors
from paceline.checkpoint.weight_files import (
    CONFIG,
    Weights,
    has_adapters_alone,
    refuse_others,
    shard_names,
    type_of,
    write_shards,
)
from paceline.errors import CheckpointError

__all__ = ["FOLDER", "MODELS", "TOKENIZER_FILES", "export_huggingface"]

FOLDER = "paceline_folder"  # an attribute of models: where on this host the files lie that they were made from
MODELS = "huggingface"  # the key of what a checkpoint keeps of models of transformers
GENERATION = "generation_config.json"
ABOUT = {"format": "pt"}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
)


def export_huggingface(
    checkpoint_dir: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int,
    config: Path | None = None,
) -> list[Path]:
    """Write the folder; returns its files. `config`: a config.json, or a folder with one and the files beside it, in
    place of what the checkpoint keeps.

    Raises CheckpointError where there is no configuration, and where the folder has other weights.
    """
    checkpoint = open_checkpoint(checkpoint_dir)
    name, known = _model_of(checkpoint, is_given=config is not None)
    if config is not None and (known.get("adapters") or has_adapters_alone(checkpoint, f"{name}.")):
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has a model of peft, of which the adapters alone are exported: leave out "
            "--config, and merge them into the base by peft (PeftModel.from_pretrained(base, folder)"
            ".merge_and_unload().save_pretrained(other))"
        )
    files = _files_of(known) if config is None else {}
    if known.get("adapters"):
        _require_inside(folder, known["adapters"])
        refuse_others(folder, set())
        return _whole(folder, lambda partial: _write_adapters(checkpoint, name, known, files, partial, dtype))
    model = _ModelToWrite(checkpoint_dir, name, known, files, dtype, config)
    refuse_others(folder, set(shard_names(model.tensors, max_shard_bytes)))
    return _whole(folder, lambda partial: model.write(partial, max_shard_bytes))


def _model_of(checkpoint: Checkpoint, *, is_given: bool) -> tuple[str, dict[str, Any]]:
    """The name of the model that is meant, and what the checkpoint keeps of it."""
    models: Mapping[str, dict[str, Any]] = checkpoint.state.get(MODELS) or {}
    if len(models) == 1 or "model" in models:
        name = "model" if "model" in models else next(iter(models))
        return name, models[name]
    if len(models) > 1:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has {len(models)} models of transformers ({', '.join(models)}) and none "
            "named 'model': prepare the one to be exported as worker.prepare(model, name='model')"
        )
    if not is_given:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} keeps no configuration: its model is none of transformers, or an earlier "
            "version of Paceline wrote it. Name the folder that the model came from, --config FOLDER, or leave out "
            "--format"
        )
    return "model", {}


class _ModelToWrite:
    """A model's weights under their published names, and what lies beside them."""

    def __init__(
        self,
        checkpoint_dir: Path,
        name: str,
        known: Mapping[str, Any],
        files: Mapping[str, bytes],
        dtype: torch.dtype | None,
        config: Path | None,
    ) -> None:
        weights = Weights(checkpoint_dir, f"{name}.", dtype)
        text, beside = (known["config"], files) if config is None else _given(config)
        names = published_names(known.get("class"), text, weights.kept, weights.ties)
        self.tensors = names.tensors()
        self._read = names.reader(weights.read)
        self._small = {**beside, CONFIG: _config(text, known, self.tensors).encode()}

    def write(self, folder: Path, max_shard_bytes: int) -> None:
        write_shards(folder, self.tensors, self._read, max_shard_bytes, lambda _: ABOUT)
        for file, data in self._small.items():
            _write(folder / file, data)


def _config(text: str, known: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """The configuration, with the class that reads it and the type of the weights."""
    fields: dict[str, Any] = {key: value for key, value in json.loads(text).items() if not key.startswith("_")}
    if "class" in known:
        fields["architectures"] = [known["class"].rpartition(":")[2].rpartition(".")[2]]
    by_type: dict[torch.dtype, int] = {}
    for about in tensors.values():
        if about[0].is_floating_point:
            by_type[about[0]] = by_type.get(about[0], 0) + num_bytes_of(about)
    if by_type:
        key = "torch_dtype" if "torch_dtype" in fields and "dtype" not in fields else "dtype"
        fields[key] = str(max(by_type, key=lambda one: by_type[one])).removeprefix("torch.")
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def _files_of(known: Mapping[str, Any]) -> dict[str, bytes]:
    """What a checkpoint has of small files; a forged one must not name others, which would be overwritten."""
    files: Mapping[Any, Any] = known.get("files") or {}
    for name, data in files.items():
        if name not in TOKENIZER_FILES or not isinstance(data, bytes):
            raise CheckpointError(
                f"the checkpoint names a file {name!r}, which is none of a tokenizer's and may lie outside of the "
                "folder: it is damaged or forged, or a newer Paceline wrote it"
            )
    settings = None if known.get("adapters") else known.get("generation")
    return {**files, **({} if settings is None else {GENERATION: settings.encode()})}


def _require_inside(folder: Path, names: Iterable[Any]) -> None:
    """Raise CheckpointError where a name of an adapter is none of a folder within this one."""
    for name in names:
        is_plain = isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name
        if not is_plain or "\\" in name or not name.isprintable():
            raise CheckpointError(
                f"the checkpoint names an adapter {name!r}, which would lie outside of {folder}: it is damaged or "
                "forged"
            )


def _given(path: Path) -> tuple[str, dict[str, bytes]]:
    """A configuration that the user names, and what lies beside it."""
    file = path / CONFIG if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        if not isinstance(json.loads(text), dict):
            raise ValueError("it holds no JSON object")
        beside = [
            one
            for one in (sorted(path.iterdir()) if path.is_dir() else ())
            if one.is_file() and one.suffix in (".json", ".model", ".txt", ".jinja") and one.name != CONFIG
        ]
        return text, {one.name: one.read_bytes() for one in beside if not one.name.endswith(".safetensors.index.json")}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the configuration {file} cannot be read: {error}") from error


def _write_adapters(
    checkpoint: Checkpoint,
    name: str,
    known: Mapping[str, Any],
    files: Mapping[str, bytes],
    folder: Path,
    dtype: torch.dtype | None,
) -> None:
    for adapter, about in known["adapters"].items():
        place = folder if adapter == "default" else folder / adapter
        place.mkdir(exist_ok=True)
        full = {stored: f"{name}.{own}" for stored, own in about["names"].items()}
        tensors = {
            stored: (type_of(checkpoint.dtype(own), dtype), tuple(checkpoint.shape(own)))
            for stored, own in full.items()
        }

        def read(stored: str, full: Mapping[str, str] = full) -> Tensor:
            tensor = checkpoint.load([full[stored]])[full[stored]]
            return tensor.to(type_of(tensor.dtype, dtype))

        write_safetensors(place / "adapter_model.safetensors", tensors, read, ABOUT)
        _write(place / "adapter_config.json", about["config"].encode())
    for file, data in files.items():
        _write(folder / file, data)


def _write(path: Path, data: bytes) -> None:
    with whole_file(path) as file:
        file.write(data)


def _whole(folder: Path, write: Callable[[Path], None]) -> list[Path]:
    """Have a folder written under another name, on the same file system, and give it its own; returns its files."""
    name = f".{folder.name}.partial-{os.getpid()}"
    partial = folder / name if folder.is_dir() else folder.with_name(name)  # a folder may be a mount, or a link
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        return _published(partial, folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _published(partial: Path, folder: Path) -> list[Path]:
    """Give the folder its name; where there is one already, what describes weights comes after them."""
    files = [one.relative_to(partial) for one in partial.rglob("*") if one.is_file()]
    order = sorted(files, key=lambda one: (one.suffix == ".json", one.name == CONFIG, one))
    refuse_others(folder, {one.name for one in files})
    if folder.is_dir():
        for one in order:
            (folder / one).parent.mkdir(parents=True, exist_ok=True)
            (partial / one).replace(folder / one)
    else:
        partial.rename(folder)
    return [folder / one for one in order]
