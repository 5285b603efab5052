"""Norms of gradients that are distributed over workers: each part counts, and what several workers hold counts once.

Also a check of a worker's own gradients before they are summed, because only there it is known whose were not finite:
the sum is not finite on all workers. A gradient is checked by its largest element. That is kept as a tensor until it is
asked for, so on a GPU nothing waits for it.
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

__all__ = ["GradientNorm", "NonFiniteCheck", "gradients_here", "is_finite", "require_real"]


class GradientNorm:
    """The global norm of gradients that are distributed over these workers; all of them must ask for it."""

    def __init__(
        self, *, shard_group: WorkerGroup, shardings: Sequence[GradientSharding], device: torch.device
    ) -> None:
        self._shard_group, self._shardings, self._device = shard_group, tuple(shardings), device

    @property
    def is_distributed(self) -> bool:
        """Whether other workers hold other parts of the same gradients."""
        return self._shard_group.size > 1 or bool(self._shardings)

    def counts(self, parameter: Parameter) -> bool:
        """Return whether this worker's part of a gradient counts where all parts are added up."""
        return all(sharding.counts(parameter) for sharding in self._shardings)

    def own_square(self, parameters: Sequence[Parameter]) -> float:
        """Return the square of the norm of the local parts that count."""
        norm = _norm([parameter for parameter in parameters if self.counts(parameter)], None)
        return float(norm.to(torch.float64).square())

    def of_square(self, square: float, parameters: Sequence[Parameter]) -> Tensor:
        """Return the norm with a known square, in the dtype that `norm` returns."""
        return torch.tensor(square, dtype=torch.float64, device=self._device).sqrt().to(_kind_of(parameters))

    def norm(
        self,
        parameters: Sequence[Parameter],
        dtype: torch.dtype | None,
        *,
        is_measured: Callable[[Parameter], bool] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the norm of all gradients, 0-d, and the square of that of the measured parameters, if any."""
        once = [parameter for parameter in parameters if self.counts(parameter)]
        norm = _norm(once, dtype)
        if not self.is_distributed:
            return norm, None if is_measured is None else norm.detach().square()
        measured: list[Tensor] = []
        if is_measured is not None:
            some = [parameter for parameter in once if is_measured(parameter)]
            measured = [norm if len(some) == len(once) else _norm(some, dtype)]
        squares = torch.stack([one.to(device=self._device, dtype=torch.float64).square() for one in (norm, *measured)])
        for group in self._other_parts():
            group.all_reduce(squares, what="the norm of the gradients").wait()
        # Only one of equal holders counts, but all need the norm in the precision of what they hold.
        kind = _kind_of(parameters) if dtype is None else dtype
        return squares[0].sqrt().to(kind), squares[1] if measured else None

    def num_broken(self, parameters: Sequence[Parameter]) -> float:
        """Return how many gradients, or parts of them, are not finite, on all workers together."""
        broken = float(sum(not bool(torch.isfinite(gradient).all()) for gradient in gradients_here(parameters)))
        for group in self._other_parts():
            broken = total(group, [broken], what="gradients that are not finite", device=self._device)[0]
        return broken

    def _other_parts(self) -> list[WorkerGroup]:
        """Return the groups over which the gradients' parts are distributed, one after the other."""
        return [self._shard_group, *(sharding.group for sharding in self._shardings)]


def gradients_here(parameters: Iterable[Parameter]) -> list[Tensor]:
    """Return this worker's parts of all gradients; of a sparse, coalesced one, the rows that it has."""
    found = (local_part(parameter.grad) for parameter in parameters if parameter.grad is not None)
    return [one._values() if one.is_sparse else one for one in found]


def require_real(named: Iterable[tuple[str, Parameter]]) -> None:
    """Raise ValueError for a complex parameter: numbers without an order cannot be clipped by value."""
    name = next((name for name, parameter in named if parameter.is_complex()), None)
    if name is not None:
        raise ValueError(f"clipping by value: {name} is complex, and has no largest value. Clip by the norm")


def _kind_of(parameters: Sequence[Parameter]) -> torch.dtype:
    """Return the precision of the local parts of their gradients; a norm of complex numbers is real."""
    kinds = [gradient.dtype.to_real() for gradient in gradients_here(parameters)]
    return functools.reduce(torch.promote_types, kinds) if kinds else torch.float32


def _norm(parameters: Iterable[Parameter], dtype: torch.dtype | None) -> Tensor:
    gradients = gradients_here(parameters)
    return torch.nn.utils.get_total_norm(gradients if dtype is None else [one.to(dtype) for one in gradients])


class NonFiniteCheck:
    """The finiteness of one worker's gradients of one gradient pass, in the order in which backward made them."""

    def __init__(self) -> None:
        self._largest: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Forget the previous gradient pass."""
        self._largest.clear()

    def at(self, name: str, gradient: Tensor) -> None:
        """Check a parameter's gradient, unless it was checked already."""
        if name not in self._largest and gradient.numel():
            self._largest[name] = _largest(gradient)

    def broken(self) -> tuple[str, ...]:
        """Return the parameters whose gradients were not finite, in the order in which backward reached them."""
        return tuple(name for name, largest in self._largest.items() if not bool(torch.isfinite(largest)))


def is_finite(gradient: Tensor) -> bool:
    """Return whether all elements are finite."""
    return not gradient.numel() or bool(torch.isfinite(_largest(gradient)))


def _largest(gradient: Tensor) -> Tensor:
    """Return the absolute value of the largest element, NaN if there is any; of a sparse gradient, of its rows."""
    elements = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.linalg.vector_norm(elements, float("inf")) if elements.numel() else elements.new_zeros(())
