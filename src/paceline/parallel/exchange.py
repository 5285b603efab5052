"""The two collectives of sharded models, as `fully_shard` calls them, noted in the ring of what the worker does."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import WorkerGroup
from paceline.comm.ring import Ring

__all__ = ["Gather", "Scatter", "Traffic"]


class Traffic:
    """What one worker's sharded models exchange with the others of its replica."""

    def __init__(self) -> None:
        self.trail = 0  # a hash of the units that were gathered, in their order; whoever looks at it sets it back
        self.waited_s = 0.0  # for the others, in all; on a GPU nothing is waited for
        self.num_bytes_sent = 0  # handed to the wire, in all


class Exchange:
    """A collective of one unit of a model; `group` is what the ring calls the workers. Tensors of the CPU go `over` a
    group of the same ones, where given, which notes in the ring what it does."""

    def __init__(self, ring: Ring, *, group: str, unit: str, traffic: Traffic, over: WorkerGroup | None = None) -> None:
        self._ring, self._group, self._unit, self._traffic, self._over = ring, group, unit, traffic, over

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for what is sent or received."""
        return torch.empty(size, dtype=dtype, device=device)

    def _shared(self, tensor: Tensor) -> WorkerGroup | None:
        return None if tensor.is_cuda else self._over

    @contextlib.contextmanager
    def _noted(self, kind: str, tensor: Tensor, *, is_async: bool) -> Iterator[str]:
        """Enter a collective that sends `tensor`, and say what it is. After an error the ring shows it still: it may be
        the cause."""
        what = f"{kind} of {self._unit}"
        self._traffic.num_bytes_sent += tensor.numel() * tensor.element_size()
        is_noted = self._shared(tensor) is None
        call = -1
        if is_noted:
            call = self._ring.enter(kind, what, dtype=tensor.dtype, numel=tensor.numel(), group=self._group)
            if is_async or tensor.is_cuda:  # torch waits later, or in a stream
                yield what
                return
            self._ring.wait(call)
        began = time.perf_counter()
        yield what
        self._traffic.waited_s += time.perf_counter() - began
        if is_noted:
            self._ring.leave()


class Gather(Exchange):
    """Collects a unit's parameters: each worker gets the rows of all."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._traffic.trail = zlib.crc32(self._unit.encode(), self._traffic.trail)
        with self._noted("all_gather", input_tensor, is_async=async_op) as what:
            if (over := self._shared(input_tensor)) is not None:
                return over.all_gather(input_tensor, output_tensor.view(over.size, -1).unbind(), what=what)
            # `all_gather_single` is its name from torch 2.13 on, which warns of the other one.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Exchange):
    """Sums a unit's gradients: each worker gets the sum of its own rows."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._noted("reduce_scatter", input_tensor, is_async=async_op) as what:
            if (over := self._shared(input_tensor)) is not None:
                return over.reduce_scatter(input_tensor.view(over.size, -1).unbind(), output_tensor, what=what)
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # as above
            return scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
