"""Writes what was imported as a checkpoint of Paceline, which appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.checkpoint_dir import CommitMarker, checksum, partial_path, publish, write_commit_marker
from paceline.checkpoint.dcp_write import write_tensors
from paceline.checkpoint.reader import STATE
from paceline.checkpoint.staging import bytes_of
from paceline.checkpoint.state_tree import encode_state, freeze
from paceline.errors import CheckpointError

__all__ = ["write_checkpoint"]


def write_checkpoint(
    directory: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    ties: Mapping[str, str],
    state: Mapping[str, Any],
    about: Mapping[str, Any],
) -> Path:
    """Write a checkpoint into a folder of checkpoints; returns its path. CheckpointError where that fails.

    `tensors` are on the CPU, contiguous; `ties`: further names of some of them.
    """
    frozen = freeze(dict(state))
    partial = partial_path(directory, step)
    try:
        partial.mkdir(parents=True)
        write_tensors(partial, tensors, ties)
        with open(partial / STATE, "wb") as file:
            file.write(encode_state(frozen))
            file.flush()
            os.fsync(file.fileno())
        files = sorted(partial.iterdir())
        mark = CommitMarker(
            step=step,
            about=dict(about),
            files={path.name: path.stat().st_size for path in files},
            file_crc32={path.name: checksum(path) for path in files},
            tensor_crc32={name: zlib.crc32(bytes_of(tensor)) for name, tensor in tensors.items()},
        )
        write_commit_marker(partial, mark)
        return publish(partial)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{directory} could not be written to: {error}") from error
