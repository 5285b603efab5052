"""What a checkpoint of another framework holds, however it is stored: tensors by name, optimizer state, counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError

__all__ = ["ForeignCheckpoint", "ForeignOptimizer", "StoredTensor", "stored"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor that is read when it is needed."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForeignOptimizer:
    """An optimizer's state. Keys of `states` are names of parameters, or numbers in the order of `groups`."""

    states: Mapping[str | int, Mapping[str, Any]]  # entries are StoredTensors or plain values
    groups: Sequence[Mapping[str, Any]] | None = None  # with "params": numbers; None: not known

    @property
    def is_by_name(self) -> bool:
        return any(isinstance(key, str) for key in self.states)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForeignCheckpoint:
    """All of it that can come in."""

    kind: str  # "Lightning checkpoint"
    source: Path
    tensors: Mapping[str, StoredTensor]
    optimizers: Sequence[ForeignOptimizer] = ()
    schedulers: Sequence[Mapping[str, Any]] = ()
    step: int | None = None
    epoch: int | None = None
    left_out: Sequence[str] = ()  # what it holds beside, for people

    def __post_init__(self) -> None:
        if not self.tensors:
            raise CheckpointError(f"{self.source} has no tensors of a model")


def stored(tensor: Tensor) -> StoredTensor:
    """A tensor that is there already, perhaps mapped from a file."""
    return StoredTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), read=lambda: tensor)
