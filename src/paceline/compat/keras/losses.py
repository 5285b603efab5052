"""The forward of a training step: the compiled loss of a micro-batch, with its weight in the global batch.

Keras' losses are means over a batch. The mean over the global batch is the mean of its micro-batches' means, each with
the weight that its divisor has: the samples, or what a mask leaves of the tokens, or the sum of the sample weights. A
loss with the reduction "sum" adds up. So the step is that of one process on the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.compat.keras.the_keras import keras
from paceline.errors import PlanError

__all__ = ["StepForward", "num_samples_of", "weight_penalties"]

UNIT = 1024.0  # sums of weights are counted in parts: a count below 1 is refused as a mistake
MEANS = ("sum_over_batch_size", "mean")


class StepForward:
    """`forward(model, micro)` of a stepper."""

    def __init__(self, model: Any) -> None:
        """Raises PlanError for losses without a reduction."""
        self.num_step = 0  # samples that the step's mean is over; set before each step
        self._has_own_metrics = type(model).compute_metrics is not keras.Model.compute_metrics
        self._reductions: list[str] | None = None

    def __call__(self, model: Any, micro: Any) -> Any:
        x, y, weight = micro
        with torch.enable_grad():
            y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight, training=True)
        with torch.no_grad():
            if self._has_own_metrics:
                model.compute_metrics(x, y, y_pred, sample_weight=weight)
            elif model._compile_metrics is not None:
                model._compile_metrics.update_state(y, y_pred, weight)
        return self._weighed(model, loss, y_pred, weight, num_samples_of(x))

    def _weighed(self, model: Any, loss: Tensor, y_pred: Any, weight: Any, num: int) -> Any:
        if self._reductions is None:
            self._reductions = _reductions_of(model)
        kinds = set(self._reductions)
        if kinds == {"sum"}:
            return loss * (self.num_step / num)
        if len(self._reductions) != 1 or keras.tree.is_nested(y_pred):
            return loss
        mask = getattr(y_pred, "_keras_mask", None)
        divisor: Tensor | None = None
        if kinds == {"mean_with_sample_weight"} and weight is not None:
            divisor = (weight if mask is None else weight * mask.to(weight.dtype)).sum()
        elif mask is not None:
            divisor = mask.sum()
        if divisor is None:
            return loss
        count = divisor.detach().to(torch.float32) * UNIT
        return loss * count.to(loss.dtype), count


def _reductions_of(model: Any) -> list[str]:
    """How each compiled loss makes one number of a batch."""
    compiled = model._compile_loss
    found = [str(one.loss.reduction) for one in compiled._flat_losses] if compiled is not None else []
    if any(one.lower() == "none" for one in found):
        raise PlanError(
            "a loss was compiled with reduction=None: a step needs one number. Use 'sum_over_batch_size', or 'sum'."
        )
    if "sum" in found and set(found) != {"sum"}:
        raise PlanError(
            f"the compiled losses have the reductions {', '.join(found)}: a sum over the batch grows with it and a "
            "mean does not, so micro-batches have no common weight. Give all losses one of the two."
        )
    return found


def num_samples_of(x: Any) -> int:
    """How many samples inputs have."""
    return len(next(one for one in keras.tree.flatten(x) if one is not None))


def weight_penalties(variables: dict[str, Any]) -> dict[str, Any]:
    """Take the regularizers from the variables of a model, and return them by torch's names: a stepper adds penalties
    once in a step, to whole weights."""
    found = {name: one.regularizer for name, one in variables.items() if one.regularizer is not None}
    for name in found:
        variables[name].regularizer = None
    return found
