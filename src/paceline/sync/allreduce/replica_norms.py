"""What each replica's own gradients were, before they were summed: two numbers for each, which ride in the tally.

They are what says how much gradients of parts of a batch differ from their mean. A replica's squared norm is formed
where its gradients are in the processor's cache anyway: in a bucket that has just been filled. Counted are parameters
of which a replica has its own gradient before the sum: not those whose gradients its workers have parts of until then
(norms between layers that are cut, embeddings that stages share), and not those that others sum (experts).

A replica that has no other beside it is measured by the first of its micro-batches.
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
    """A part of the batch, and the gradient that was made of it, scaled as the sum of all parts is."""

    weight: float  # in the mean over the batch
    square: float  # of the gradient's norm


class ReplicaNorms:
    """What is told of the parts of one walk."""

    def __init__(self, group: WorkerGroup, *, is_measured: Callable[[Parameter], bool]) -> None:
        """`group`: the replicas. `is_measured(parameter)`: on one of those workers of a replica who have the same."""
        self.is_measured = is_measured
        self._group = group
        self._first: tuple[float, Tensor] | None = None

    def begin(self) -> None:
        """A walk begins."""
        self._first = None

    @property
    def num_numbers(self) -> int:
        """How many numbers ride along."""
        return 2 * self._group.size

    def note_first(self, parameters: Iterable[Parameter], *, weight: float) -> None:
        """The first micro-batch's gradients are here, and nothing else."""
        if self._group.size == 1:
            self._first = weight, square_of(filter(self.is_measured, parameters))

    def told(self, weight: float, squares: Sequence[Tensor]) -> list[float]:
        """Return what this worker adds to the tally: its replica's weight, and the squares of its buckets."""
        if self._first is not None:
            weight, square = self._first[0], float(self._first[1])
        else:
            square = float(torch.stack(list(squares)).sum()) if squares else 0.0
        numbers = [0.0] * self.num_numbers
        numbers[2 * self._group.index : 2 * self._group.index + 2] = weight, square
        return numbers

    @staticmethod
    def read(numbers: Sequence[float]) -> list[ReplicaNorm]:
        """Return the parts that a tally tells of."""
        return [ReplicaNorm(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]


def square_of(parameters: Iterable[Parameter], *, device: torch.device | None = None) -> Tensor:
    """The squared norm of what is here of some parameters' gradients, 0-d, in single precision or better; on `device`
    where there is none, too."""
    found = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    dense = [one.coalesce().values() if one.is_sparse else one for one in found]
    wide = [one.float() if one.dtype in (torch.bfloat16, torch.float16) else one for one in dense if one.numel()]
    return torch.nn.utils.get_total_norm(wide).square() if wide else torch.zeros((), device=device)
