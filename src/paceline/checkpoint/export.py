"""Writes weights as safetensors, the file that other tools read.

Tied tensors are stored once, the way Hugging Face does it: the alphabetically first name stays, the metadata maps
each other name to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from paceline.checkpoint.folder import MARK, find, sync_directory
from paceline.checkpoint.reader import open_checkpoint
from paceline.errors import CheckpointError
from paceline.units import bytes_text

__all__ = ["export_checkpoint", "export_safetensors", "main_export"]


def export_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors of any device to one file, atomically; raises CheckpointError when it cannot be written."""
    from safetensors.torch import save_file

    kept, ties = _split_ties(tensors)
    # save_file refuses what shares memory: views of one buffer that are not ties become copies.
    plain = {name: _alone(tensor) for name, tensor in kept.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(plain, temporary, {"format": "pt", **ties, **(metadata or {})})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except _write_errors() as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def export_checkpoint(checkpoint_dir: Path, path: Path, prefix: str = "model.") -> None:
    """Write the tensors of a checkpoint whose names begin with `prefix`, without it, as safetensors."""
    checkpoint = open_checkpoint(checkpoint_dir)
    names = [name for name in checkpoint.names if name.startswith(prefix)]
    if not names:
        present = sorted({name.partition(".")[0] + "." for name in checkpoint.names})
        raise CheckpointError(
            f"checkpoint {checkpoint_dir} has no tensors named {prefix}...; "
            f"its names begin with {', '.join(present) or 'nothing'}"
        )
    weights = {name.removeprefix(prefix): tensor for name, tensor in checkpoint.load(names).items()}
    export_safetensors(weights, path, {"step": str(checkpoint.step)})


def main_export(checkpoint_or_run_dir: Path, path: Path) -> int:
    """`paceline export`: write the weights of a checkpoint, or of a run's newest; returns the exit status."""
    try:
        chosen = _chosen(checkpoint_or_run_dir)
        export_checkpoint(chosen, path)
    except CheckpointError as error:
        print(f"paceline export: {error}", file=sys.stderr)
        return 1
    print(f"{path}  {bytes_text(path.stat().st_size)}  from {chosen}")
    return 0


def _chosen(path: Path) -> Path:
    if (path / MARK).exists():
        return path
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = find(directory, verified=True)
    for skipped, reason in found.skipped:
        print(f"skipped {skipped}: {reason}", file=sys.stderr)
    if found.newest is None:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run with a complete one")
    return found.newest


def _split_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    kept: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = seen.setdefault(view, name) if tensor.nbytes else name
        if first == name:
            kept[name] = tensor
        else:
            ties[name] = first
    return kept, ties


def _alone(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _write_errors() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError

    return (OSError, SafetensorError)
