"""Where the tensors of a run's state are read from: a checkpoint, or the memory of a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.sharded_tensors import DTensorLayout

__all__ = ["InMemoryTensors", "TensorSource"]


class TensorSource(Protocol):
    """Where the tensors of a run's state are read from, by name: a checkpoint, or what a worker had."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def load(self, names: Iterable[str] | None = None) -> dict[str, Tensor]: ...

    def shape(self, name: str) -> torch.Size: ...

    def dtype(self, name: str) -> torch.dtype: ...


class InMemoryTensors:
    """Local parts by name, on the CPU or on this worker's device; those with a layout are returned as DTensors.

    `parameters` are by their full names; `prefix` comes before them in the names of the tensors, and the entry behind.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        layouts: Mapping[str, DTensorLayout],
        *,
        prefix: str,
        parameters: Mapping[str, Tensor],
    ) -> None:
        self._tensors, self._layouts, self._prefix, self._parameters = tensors, layouts, prefix, parameters

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self._tensors if name.startswith(self._prefix))

    def load(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the tensors of these names (None: all)."""
        return {name: self._whole(name) for name in (self.names if names is None else names)}

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor, of one that is split that of the whole."""
        layout = self._layouts.get(name)
        return self._tensors[name].shape if layout is None else torch.Size(layout.shape)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._tensors[name].dtype

    def _whole(self, name: str) -> Tensor:
        layout = self._layouts.get(name)
        if layout is None:
            return self._tensors[name]
        owner = name.removeprefix(self._prefix).rpartition(".")[0]
        return layout.wrap(self._tensors[name], like=self._parameters[owner])
