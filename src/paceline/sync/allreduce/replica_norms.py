"""Norms of each replica's own gradients, before they are summed: two numbers each, in the step metadata.

They show how much gradients of parts of a batch differ from their mean (gradient noise). A replica's squared norm is
computed while its gradients are in the processor's cache: in a bucket that has just been filled. Only parameters with a
replica's own gradient before the sum count. Partial gradients (norms between split layers, embeddings that stages
share) and experts do not count.

A single replica is measured by the first of its micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import local_part

__all__ = ["ReplicaNorm", "ReplicaNorms", "square_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaNorm:
    """A part of the batch, and its gradient, scaled as the sum of all parts is."""

    weight: float  # in the mean over the batch
    square: float  # of the gradient's norm


class ReplicaNorms:
    """The norms of the parts of one gradient pass."""

    def __init__(self, group: WorkerGroup, *, is_measured: Callable[[Parameter], bool]) -> None:
        """`group`: the replicas. `is_measured(parameter)`: true on one of the replica's workers that hold the same
        gradient."""
        self.is_measured = is_measured
        self._group = group
        self._first: tuple[float, Tensor] | None = None

    def begin(self) -> None:
        """Begin a gradient pass."""
        self._first = None

    @property
    def num_numbers(self) -> int:
        """How many numbers are added to the step metadata."""
        return 2 * self._group.size

    def note_first(self, parameters: Iterable[Parameter], *, weight: float, factor: float = 1.0) -> None:
        """Record the first micro-batch's gradients, when nothing else has been added; they are to be multiplied by
        `factor`."""
        if self._group.size == 1:
            self._first = weight, square_of(filter(self.is_measured, parameters), factor=factor)

    def report(self, weight: float, squares: Sequence[Tensor]) -> list[float]:
        """Return what this worker adds to the step metadata: its replica's weight, and the squares of its buckets."""
        if self._first is not None:
            weight, square = self._first[0], float(self._first[1])
        else:
            square = float(torch.stack(list(squares)).sum()) if squares else 0.0
        numbers = [0.0] * self.num_numbers
        numbers[2 * self._group.index : 2 * self._group.index + 2] = weight, square
        return numbers

    @staticmethod
    def read(numbers: Sequence[float]) -> list[ReplicaNorm]:
        """Return the parts in the step metadata."""
        return [ReplicaNorm(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]


def square_of(parameters: Iterable[Parameter], *, device: torch.device | None = None, factor: float = 1.0) -> Tensor:
    """Return the squared norm of `factor` times the local parts of some parameters' gradients, 0-d, in single precision
    or better.

    Without any gradient it is a zero on `device`.
    """
    found = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    dense = [one.coalesce().values() if one.is_sparse else one for one in found]
    wide = [one.float() if one.dtype in (torch.bfloat16, torch.float16) else one for one in dense if one.numel()]
    return (torch.nn.utils.get_total_norm(wide) * factor).square() if wide else torch.zeros((), device=device)
