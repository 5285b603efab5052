"""Penalties on parameters (L2, orthogonality, a spectral norm), right under every layout.

A penalty is a function of a whole parameter. It does not depend on data, so it is computed once in a step, after the
gradients were averaged: its gradient is added to theirs, and its value to the loss. So the step is that of one process
whose loss has the penalty in it, and no micro-batch waits for it.

Where a parameter is split over workers, they gather it, all compute the penalty, and each keeps its part of the
gradient. Where workers have different parameters (stages, experts), each computes for its own, and the values are added
up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.group import total
from paceline.comm.sharded_tensors import TensorSlice, full_tensor, part_like

if TYPE_CHECKING:
    from paceline.parallel.tensor.plan import ParameterSplit
    from paceline.worker.topology.parallel_groups import ParallelGroups, StateOwner
    from paceline.worker.topology.recorded_groups import RecordedTensorGroup

__all__ = ["Penalty", "PenaltyTarget", "WeightPenalty", "targets_of"]

Penalty = Callable[[str, Tensor], Any]  # of a parameter's name and the whole parameter: 0-d, or None for no penalty


class PenaltyTarget:
    """One parameter: its name in its model, how it is split, and which worker of the replica counts its value."""

    def __init__(
        self,
        name: str,
        parameter: Parameter,
        *,
        split: tuple[ParameterSplit, RecordedTensorGroup] | None,
        owner: StateOwner | None,
    ) -> None:
        self.name, self.parameter, self.split, self.owner = name, parameter, split, owner

    def whole(self) -> Tensor:
        """Return the whole parameter, detached; the workers that have parts of it all call this, and it blocks."""
        found = full_tensor(self.parameter)
        if self.split is None:
            return found
        split, holders = self.split
        return split.gathered(found, holders)

    def part(self, gradient: Tensor) -> Tensor:
        """Return this worker's part of a gradient of the whole."""
        cut = None
        if self.split is not None:
            split, holders = self.split
            cut = TensorSlice(split.shape, split.dim, split.ranges(holders.index))
        return part_like(gradient, self.parameter, cut)


class WeightPenalty:
    """Computes the penalty of some parameters, and its gradients."""

    def __init__(self, penalty: Penalty, targets: Sequence[PenaltyTarget], *, axes: ParallelGroups) -> None:
        """`targets`: in the same order on all workers of a replica, those that are elsewhere (on meta) included."""
        self._penalty, self._targets, self._axes = penalty, targets, axes
        self._free: set[str] = set()  # names of parameters without a penalty: they are not gathered again

    def compute(self) -> tuple[float, list[tuple[Parameter, Tensor]]]:
        """Return the penalty over all parameters that are trained, and its gradients for those that are here.

        All workers of the replica must call it. Raises TypeError or ValueError where the function returns no number.
        """
        common: list[Tensor] = []
        own: list[Tensor] = []  # that only this worker counts
        gradients: list[tuple[Parameter, Tensor]] = []
        for target in self._targets:
            parameter = target.parameter
            if parameter.is_meta or not parameter.requires_grad or target.name in self._free:
                continue
            whole = target.whole().requires_grad_()
            with torch.enable_grad():
                value = self._penalty(target.name, whole)
            if value is None:
                self._free.add(target.name)
                continue
            value = _single(target.name, value)
            if value.requires_grad:
                gradient: Any = torch.autograd.grad(value, whole, allow_unused=True)[0]
                if gradient is not None:
                    gradients.append((parameter, target.part(gradient)))
            if target.owner is None:
                common.append(value.detach().double())
            elif self._axes.parted.index == self._axes.place_of(target.owner):
                own.append(value.detach().double())
        found = float(torch.stack(common).sum()) if common else 0.0
        if self._axes.parted.size > 1:
            mine = float(torch.stack(own).sum()) if own else 0.0
            device = self._targets[0].parameter.device if self._targets else torch.device("cpu")
            device = torch.device("cpu") if device.type == "meta" else device
            found += total(self._axes.parted, [mine], what="the penalty on parameters", device=device)[0]
        return found, gradients


def _single(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float64)
    if value.numel() != 1:
        raise ValueError(
            f"penalty({name!r}, parameter) returned shape {list(value.shape)}; it must return one number (0-d), for "
            "example 1e-4 * parameter.pow(2).sum(), or None where the parameter has no penalty"
        )
    return value.reshape(())


def targets_of(
    model: nn.Module,
    parameters: Sequence[tuple[str, Parameter]],
    *,
    splits: dict[str, tuple[ParameterSplit, RecordedTensorGroup]],
    owners: dict[str, StateOwner],
) -> list[PenaltyTarget]:
    """Return the targets of a model's `parameters`, by their full names, to which `splits` and `owners` refer."""
    short = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        PenaltyTarget(short.get(id(one), name), one, split=splits.get(name), owner=owners.get(name))
        for name, one in parameters
    ]
