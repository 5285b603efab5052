"""The workers that cut layers, share sequences or spread experts, as models use them: noted in the ring."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.group import WorkerGroup
from paceline.parallel.tensor.collectives import Traffic

__all__ = ["Cutters", "Exchangers", "Sharers"]


class Cutters:
    """Those who cut layers."""

    what = "a layer that is cut"

    def __init__(self, group: WorkerGroup) -> None:
        self.index, self.size = group.index, group.size
        self.traffic = Traffic()
        self.waited_s = 0.0  # for the others, in all; on a GPU nothing is waited for
        self.is_still = False
        self._group = group

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of what was asked of the group, in all."""
        return sum(self.traffic.num_bytes.values())

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """While it lasts nothing moves, and results have the right shapes alone: for a look at where a forward goes,
        which each worker takes by itself."""
        former, self.is_still = self.is_still, True
        try:
            yield
        finally:
            self.is_still = former

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of everybody's tensor, in new memory."""
        out = tensor.clone(memory_format=torch.contiguous_format)
        if self.is_still:
            return out
        self._timed("all_reduce", out, lambda what: self._group.all_reduce(out, what=what).wait())
        return out

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return everybody's tensor, by index."""
        if self.is_still:
            return [tensor] * self.size
        whole = tensor.new_empty(self.size, *tensor.shape)
        parts = list(whole.unbind())
        self._timed("all_gather", whole, lambda what: self._group.all_gather(tensor.contiguous(), parts, what=what))
        return parts

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        """Return the sum of what everybody has at this worker's place in `parts`."""
        if self.is_still:
            return parts[self.index].clone()
        whole = torch.stack(parts)
        out, given = torch.empty_like(whole[0]), whole.unbind()
        self._timed("reduce_scatter", whole, lambda what: self._group.reduce_scatter(given, out, what=what))
        return out

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send `parts[k]` to worker k, and return what each worker sent here, which has `shapes[k]`."""
        if self.is_still:
            return [parts[0].new_zeros(shape) for shape in shapes]
        given = [part.contiguous() for part in parts]
        out = [parts[0].new_empty(shape) for shape in shapes]
        num_bytes = sum(part.numel() * part.element_size() for part in given)
        self._timed("all_to_all", num_bytes, lambda what: self._group.all_to_all(given, out, what=what))
        return out

    def _timed(self, kind: str, moved: Tensor | int, move: Callable[[str], None]) -> None:
        """Do a collective about a whole tensor, or so many bytes."""
        began = time.perf_counter()
        move(f"{kind} of {self.what}")
        self.waited_s += time.perf_counter() - began
        self.traffic.note(kind, moved if isinstance(moved, int) else moved.numel() * moved.element_size())


class Sharers(Cutters):
    """Those who share sequences."""

    what = "a shared sequence"


class Exchangers(Cutters):
    """Those who spread experts, and exchange tokens."""

    what = "tokens and their experts"

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first `sent[0]` rows to worker 0, the next to worker 1 and so on; return what came, by worker."""
        came = rows.new_empty(sum(received), *rows.shape[1:])
        parts, out = rows.split(list(sent)), came.split(list(received))
        num_bytes = sum(part.nbytes for part in parts) - parts[self.index].nbytes
        self._timed("all_to_all", num_bytes, lambda what: self._group.all_to_all(parts, out, what=what))
        return came
