"""The files of a checkpoint's weights: which tensors there are, which files they go to, and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint_dir import whole_file
from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.checkpoint.safetensors_file import TensorInfo, num_bytes_of, write_safetensors
from paceline.errors import CheckpointError

__all__ = [
    "CONFIG",
    "FROZEN",
    "MAX_SHARD_BYTES",
    "Weights",
    "has_adapters_alone",
    "refuse_others",
    "shard_names",
    "type_of",
    "write_shards",
    "written",
]

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MAX_SHARD_BYTES = 5 * 10**9  # Hugging Face's own default
FROZEN = "frozen"  # the key, in the plain values of prepared objects, of the digests of weights that are left out


class Weights:
    """The tensors of a checkpoint under one prefix: which are stored, and which names are tied to these."""

    def __init__(self, checkpoint_dir: Path, prefix: str, dtype: torch.dtype | None = None) -> None:
        """`dtype`: what floating tensors become, each when it is read; None: they stay as they are."""
        self._checkpoint: Checkpoint = open_checkpoint(checkpoint_dir)
        self._dtype = dtype
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
        self.kept = {name: (type_of(own, dtype), shape) for name, (own, shape) in self.kept.items()}

    def read(self, name: str) -> Tensor:
        """Return one of the kept tensors."""
        if name in self._extra:
            tensor = self._extra[name]
        else:
            [tensor] = self._checkpoint.load([f"{self._prefix}{name}"]).values()
        return tensor.to(type_of(tensor.dtype, self._dtype))

    def about(self, metadata: Mapping[str, str]) -> dict[str, str]:
        """Return the metadata of a file."""
        return {"format": "pt", **metadata, "step": str(self._checkpoint.step)}


def has_adapters_alone(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether a checkpoint leaves out the base of a model of peft, whose names begin with `prefix`."""
    left_out = checkpoint.state.get("run", {}).get(FROZEN)
    return isinstance(left_out, dict) and any(str(name).startswith(prefix) for name in left_out)


def shards_of(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[list[str]]:
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


def shard_names(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[str]:
    """The names of the files that `write_shards` writes, the index last."""
    many = len(shards_of(tensors, max_bytes))
    return [WHOLE] if many == 1 else [*(f"model-{one + 1:05}-of-{many:05}.safetensors" for one in range(many)), INDEX]


def refuse_others(folder: Path, ours: set[str]) -> None:
    """Raise CheckpointError where a folder has weights of other names than `ours`."""
    others = sorted(one.name for one in folder.glob("model*.safetensors*") if one.name not in ours)
    if others:
        raise CheckpointError(
            f"{folder} has other weights already ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}), which "
            "readers might take for these: remove them, or name another folder"
        )


def write_shards(
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    max_shard_bytes: int,
    about: Callable[[bool], Mapping[str, str]],
) -> list[Path]:
    """Write tensors to one file, or to several and their index; returns the files. `about` returns a file's metadata,
    given whether it is the only one. Raises CheckpointError if the folder has other weights."""
    shards = shards_of(tensors, max_shard_bytes)
    many, names = len(shards), shard_names(tensors, max_shard_bytes)
    refuse_others(folder, set(names))
    files = names[:many]
    done: list[Path] = []
    for name, held in zip(files, shards, strict=True):
        write_safetensors(folder / name, {one: tensors[one] for one in held}, read, about(many == 1))
        done.append(folder / name)
    if many > 1:
        places = {tensor: name for name, held in zip(files, shards, strict=True) for tensor in held}
        total = sum(map(num_bytes_of, tensors.values()))
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True)
        done.append(written(folder / INDEX, f"{text}\n"))
    return done


def type_of(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The type in which a tensor is written: `wanted`, where both are floating."""
    return wanted if wanted is not None and own.is_floating_point else own


def written(path: Path, text: str) -> Path:
    """Write a small file, whole or not at all."""
    with whole_file(path) as file:
        file.write(text.encode("utf-8"))
    return path
