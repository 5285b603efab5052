"""Writes a checkpoint's weights as safetensors, under the model's own names: one file, or a folder for Hugging Face.

Tensors are read and written one after the other, from any layout, so the largest one bounds the memory. Tied tensors
are stored once, as Hugging Face does it: the model's first name stays, and the metadata maps each other name to it. A
folder has `model.safetensors`, or, where that would be too large, parts of it and an index. `from_pretrained(folder)`
reads it once the model's config.json is there, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, find, whole_file
from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.checkpoint.safetensors_file import TensorInfo, num_bytes_of, write_safetensors
from paceline.errors import CheckpointError
from paceline.units import bytes_text

__all__ = ["MAX_SHARD_BYTES", "chosen_checkpoint", "export_checkpoint", "export_folder", "main_export", "write_weights"]

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MAX_SHARD_BYTES = 5 * 10**9  # Hugging Face's own default


def export_checkpoint(checkpoint_dir: Path, path: Path, prefix: str = "model.") -> list[Path]:
    """Write the tensors of a checkpoint whose names begin with `prefix`, without it, to one file; returns it."""
    weights = _Weights(checkpoint_dir, prefix)
    write_safetensors(path, weights.kept, weights.read, weights.about(weights.ties))
    return [path]


def export_folder(
    checkpoint_dir: Path,
    folder: Path,
    prefix: str = "model.",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Path | None = None,
) -> list[Path]:
    """Write these tensors to a folder, in files of at most `max_shard_bytes` (or one tensor); returns the files.

    `config`: a config.json, or the folder that has one, to be copied. Raises CheckpointError if the folder has other
    weights, which readers might take for these.
    """
    weights = _Weights(checkpoint_dir, prefix)
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
    shards = _shards(tensors, max_shard_bytes)
    many = len(shards)
    files = [WHOLE] if many == 1 else [f"model-{one + 1:05}-of-{many:05}.safetensors" for one in range(many)]
    _refuse_others(folder, {*files, INDEX} if many > 1 else set(files))
    done: list[Path] = []
    for name, names in zip(files, shards, strict=True):
        write_safetensors(
            folder / name, {one: tensors[one] for one in names}, read, about(dict(ties) if many == 1 else {})
        )
        done.append(folder / name)
    if many > 1:
        places = {tensor: name for name, names in zip(files, shards, strict=True) for tensor in names}
        total = sum(map(num_bytes_of, tensors.values()))
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True)
        done.append(_written(folder / INDEX, f"{text}\n"))
    if config is not None:
        done.append(_written(folder / CONFIG, config))
    return done


def main_export(
    checkpoint_or_run_dir: Path, path: Path, *, max_shard_bytes: int | None = None, config: Path | None = None
) -> int:
    """`paceline export`: write the weights of a checkpoint, or of a run's newest; returns the exit status.

    `path` is treated as a folder if it is one, or has no suffix.
    """
    is_folder = path.is_dir() or not path.suffix
    try:
        chosen = chosen_checkpoint(checkpoint_or_run_dir)
        if is_folder:
            done = export_folder(chosen, path, max_shard_bytes=max_shard_bytes or MAX_SHARD_BYTES, config=config)
        else:
            done = export_checkpoint(chosen, path)
    except CheckpointError as error:
        print(f"paceline export: {error}", file=sys.stderr)
        return 1
    for one in done:
        print(f"{one}  {bytes_text(one.stat().st_size)}  from {config if one.name == CONFIG else chosen}")
    return 0


class _Weights:
    """The tensors of a checkpoint under one prefix: which are stored, and which names are tied to these."""

    def __init__(self, checkpoint_dir: Path, prefix: str) -> None:
        self._checkpoint: Checkpoint = open_checkpoint(checkpoint_dir)
        self._prefix = prefix
        extra = self._checkpoint.state.get("run", {}).get("extra", {}).get(prefix.removesuffix("."), {})
        self._extra = {name: value for name, value in extra.items() if isinstance(value, Tensor)}  # of modules
        names = [name for name in self._checkpoint.names if name.startswith(prefix)]
        if not names:
            present = sorted({name.partition(".")[0] + "." for name in self._checkpoint.names})
            raise CheckpointError(
                f"checkpoint {checkpoint_dir} has no tensors named {prefix}...; "
                f"its names begin with {', '.join(present) or 'nothing'}"
            )
        ties = self._checkpoint.ties(names)
        self.ties = {name.removeprefix(prefix): first.removeprefix(prefix) for name, first in ties.items()}
        self.kept: dict[str, TensorInfo] = {
            name.removeprefix(prefix): (self._checkpoint.dtype(name), tuple(self._checkpoint.shape(name)))
            for name in names
            if name not in ties
        }
        self.kept.update((name, (value.dtype, tuple(value.shape))) for name, value in self._extra.items())

    def read(self, name: str) -> Tensor:
        """Return one of the kept tensors."""
        if name in self._extra:
            return self._extra[name]
        [tensor] = self._checkpoint.load([f"{self._prefix}{name}"]).values()
        return tensor

    def about(self, metadata: Mapping[str, str]) -> dict[str, str]:
        """Return the metadata of a file."""
        return {"format": "pt", **metadata, "step": str(self._checkpoint.step)}


def _shards(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[list[str]]:
    """Assign names to files in their order, each of at most `max_bytes`, or with one tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, about in tensors.items():
        size = num_bytes_of(about)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _refuse_others(folder: Path, ours: set[str]) -> None:
    others = sorted(one.name for one in folder.glob("model*.safetensors*") if one.name not in ours)
    if others:
        raise CheckpointError(
            f"{folder} has other weights already ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}), which "
            "readers might take for these: remove them, or name another folder"
        )


def _config(path: Path) -> str:
    file = path / CONFIG if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the configuration {file} cannot be read: {error}") from error
    return text


def _written(path: Path, text: str) -> Path:
    with whole_file(path) as file:
        file.write(text.encode("utf-8"))
    return path


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
