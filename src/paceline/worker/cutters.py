"""The workers that cut layers or share sequences, as models use them: over the run's transports, noted in the ring."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import WorkerGroup
from paceline.comm.ring import Ring
from paceline.parallel.context.group import TorchContext
from paceline.parallel.tensor.collectives import Traffic

__all__ = ["Cutters", "Sharers"]


class Cutters:
    """Those who cut layers. Sums go over `group`, which may be shared memory; the rest over torch's group of the
    same workers.
    """

    what = "a layer that is cut"

    def __init__(self, group: WorkerGroup, over_torch: dist.ProcessGroup, *, ring: Ring, name: str) -> None:
        """`name`: what the ring calls these workers."""
        self.index, self.size = group.index, group.size
        self.traffic = Traffic()
        self.waited_s = 0.0  # for the others, in all; on a GPU nothing is waited for
        self._group, self._ring, self._name = group, ring, name
        self._torch = TorchContext(over_torch)

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of what was asked of the group, in all."""
        return sum(traffic.num_bytes[kind] for traffic in (self.traffic, self._torch.traffic) for kind in traffic.calls)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of everybody's tensor, in new memory."""
        out = tensor.clone(memory_format=torch.contiguous_format)
        began = time.perf_counter()
        self._group.all_reduce(out, what=f"all_reduce of {self.what}").wait()
        self.waited_s += time.perf_counter() - began
        self.traffic.note("all_reduce", out.numel() * out.element_size())
        return out

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return everybody's tensor, by index."""
        return self._noted("all_gather", tensor, lambda: self._torch.all_gather(tensor))

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        """Return the sum of what everybody has at this worker's place in `parts`."""
        return self._noted("reduce_scatter", parts[0], lambda: self._torch.reduce_scatter(parts))

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send `parts[k]` to worker k, and return what each worker sent here, which has `shapes[k]`."""
        return self._noted("all_to_all", parts[0], lambda: self._torch.all_to_all(parts, shapes))

    def _noted(self, kind: str, tensor: Tensor, move: Callable[[], Any]) -> Any:
        """Do a collective. After an error the ring shows it still: it may be the cause."""
        what = f"{kind} of {self.what}"
        call = self._ring.enter(kind, what, dtype=tensor.dtype, numel=tensor.numel(), group=self._name)
        self._ring.wait(call)
        began = time.perf_counter()
        result = move()
        self.waited_s += time.perf_counter() - began
        self._ring.leave()
        return result


class Sharers(Cutters):
    """Those who share sequences."""

    what = "a shared sequence"
