"""Buckets: gradients that travel together in one flat buffer.

Backward reaches the last layers first, so buckets are filled from the last parameter to the first; each bucket can
leave while backward still works on earlier layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.codec.base import Codec, Rounds
from paceline.comm.group import Transfer, WorkerGroup

__all__ = ["Bucket", "assign"]

Named = tuple[str, Parameter]


def assign(parameters: Sequence[Named], *, bucket_bytes: int) -> list[list[Named]]:
    """Divide parameters, last first, into runs of one dtype and device of at most `bucket_bytes` (or one parameter)."""
    runs: list[list[Named]] = []
    kind: tuple[torch.dtype, torch.device] | None = None
    filled = 0
    for name, parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        if kind != (parameter.dtype, parameter.device) or filled + size > bucket_bytes:
            runs.append([])
            kind, filled = (parameter.dtype, parameter.device), 0
        runs[-1].append((name, parameter))
        filled += size
    return runs


class Bucket:
    """One flat buffer, a view of it per parameter, and the exchange under way.

    `depart` copies the gradients in and starts the codec's first round; `land` walks the remaining rounds, blocking,
    and leaves the sum over replicas in each parameter's `grad`.
    """

    def __init__(self, parameters: Sequence[Named], *, group: WorkerGroup, codec: Codec) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.num_bytes_sent = 0
        self._group, self._codec = group, codec
        self._what = f"all_reduce of {_span(self.names)}"
        first = self.parameters[0]
        self._flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
        self._views = _views(self._flat, self.parameters)
        self._rounds: Rounds | None = None
        self._payload: Tensor | None = None
        self._transfer: Transfer | None = None

    def depart(self) -> None:
        """Start to sum the gradients over the replicas; a parameter without a gradient contributes zeros."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view  # frees the gradient that autograd made
        self._rounds = self._codec.exchange(self._flat)
        self._send(next(self._rounds))

    def land(self) -> None:
        """Block until the exchange is over; every parameter's `grad` then holds the sum."""
        if self._rounds is None or self._transfer is None or self._payload is None:
            raise RuntimeError("land() without depart()")
        while True:
            self._transfer.wait()
            try:
                payload = self._rounds.send(self._payload)
            except StopIteration:
                break
            self._send(payload)
        self._rounds = self._payload = self._transfer = None

    def scale(self, factor: float) -> None:
        """Multiply all gradients of the bucket."""
        self._flat.mul_(factor)

    def gradients(self) -> list[Tensor]:
        """All gradients, in as few tensors as possible."""
        return [self._flat]

    def _send(self, payload: Tensor) -> None:
        self._payload = payload
        self.num_bytes_sent += payload.numel() * payload.element_size()
        self._transfer = self._group.all_reduce(payload, what=self._what)


class StayingBucket:
    """The bucket of a group of one: gradients stay where autograd made them."""

    def __init__(self, parameters: Sequence[Named]) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.num_bytes_sent = 0

    def depart(self) -> None:
        return

    def land(self) -> None:
        return

    def scale(self, factor: float) -> None:
        for gradient in self.gradients():
            gradient.mul_(factor)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def _views(flat: Tensor, parameters: Sequence[Parameter]) -> list[Tensor]:
    """One view per parameter with the parameter's own strides, as optimizers prefer."""
    views: list[Tensor] = []
    offset = 0
    for parameter in parameters:
        count = parameter.numel()
        if _is_dense(parameter):
            views.append(flat.as_strided(parameter.size(), parameter.stride(), offset))
        else:
            views.append(flat[offset : offset + count].view(parameter.size()))
        offset += count
    return views


def _is_dense(tensor: Tensor) -> bool:
    """Whether the strides cover numel() elements without holes or overlap, in some order of dims."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[-1]} .. {names[0]} ({len(names)} gradients)"
