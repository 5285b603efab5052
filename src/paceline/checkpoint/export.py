"""Writes a checkpoint's weights as safetensors, under the model's own names: one file, or a folder for Hugging Face.

Tensors are read and written one after the other, from any layout, so the largest one bounds the memory. Tied tensors
are stored once, as Hugging Face does it: the model's first name stays, and the metadata maps each other name to it. A
folder has `model.safetensors`, or, where that would be too large, parts of it and an index. `from_pretrained(folder)`
reads it once the model's config.json is there, too.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, find
from paceline.checkpoint.huggingface_folder import MODELS, export_huggingface
from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.safetensors_file import TensorInfo, write_safetensors
from paceline.checkpoint.weight_files import (
    CONFIG,
    MAX_SHARD_BYTES,
    Weights,
    has_adapters_alone,
    write_shards,
    written,
)
from paceline.errors import CheckpointError
from paceline.units import bytes_text

__all__ = [
    "MAX_SHARD_BYTES",
    "ExportForm",
    "chosen_checkpoint",
    "export_checkpoint",
    "export_folder",
    "main_export",
    "write_weights",
]

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportForm:
    """What `paceline export` writes."""

    is_huggingface: bool = False  # a folder as transformers saves it
    dtype: str | None = None  # of floating tensors: a key of TYPES; None: as they are
    max_shard_bytes: int = MAX_SHARD_BYTES
    config: Path | None = None

    def is_folder(self, path: Path) -> bool:
        """Whether the target is a folder: if it is one already, or has no suffix."""
        return self.is_huggingface or path.is_dir() or not path.suffix

    def write(self, checkpoint_dir: Path, path: Path) -> list[Path]:
        """Write a checkpoint's weights; returns the files. Raises CheckpointError."""
        dtype = None if self.dtype is None else TYPES[self.dtype]
        size, config = self.max_shard_bytes, self.config
        if self.is_huggingface:
            return export_huggingface(checkpoint_dir, path, dtype=dtype, max_shard_bytes=size, config=config)
        if self.is_folder(path):
            return export_folder(checkpoint_dir, path, max_shard_bytes=size, config=config, dtype=dtype)
        return export_checkpoint(checkpoint_dir, path, dtype=dtype)

    def remark(self, checkpoint_dir: Path, path: Path) -> str | None:
        """What the user should know of what was written to `path`."""
        if self.is_huggingface:
            return None
        checkpoint = open_checkpoint(checkpoint_dir)
        if has_adapters_alone(checkpoint, "model."):
            return (
                f"these are adapters alone; the base that they adapt is not in {checkpoint_dir} "
                "(peft loads them from a folder of --format huggingface)"
            )
        if MODELS in checkpoint.state and self.config is None and path.is_dir():
            return "these are weights alone; from_pretrained of transformers loads a folder of --format huggingface"
        return None


def export_checkpoint(
    checkpoint_dir: Path, path: Path, prefix: str = "model.", *, dtype: torch.dtype | None = None
) -> list[Path]:
    """Write the tensors of a checkpoint whose names begin with `prefix`, without it, to one file; returns it."""
    weights = Weights(checkpoint_dir, prefix, dtype)
    write_safetensors(path, weights.kept, weights.read, weights.about(weights.ties))
    return [path]


def export_folder(
    checkpoint_dir: Path,
    folder: Path,
    prefix: str = "model.",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Path | None = None,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write these tensors to a folder, in files of at most `max_shard_bytes` (or one tensor); returns the files.

    `config`: a config.json, or the folder that has one, to be copied. Raises CheckpointError if the folder has other
    weights, which readers might take for these.
    """
    weights = Weights(checkpoint_dir, prefix, dtype)
    if config is not None and has_adapters_alone(open_checkpoint(checkpoint_dir), prefix):
        raise CheckpointError(
            f"checkpoint {checkpoint_dir} has adapters alone, which are no weights of {config}: leave out --config, or "
            "write them in the form of peft, --format huggingface"
        )
    text = None if config is None else _config(config)
    return _write_folder(folder, weights.kept, weights.read, weights.about, weights.ties, max_shard_bytes, text)


def write_weights(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    *,
    ties: Mapping[str, str],
    step: int,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: str | None = None,
) -> list[Path]:
    """Write weights to a file, or to a folder as `export_folder` does where the path is one or has no suffix.

    `read` is called once for each of `tensors`: in their order, if those of larger elements come first. `ties` maps
    further names to the one of `tensors` that they stand for; `config` is the text of a folder's config.json.
    """

    def about(metadata: Mapping[str, str]) -> dict[str, str]:
        return {"format": "pt", **metadata, "step": str(step)}

    if path.suffix and not path.is_dir():
        write_safetensors(path, tensors, read, about(ties))
        return [path]
    return _write_folder(path, tensors, read, about, ties, max_shard_bytes, config)


def _write_folder(
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    about: Callable[[Mapping[str, str]], dict[str, str]],
    ties: Mapping[str, str],
    max_shard_bytes: int,
    config: str | None,
) -> list[Path]:
    done = write_shards(folder, tensors, read, max_shard_bytes, lambda is_one: about(dict(ties) if is_one else {}))
    if config is not None:
        done.append(written(folder / CONFIG, config))
    return done


def main_export(
    checkpoint_or_run_dir: Path,
    path: Path,
    *,
    is_huggingface: bool = False,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    config: Path | None = None,
) -> int:
    """`paceline export`: write the weights of a checkpoint, or of a run's newest; returns the exit status. The options
    are those of `ExportForm`."""
    size = max_shard_bytes or MAX_SHARD_BYTES
    return export_as(
        checkpoint_or_run_dir,
        path,
        ExportForm(is_huggingface=is_huggingface, dtype=dtype, max_shard_bytes=size, config=config),
    )


def export_as(checkpoint_or_run_dir: Path, path: Path, form: ExportForm) -> int:
    """The same, given the form."""
    try:
        chosen = chosen_checkpoint(checkpoint_or_run_dir)
        done = form.write(chosen, path)
    except CheckpointError as error:
        print(f"paceline export: {error}", file=sys.stderr)
        return 1
    for one in done:
        source = form.config if one.name == CONFIG and form.config is not None else chosen
        print(f"{one}  {bytes_text(one.stat().st_size)}  from {source}")
    if (remark := form.remark(chosen, path)) is not None:
        print(remark)
    return 0


def _config(path: Path) -> str:
    file = path / CONFIG if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the configuration {file} cannot be read: {error}") from error
    return text


def chosen_checkpoint(path: Path) -> Path:
    """Return the checkpoint that is meant, after reading all of its files: damaged weights look like any others."""
    if (path / COMMIT_MARKER).exists():
        return open_checkpoint(path, verified=True).path
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = find(directory, verified=True)
    for skipped, reason in found.skipped:
        print(f"skipped {skipped}: {reason}", file=sys.stderr)
    if found.newest is None:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run with a complete one")
    return found.newest
