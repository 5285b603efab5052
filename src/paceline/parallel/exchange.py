"""The two collectives of sharded models, as `fully_shard` calls them, each noted in the ring of what the worker does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.ring import Ring

__all__ = ["Gather", "Scatter"]


class Noted:
    """A collective of one unit of a model; `group` is what the ring calls the workers."""

    def __init__(self, ring: Ring, *, group: str, what: str) -> None:
        self._ring, self._group, self._what = ring, group, what

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for what is sent or received."""
        return torch.empty(size, dtype=dtype, device=device)

    def _enter(self, kind: str, tensor: Tensor, *, blocks: bool) -> None:
        what = f"{kind} of {self._what}"
        call = self._ring.enter(kind, what, dtype=tensor.dtype, numel=tensor.numel(), group=self._group)
        if blocks:
            self._ring.wait(call)


class Gather(Noted):
    """Collects a unit's parameters: each worker gets the rows of all. `begins` is called before."""

    def __init__(self, ring: Ring, *, group: str, what: str, begins: Callable[[], None]) -> None:
        super().__init__(ring, group=group, what=what)
        self._begins = begins

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._begins()
        blocks = not async_op and not input_tensor.is_cuda
        self._enter("all_gather", input_tensor, blocks=blocks)
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        if blocks:
            self._ring.leave()
        return work


class Scatter(Noted):
    """Sums a unit's gradients: each worker gets the sum of its own rows."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        blocks = not async_op and not input_tensor.is_cuda
        self._enter("reduce_scatter", input_tensor, blocks=blocks)
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if blocks:
            self._ring.leave()
        return work
