"""How gradients are spread over workers of one replica that run the same micro-batches: who has which part of a sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import WorkerGroup
from paceline.comm.split import local_part

__all__ = ["CutGradients", "Spread"]


class Spread(Protocol):
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

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Complete what is a part of a sum, of all parameters here that anybody used, in place; all must call it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CutGradients:
    """How gradients are spread over the workers that cut layers together."""

    group: WorkerGroup
    has_part: Callable[[Parameter], bool]  # of a parameter that is cut; the others are whole on all of them
    is_partial: Callable[[Parameter], bool]  # the parameter is whole, and each worker has a part of its gradient's sum

    def counts(self, parameter: Parameter) -> bool:
        """Whether the gradient is here alone, or this is the first of those who have it."""
        return self.group.index == 0 or self.has_part(parameter)

    def adds_up(self, parameter: Parameter) -> bool:
        return self.is_partial(parameter)

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Sum what is a partial sum on each of them."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None and self.is_partial(parameter):
                by_type.setdefault(parameter.grad.dtype, []).append(local_part(parameter.grad))
        for some in by_type.values():
            flat = torch.cat([one.reshape(-1) for one in some])
            self.group.all_reduce(flat, what="gradients of what is between layers that are cut").wait()
            for gradient, values in zip(some, flat.split([one.numel() for one in some]), strict=True):
                gradient.copy_(values.view_as(gradient))
