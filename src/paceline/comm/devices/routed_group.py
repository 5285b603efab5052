"""A group that takes a device's tensors one way, and everything else to a group of the host's.

Votes, objects and barriers are tensors of the CPU. They stay on the host's group, whose waits end when a member is
lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Transfer, WorkerGroup

__all__ = ["RoutedGroup"]


class RoutedGroup:
    """Two or more workers. `base` takes the host's tensors; subclasses take those of `device`."""

    def __init__(self, base: WorkerGroup, *, device: torch.device) -> None:
        self.index, self.size, self.hosts = base.index, base.size, base.hosts
        self.base, self.device = base, device

    @property
    def shares_memory(self) -> bool:
        return self.base.shares_memory

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == self.device.type:
            return torch.zeros(numel, dtype=dtype, device=device)
        return self.base.allocate(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        return self._for_host(tensor).all_reduce(tensor, what=what)

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        return self._for_host(tensor).begin_all_gather(tensor, out, what=what)

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        return self._for_host(rows).begin_all_to_all(rows, out, what=what)

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        self._for_host(tensor).all_gather(tensor, out, what=what)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        self._for_host(out).reduce_scatter(parts, out, what=what)

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        self._for_host(parts[0]).all_to_all(parts, out, what=what)

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        self._for_host(tensor).broadcast(tensor, source=source, what=what)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._for_host(None).gather_objects(value)

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        return self._for_host(None).broadcast_object(value, source=source)

    def barrier(self) -> None:
        self._for_host(None).barrier()

    def settle(self) -> None:
        self.base.settle()

    def close(self) -> None:
        self.base.close()

    def _for_host(self, tensor: Tensor | None) -> WorkerGroup:
        """Return the group that takes a tensor of the host, or an object."""
        return self.base

    def _is_on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type
