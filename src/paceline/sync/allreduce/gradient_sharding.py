"""How gradients are spread over workers of one replica that run the same micro-batches: who has which part of a sum."""

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
    """How gradients are spread over workers that run the same micro-batches."""

    @property
    def group(self) -> WorkerGroup:
        """These workers."""
        ...

    def counts(self, parameter: Parameter) -> bool:
        """Whether this worker's gradient of a parameter counts where all of theirs are added up, in a norm say."""
        ...

    def adds_up(self, parameter: Parameter) -> bool:
        """Whether each of them has a part of a sum, until it is completed."""
        ...

    def holders(self, parameter: Parameter) -> tuple[int, ...]:
        """Who of them have the very same numbers of a parameter, by their indices; () where each has its own."""
        ...

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Complete what is a part of a sum, of all parameters here that anybody used, in place; all must call it."""
        ...

    def add_up(self, parts: Sequence[tuple[Parameter, Tensor]]) -> None:
        """Put sums in the place of these parts, in place: each in the shape of what is here of its parameter, whose
        gradients add up. All must call it, with the same parameters; blocks."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelGradients:
    """How gradients are spread over the workers that cut layers together."""

    group: WorkerGroup
    has_part: Callable[[Parameter], bool]  # of a parameter that is cut; the others are whole on all of them
    is_partial: Callable[[Parameter], bool]  # the parameter is whole, and each worker has a part of its gradient's sum

    def counts(self, parameter: Parameter) -> bool:
        """Whether the gradient is here alone, or this is the first of those who have it."""
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
            self.group.all_reduce(flat, what="gradients of what is between layers that are cut").wait()
            for part, values in zip(some, flat.split([one.numel() for one in some]), strict=True):
                part.copy_(values.view_as(part))
