"""The models of one worker as they were when they were prepared, and the sums of their gradients over all workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

from paceline.comm.group import WorkerGroup
from paceline.plan import Plan
from paceline.sync.allreduce import GradientSum
from paceline.sync.buckets import Named

__all__ = ["Models"]


class Models:
    """Knows which parameters are averaged; one `GradientSum` for each set of models that a walk is about."""

    def __init__(self, plan: Plan, *, group: WorkerGroup) -> None:
        self._plan, self._group = plan, group
        self._parameters: dict[nn.Module, list[Named]] = {}  # of each model, as they were then
        self._sums: dict[tuple[int, ...], GradientSum] = {}  # by the models that a walk is about
        self._num_checked: dict[Optimizer, int] = {}  # parameters of each prepared optimizer

    def __contains__(self, model: nn.Module) -> bool:
        return model in self._parameters

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def add(self, model: nn.Module, name: str) -> None:
        """A model was prepared under this name."""
        self._parameters[model] = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]

    def sum_over(self, models: Sequence[nn.Module]) -> GradientSum:
        """The sum of the gradients of these models together."""
        key = tuple(id(model) for model in models)
        if key not in self._sums:
            named = [pair for model in models for pair in self._parameters[model]]
            self._sums[key] = GradientSum(named, group=self._group, sync=self._plan.sync, wire=self._plan.wire)
        return self._sums[key]

    def check(self, optimizer: Optimizer) -> None:
        """Refuse parameters that nobody averages: those of models, or of parts of them, that were not there at
        `prepare(model)`. Raises ValueError."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._num_checked.get(optimizer) == len(held):
            return
        known = {id(parameter) for parameters in self._parameters.values() for _, parameter in parameters}
        strangers = sum(id(parameter) not in known for parameter in held)
        if strangers:
            raise ValueError(
                f"{type(optimizer).__name__} holds {strangers} parameters that were in no model when it was "
                "prepared: they would not be averaged. Replace or add layers before worker.prepare(model), then make "
                "the optimizer"
            )
        self._num_checked[optimizer] = len(held)

    def members_changed(self) -> None:
        """The members are others: forget what was made for the old ones."""
        for gradients in self._sums.values():
            gradients.members_changed()

    def num_bytes_sent(self) -> int:
        """What went to the wire so far."""
        return sum(gradients.num_bytes_sent for gradients in self._sums.values())
