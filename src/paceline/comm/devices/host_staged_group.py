"""A group whose device tensors travel through the host's memory, so that several workers may share one device.

NCCL refuses two members on one device. Here each tensor is copied to the host, goes the way of the host's tensors, and
is copied back. Both copies are ordered by the current stream, and the first one waits for the device. So it is slower
than NCCL, and every wait ends when a member is lost.

The host's way is shared memory; else gloo in runs of a fixed size and inside replicas, and sockets that admit no
stranger between the replicas of elastic runs (`worker.topology.device.backend_for`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.devices.routed_group import RoutedGroup
from paceline.comm.group import CompletedTransfer, Transfer, copy_into

__all__ = ["HostStagedGroup"]


class HostStagedGroup(RoutedGroup):
    """Two or more workers, whose tensors on `device` are copied to `base` and back."""

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        if not self._is_on_device(tensor):
            return super().all_reduce(tensor, what=what)
        if tensor.numel() == 0:
            return CompletedTransfer()
        on_host = _on_host(tensor)
        return _Staged(self.base.all_reduce(on_host, what=what), [(tensor, on_host)])

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        if not self._is_on_device(tensor):
            return super().begin_all_gather(tensor, out, what=what)
        rows = _room(out)
        return _Staged(self.base.begin_all_gather(_on_host(tensor), rows, what=what), [(out, rows)])

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        if not self._is_on_device(rows):
            return super().begin_all_to_all(rows, out, what=what)
        came = _room(out)
        return _Staged(self.base.begin_all_to_all(_on_host(rows), came, what=what), [(out, came)])

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        if not self._is_on_device(tensor):
            super().all_gather(tensor, out, what=what)
            return
        came = [_room(one) for one in out]
        self.base.all_gather(_on_host(tensor), came, what=what)
        _copy_back(out, came)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        if not self._is_on_device(out):
            super().reduce_scatter(parts, out, what=what)
            return
        came = _room(out)
        self.base.reduce_scatter([_on_host(part) for part in parts], came, what=what)
        _copy_back([out], [came])

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        if not self._is_on_device(parts[0]):
            super().all_to_all(parts, out, what=what)
            return
        came = [_room(one) for one in out]
        self.base.all_to_all([_on_host(part) for part in parts], came, what=what)
        _copy_back(out, came)

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        if not self._is_on_device(tensor):
            super().broadcast(tensor, source=source, what=what)
            return
        on_host = _on_host(tensor)
        self.base.broadcast(on_host, source=source, what=what)
        if source != self.index:
            _copy_back([tensor], [on_host])


class _Staged:
    """A transfer on the host, whose results are copied to the device when it has ended; only once."""

    def __init__(self, transfer: Transfer, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._transfer, self._pairs = transfer, pairs

    def wait(self) -> None:
        self._transfer.wait()
        pairs, self._pairs = self._pairs, []
        _copy_back([target for target, _ in pairs], [found for _, found in pairs])


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in the host's memory, contiguous; waits for the current stream's work on the tensor."""
    tensor = tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _room(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _copy_back(targets: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    for target, one in zip(targets, found, strict=True):
        copy_into(target.detach(), one)
