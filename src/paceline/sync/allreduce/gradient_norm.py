"""Norms of gradients of which other workers hold other parts: each counts what it has, and what several have once.

A worker's look at its own gradients, before they are summed: whose were not finite can only be said there.

The sum is not finite on all workers, whoever of them broke it. A gradient is looked at by its largest element, which is
kept as a tensor until somebody asks: on a GPU nobody waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import WorkerGroup, total
from paceline.comm.sharded_tensors import local_part
from paceline.sync.allreduce.gradient_sharding import GradientSharding

__all__ = ["GradientNorm", "NonFiniteCheck", "gradients_here", "is_finite"]


class GradientNorm:
    """The global norm of the gradients that are spread over these workers; all of them must ask for it."""

    def __init__(self, *, inside: WorkerGroup, spreads: Sequence[GradientSharding], device: torch.device) -> None:
        self._inside, self._spreads, self._device = inside, tuple(spreads), device

    @property
    def is_spread(self) -> bool:
        """Whether other workers hold other parts of the same gradients."""
        return self._inside.size > 1 or bool(self._spreads)

    def counts(self, parameter: Parameter) -> bool:
        """Whether this worker's part of a gradient counts where all parts are added up."""
        return all(spread.counts(parameter) for spread in self._spreads)

    def own_square(self, parameters: Sequence[Parameter]) -> float:
        """The square of the norm of what is here, and counts."""
        norm = _norm([parameter for parameter in parameters if self.counts(parameter)], None)
        return float(norm.to(torch.float64).square())

    def of_square(self, square: float, parameters: Sequence[Parameter]) -> Tensor:
        """The norm whose square is known, as `norm` gives it."""
        return torch.tensor(square, dtype=torch.float64, device=self._device).sqrt().to(_kind_of(parameters))

    def norm(
        self,
        parameters: Sequence[Parameter],
        dtype: torch.dtype | None,
        *,
        is_measured: Callable[[Parameter], bool] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the norm of all gradients, 0-d, and the square of that of the parameters that are measured, if any."""
        once = [parameter for parameter in parameters if self.counts(parameter)]
        norm = _norm(once, dtype)
        if not self.is_spread:
            return norm, None if is_measured is None else norm.detach().square()
        measured: list[Tensor] = []
        if is_measured is not None:
            some = [parameter for parameter in once if is_measured(parameter)]
            measured = [norm if len(some) == len(once) else _norm(some, dtype)]
        squares = torch.stack([one.to(device=self._device, dtype=torch.float64).square() for one in (norm, *measured)])
        for group in self._other_parts():
            group.all_reduce(squares, what="the norm of the gradients").wait()
        # Of those that hold the same, one counts; all need the norm in the precision of what they hold.
        kind = _kind_of(parameters) if dtype is None else dtype
        return squares[0].sqrt().to(kind), squares[1] if measured else None

    def num_broken(self, parameters: Sequence[Parameter]) -> float:
        """How many gradients, or parts of them, are not finite, on all workers together."""
        broken = float(sum(not bool(torch.isfinite(gradient).all()) for gradient in gradients_here(parameters)))
        for group in self._other_parts():
            broken = total(group, [broken], what="gradients that are not finite", device=self._device)[0]
        return broken

    def _other_parts(self) -> list[WorkerGroup]:
        """The groups over which the gradients' parts are spread, one after the other."""
        return [self._inside, *(spread.group for spread in self._spreads)]


def gradients_here(parameters: Iterable[Parameter]) -> list[Tensor]:
    """This worker's parts of all gradients; of one that is sparse, and coalesced, the rows that it has."""
    found = (local_part(parameter.grad) for parameter in parameters if parameter.grad is not None)
    return [one._values() if one.is_sparse else one for one in found]


def _kind_of(parameters: Sequence[Parameter]) -> torch.dtype:
    """The precision of what is here of their gradients."""
    kinds = [gradient.dtype for gradient in gradients_here(parameters)]
    return functools.reduce(torch.promote_types, kinds) if kinds else torch.float32


def _norm(parameters: Iterable[Parameter], dtype: torch.dtype | None) -> Tensor:
    gradients = gradients_here(parameters)
    return torch.nn.utils.get_total_norm(gradients if dtype is None else [one.to(dtype) for one in gradients])


class NonFiniteCheck:
    """What one worker's gradients of one walk were, in the order in which backward made them."""

    def __init__(self) -> None:
        self._largest: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Forget the walk before."""
        self._largest.clear()

    def at(self, name: str, gradient: Tensor) -> None:
        """Look at a parameter's gradient, if it was not yet."""
        if name not in self._largest and gradient.numel():
            self._largest[name] = _largest(gradient)

    def broken(self) -> tuple[str, ...]:
        """The parameters whose gradients were not finite, the one that backward reached first at the front."""
        return tuple(name for name, largest in self._largest.items() if not bool(torch.isfinite(largest)))


def is_finite(gradient: Tensor) -> bool:
    """Whether all elements are."""
    return not gradient.numel() or bool(torch.isfinite(_largest(gradient)))


def _largest(gradient: Tensor) -> Tensor:
    """The absolute value of the largest element, NaN where there is any; of a sparse gradient, of those that it has."""
    elements = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.linalg.vector_norm(elements, float("inf")) if elements.numel() else elements.new_zeros(())
