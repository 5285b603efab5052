"""The workers that share a sequence: what a group has to be able to do, over a process group, and in threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import SyncError
from paceline.parallel.tensor.collectives import TensorGroup, TorchGroup
from paceline.parallel.tensor.emulated import EmulatedGroup, emulate

__all__ = ["ContextGroup", "EmulatedContext", "TorchContext", "emulated"]

T = TypeVar("T")
Shape = tuple[int, ...]


class ContextGroup(TensorGroup, Protocol):
    """All workers must make the same calls in the same order; each call blocks."""

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Send `parts[k]` to worker k, and return what each worker sent here, which has `shapes[k]`."""
        ...


class TorchContext(TorchGroup):
    """Two or more workers, over a torch process group; no default group is needed."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self._process_group: Any = process_group

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        sent = torch.cat([part.reshape(-1) for part in parts])
        lengths = [torch.Size(shape).numel() for shape in shapes]
        received = sent.new_empty(sum(lengths))
        work = self._process_group.alltoall_base(received, sent, lengths, [part.numel() for part in parts])
        try:
            work.wait()
        except RuntimeError as error:  # torch has no narrower type for a lost peer
            raise SyncError(f"lost contact with a peer during the all-to-all of a sequence: {error}") from error
        self.traffic.note("all_to_all", sent.numel() * sent.element_size())
        return [one.view(shape) for one, shape in zip(received.split(lengths), shapes, strict=True)]


class EmulatedContext:
    """One thread's end of a group of threads."""

    def __init__(self, group: EmulatedGroup) -> None:
        self.index, self.size, self.traffic = group.index, group.size, group.traffic
        self.all_reduce, self.all_gather, self.reduce_scatter = (
            group.all_reduce,
            group.all_gather,
            group.reduce_scatter,
        )

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        everybody = [self.all_gather(part) for part in parts]  # by receiver, then by sender
        received = everybody[self.index]
        for sender, (one, shape) in enumerate(itertools.zip_longest(received, shapes)):
            if tuple(one.shape) != tuple(shape):
                raise SyncError(f"worker {sender} sent {tuple(one.shape)}, but {tuple(shape)} was expected")
        return received


def emulated(size: int, work: Callable[[EmulatedContext], T]) -> list[T]:
    """Return what `work(group)` returned as each of `size` workers, threads of this process."""
    return emulate(size, lambda group: work(EmulatedContext(group)))
