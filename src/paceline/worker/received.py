"""A state that came from another worker: read like a checkpoint, but from memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import CheckpointError

__all__ = ["Received", "TensorSource"]


class TensorSource(Protocol):
    """Where the tensors of a run's state are read from, by name: a checkpoint, or what a member sent."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def load(self, names: Iterable[str] | None = None) -> dict[str, Tensor]: ...

    def load_into(self, targets: Mapping[str, Tensor], *, prefix: str | None = None) -> None: ...

    def require(self, targets: Mapping[str, Tensor], *, prefix: str | None = None) -> None: ...

    def shape(self, name: str) -> torch.Size: ...

    def dtype(self, name: str) -> torch.dtype: ...


class Received:
    """Tensors by name, on the CPU or on this worker's device."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def load(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the tensors of these names (None: all)."""
        return {name: self._tensors[name] for name in (self.names if names is None else names)}

    def load_into(self, targets: Mapping[str, Tensor], *, prefix: str | None = None) -> None:
        """Overwrite tensors in place; CheckpointError where the other worker has others, or of other shapes."""
        self.require(targets)
        for name, target in targets.items():
            target.detach().copy_(self._tensors[name])

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._tensors[name].dtype

    def require(self, targets: Mapping[str, Tensor], *, prefix: str | None = None) -> None:
        """Raise CheckpointError where `load_into` would."""
        for name, target in targets.items():
            if name not in self._tensors or self._tensors[name].shape != target.shape:
                there = list(self._tensors[name].shape) if name in self._tensors else "nothing of that name"
                raise CheckpointError(
                    f"{name} has the shape {list(target.shape)} here, and the worker that sent its state has {there}: "
                    "all workers must prepare the same model"
                )
