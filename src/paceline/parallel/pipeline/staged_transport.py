"""Transfers between stages whose workers share a device: tensors go through the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.group import copy_into
from paceline.parallel.pipeline.stage_transfer import PendingTransfer, StageTransport

__all__ = ["HostStagedTransport"]


class HostStagedTransport:
    """Moves tensors of `device` over a transport that takes those of the host. Both copies are ordered by the current
    stream; that to the host waits for the device."""

    def __init__(self, over: StageTransport, *, device: torch.device) -> None:
        self._over, self._device = over, device

    def make_room(self, num_bytes: int) -> None:
        self._over.make_room(num_bytes)

    def send(self, tensor: Tensor, *, to: int, what: str, way: str) -> PendingTransfer:
        if tensor.device.type == self._device.type:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
        return self._over.send(tensor, to=to, what=what, way=way)

    def receive(self, tensor: Tensor, *, source: int, what: str, way: str) -> PendingTransfer:
        if tensor.device.type != self._device.type:
            return self._over.receive(tensor, source=source, what=what, way=way)
        came = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return _StagedReceive(self._over.receive(came, source=source, what=what, way=way), tensor, came)


class _StagedReceive:
    """A tensor that is copied to the device when it has come; only once."""

    def __init__(self, transfer: PendingTransfer, target: Tensor, came: Tensor) -> None:
        self._transfer, self._target = transfer, target
        self._came: Tensor | None = came

    def wait(self) -> None:
        self._transfer.wait()
        came, self._came = self._came, None
        if came is not None:
            copy_into(self._target.detach(), came)
