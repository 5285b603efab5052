"""Buckets: gradients that travel together in one flat buffer.

Backward reaches the last layers first, so buckets are filled from the last parameter to the first; each bucket can
leave while backward still works on earlier layers. Of parameters that are split over the workers of a replica a bucket
holds the rows that are here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.codec.base import Codec, Rounds
from paceline.comm.group import Transfer, WorkerGroup
from paceline.comm.split import as_local_of, local_part

__all__ = ["Bucket", "Named", "StayingBucket", "assign"]

Named = tuple[str, Parameter]


def assign(parameters: Sequence[Named], *, bucket_bytes: int) -> list[list[Named]]:
    """Divide parameters, last first, into runs of one dtype and device of at most `bucket_bytes` (or one parameter)."""
    runs: list[list[Named]] = []
    is_open: dict[tuple[torch.dtype, torch.device], tuple[list[Named], int]] = {}  # run, bytes in it
    for name, parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        size = local_part(parameter).numel() * parameter.element_size()
        run, filled = is_open.get(kind, ([], bucket_bytes))
        if not run or filled + size > bucket_bytes:
            run, filled = [], 0
            runs.append(run)
        run.append((name, parameter))
        is_open[kind] = (run, filled + size)
    return runs


class Bucket:
    """One flat buffer, a view of it per parameter, and the exchange under way.

    `depart` copies the gradients in and starts the codec's first round; `land` walks the remaining rounds, blocking,
    and leaves the sum over replicas in each parameter's `grad`.
    """

    def __init__(self, parameters: Sequence[Named], *, group: WorkerGroup, codec: Codec, num_riders: int = 0) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.num_bytes_sent = 0
        self._group, self._codec = group, codec
        self._what = f"all_reduce of {_span(self.names)}"
        locals_here = [local_part(parameter) for parameter in self.parameters]
        first = locals_here[0]
        self.can_carry = codec.exact and first.dtype in (torch.float32, torch.float64)
        self._num_elements = sum(local.numel() for local in locals_here)
        self._num_sent = self._num_elements
        num_riders = num_riders if self.can_carry else 0
        self._flat = group.allocate(self._num_elements + num_riders, dtype=first.dtype, device=first.device)
        self._views = _views(self._flat, locals_here)
        self._gradients = [as_local_of(v, like=p) for v, p in zip(self._views, self.parameters, strict=True)]
        self._rounds: Rounds | None = None
        self._payload: Tensor | None = None
        self._transfer: Transfer | None = None

    def depart(self, riders: Sequence[float] = ()) -> None:
        """Start to sum the gradients over the replicas; a parameter without a gradient contributes zeros."""
        if self._transfer is not None:
            self._transfer.wait()  # of a walk that was given up: the others may still write to the buffer
        self._num_sent = self._num_elements + len(riders)
        if riders:
            self._flat[self._num_elements : self._num_sent] = torch.tensor(riders, dtype=self._flat.dtype)
        for parameter, view, gradient in zip(self.parameters, self._views, self._gradients, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(local_part(parameter.grad))
            parameter.grad = gradient  # frees the gradient that autograd made
        self._rounds = self._codec.exchange(self._flat[: self._num_sent])
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

    def riders(self) -> list[float]:
        """The sums of the numbers that travelled along."""
        return self._flat[self._num_elements : self._num_sent].tolist()

    def scale(self, factor: float) -> None:
        """Multiply all gradients of the bucket."""
        self._flat[: self._num_elements].mul_(factor)

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
        self.can_carry = False

    def depart(self, riders: Sequence[float] = ()) -> None:
        return

    def riders(self) -> list[float]:
        return []

    def land(self) -> None:
        return

    def scale(self, factor: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
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
