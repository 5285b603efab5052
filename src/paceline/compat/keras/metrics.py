"""Metrics over all workers: their variables are buffers of a prepared module, which are summed in each step.

Keras' metrics add up what they have seen (sums and counts, confusion matrices, counts by threshold). Each micro-batch
adds to the values of the step's beginning; what all have added is summed at the step's commit, with the gradients and
statistics. So values are those of all samples, equal on all workers after every step, in checkpoints, and right where a
step is done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import WorkerGroup, total
from paceline.compat.keras.the_keras import keras
from paceline.compat.keras.variables import VariablePlace, hold
from paceline.errors import PlanError

__all__ = ["MetricBuffers", "add_over_workers", "leaf_metrics", "require_additive"]


class MetricBuffers(nn.Module):
    """The variables of metrics, as buffers."""

    def __init__(self, metrics: Sequence[Any]) -> None:
        super().__init__()
        for number, metric in enumerate(metrics):
            for place, variable in enumerate(metric.variables):
                name = f"m{number}_{place}_{variable.name}".replace(".", "_").replace("/", "_")
                self.register_buffer(name, variable._value.detach().clone())
                hold(variable, VariablePlace(self, name))

    def forward(self) -> None:
        """There is none: the metrics write."""


def leaf_metrics(metrics: Sequence[Any]) -> list[Any]:
    """The metrics themselves, without those that hold others."""
    found: list[Any] = []
    for metric in metrics:
        inner = getattr(metric, "metrics", None) or getattr(metric, "_metrics", None)
        found += leaf_metrics(inner) if inner else [metric] if metric.variables else []
    return list(dict.fromkeys(found))


def require_additive(metric: Any, y: Any, y_pred: Any) -> None:
    """Raise PlanError where what a metric has of two halves is not the sum of what it has of each; the metric is reset.

    Keras' own are known to add up.
    """
    if type(metric).__module__.startswith("keras."):
        return
    halves = [(_rows(y, some), _rows(y_pred, some)) for some in (slice(None, None, 2), slice(1, None, 2))]
    seen: list[list[Tensor]] = []
    for which in ((0,), (1,), (0, 1)):
        metric.reset_state()
        for number in which:
            metric.update_state(*halves[number])
        seen.append([one._value.detach().double().clone() for one in metric.variables])
    metric.reset_state()
    first, second, both = seen
    if not all(torch.allclose(c, a + b, rtol=1e-4, atol=1e-6) for a, b, c in zip(first, second, both, strict=True)):
        raise PlanError(
            f"the metric {metric.name!r} ({type(metric).__name__}) does not add up: what it has seen of two parts is "
            "not the sum of what it has of each, so workers cannot put theirs together. Keep sums and counts in its "
            "variables, and compute the rest in result()."
        )


def _rows(tree: Any, some: slice) -> Any:
    return keras.tree.map_structure(lambda one: None if one is None else one[some], tree)


def add_over_workers(metrics: Sequence[Any], group: WorkerGroup, *, device: torch.device) -> None:
    """Replace what each worker's metrics have seen by the sum over the group; all its workers call it."""
    variables = [one for metric in leaf_metrics(metrics) for one in metric.variables]
    numbers = [number for one in variables for number in one._value.detach().double().flatten().tolist()]
    if not numbers:
        return
    summed, begin = total(group, numbers, what="metrics", device=device), 0
    for one in variables:
        value = one._value
        part = summed[begin : begin + value.numel()]
        begin += value.numel()
        with torch.no_grad():
            value.copy_(torch.tensor(part, dtype=torch.float64).view(value.shape))
