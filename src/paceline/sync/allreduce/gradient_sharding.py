"""How gradients are distributed over workers of one replica that run the same micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import local_part

__all__ = ["GradientSharding", "TensorParallelGradients"]


class GradientSharding(Protocol):
    """How gradients are distributed over workers that run the same micro-batches."""

    @property
    def group(self) -> WorkerGroup:
        """These workers."""
        ...

    def counts(self, parameter: Parameter) -> bool:
        """Return whether this worker's gradient of a parameter counts where all of theirs are added up, in a norm for
        example."""
        ...

    def adds_up(self, parameter: Parameter) -> bool:
        """Return whether each of them has a part of a sum, until it is completed."""
        ...

    def holders(self, parameter: Parameter) -> tuple[int, ...]:
        """Return which of them hold the very same numbers of a parameter, by index; () where each has its own."""
        ...

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Complete partial sums, in place, for all local parameters that any worker used; all must call it."""
        ...

    def add_up(self, parts: Sequence[tuple[Parameter, Tensor]]) -> None:
        """Replace these partial sums by their sum over the group, in place; each has the shape of its parameter's local
        part.

        All must call it, with the same parameters; blocks.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelGradients:
    """How gradients are distributed over a tensor parallel group."""

    group: WorkerGroup
    has_part: Callable[[Parameter], bool]  # the parameter is split; the others are whole on all of them
    is_partial: Callable[[Parameter], bool]  # the parameter is whole, and each worker has a part of its gradient's sum

    def counts(self, parameter: Parameter) -> bool:
        """Return whether the gradient is only here, or this is the first worker that holds it."""
        return self.group.index == 0 or self.has_part(parameter)

    def adds_up(self, parameter: Parameter) -> bool:
        return self.is_partial(parameter)

    def holders(self, parameter: Parameter) -> tuple[int, ...]:
        return () if self.has_part(parameter) else tuple(range(self.group.size))

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Sum what is a partial sum on each of them."""
        some = ((one, one.grad) for one in parameters if self.is_partial(one))
        self.add_up([(parameter, local_part(grad)) for parameter, grad in some if grad is not None])

    def add_up(self, parts: Sequence[tuple[Parameter, Tensor]]) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for _, part in parts:
            by_type.setdefault(part.dtype, []).append(part)
        for some in by_type.values():
            flat = torch.cat([one.reshape(-1) for one in some])
            self.group.all_reduce(flat, what="gradients of parameters between tensor parallel layers").wait()
            for part, values in zip(some, flat.split([one.numel() for one in some]), strict=True):
                part.copy_(values.view_as(part))
