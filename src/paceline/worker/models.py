"""The models of one worker as they were when they were prepared, and the sums of their gradients over all workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.group import WorkerGroup
from paceline.comm.ring import Ring
from paceline.parallel.apply import place, send_from_first
from paceline.parallel.shard import ShardedModel, Shards
from paceline.plan import Plan
from paceline.sync.allreduce import GradientSum
from paceline.sync.buckets import Named
from paceline.worker.axes import Axes

__all__ = ["Models"]


class Models:
    """Knows which parameters are averaged; one `GradientSum` for each set of models that a walk is about."""

    def __init__(self, plan: Plan, *, group: WorkerGroup, axes: Axes, shards: Shards, ring: Ring) -> None:
        self._plan, self._group, self._axes, self._shards, self._ring = plan, group, axes, shards, ring
        self._parameters: dict[nn.Module, list[Named]] = {}  # of each model, as they were then
        self._sums: dict[tuple[int, ...], GradientSum] = {}  # by the models that a walk is about
        self._num_checked: dict[Optimizer, int] = {}  # parameters of each prepared optimizer

    def __contains__(self, model: nn.Module) -> bool:
        return model in self._parameters

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def place(self, model: nn.Module, *, device: torch.device, is_fresh: bool) -> None:
        """Convert, move, wrap and split a model as the plan says. `is_fresh`: no checkpoint will fill it."""
        place(model, self._plan, device=device, split=lambda whole: self._split(whole, is_fresh=is_fresh))

    def add(self, model: nn.Module, name: str) -> None:
        """A model was prepared under this name."""
        self._parameters[model] = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]

    def sum_over(self, models: Sequence[nn.Module]) -> GradientSum:
        """The sum of the gradients of these models together."""
        key = tuple(id(model) for model in models)
        if key not in self._sums:
            named = [pair for model in models for pair in self._parameters[model]]
            self._sums[key] = GradientSum(
                named,
                group=self._axes.across,
                sync=self._plan.sync,
                wire=self._plan.wire,
                everybody=self._group,
                inside=self._axes.inside,
                is_used=self._shards.is_used,
            )
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
        across = sum(gradients.num_bytes_sent for gradients in self._sums.values())
        return across + self._shards.traffic.num_bytes_sent

    def _split(self, model: nn.Module, *, is_fresh: bool) -> None:
        """Split a whole model's state over the workers of this replica, as the layout says."""
        axes = self._axes
        if axes.mesh is None:
            return
        if is_fresh:
            send_from_first([*model.parameters(), *model.buffers()], self._group)
        self._shards.add(
            ShardedModel(
                model,
                mesh=axes.mesh,
                zero=self._plan.layout.zero,
                precision=self._plan.compute.precision,
                ring=self._ring,
                group=axes.shard_name,
                traffic=self._shards.traffic,
            )
        )
