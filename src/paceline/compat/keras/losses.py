"""The forward of a training step: the compiled loss of a micro-batch, with its weight in the global batch.

Keras' losses are means over a batch. The mean over the global batch is the mean of its micro-batches' means, each with
the weight that its divisor has: the samples, or what a mask leaves of the tokens, or the sum of the sample weights. A
loss with the reduction "sum" adds up; what `add_loss` adds to it stays a mean over samples. So the step is that of one
process on the whole batch. Parts of one loss with divisors of their own have no common weight, and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.compat.keras.the_keras import keras
from paceline.errors import PlanError

__all__ = ["StepForward", "num_samples_of", "weight_penalties"]

UNIT = 1024.0  # sums of weights are counted in parts: a count below 1 is refused as a mistake


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
        return self._weighed(model, loss, micro, y_pred)

    def _weighed(self, model: Any, loss: Tensor, micro: Any, y_pred: Any) -> Any:
        x, y, weight = micro
        if self._reductions is None:
            self._reductions = _reductions_of(model)
        kinds, num = set(self._reductions), num_samples_of(x)
        losses, added = _losses_of(model), _added_losses(model)
        if kinds == {"sum"}:
            return (loss - sum(added)) * (self.num_step / num) + sum(added)
        outputs, weights = keras.tree.flatten(y_pred), keras.tree.flatten(weight)
        is_by_weight = "mean_with_sample_weight" in kinds and any(one is not None for one in weights)
        has_mask = any(_has_mask(one) for one in outputs) or any(_ignored(one) is not None for one in losses)
        if not losses or not (is_by_weight or has_mask):
            return loss
        if len(outputs) > 1 or added:
            if num < self.num_step:
                raise PlanError(_no_common_weight(added, self.num_step))
            return loss
        mask = _mask_of(losses[0], keras.tree.flatten(y)[0], outputs[0])
        divisor = _divisor(weights[0] if is_by_weight else None, mask)
        count = divisor.detach().to(torch.float32) * UNIT
        return loss * count.to(loss.dtype), count


def _added_losses(model: Any) -> list[Tensor]:
    """What `add_loss` and activity regularizers have added to the compiled loss. A `compute_loss` of the user's own
    decides by itself what is in its loss."""
    if type(model).compute_loss is not keras.Model.compute_loss:
        return []
    return [model._aggregate_additional_loss(one) for one in model.losses]


def _losses_of(model: Any) -> list[Any]:
    """The compiled losses, in the order of the outputs that have one."""
    return [] if model._compile_loss is None else [one.loss for one in model._compile_loss._flat_losses]


def _has_mask(output: Any) -> bool:
    return getattr(output, "_keras_mask", None) is not None


def _ignored(loss: Any) -> int | None:
    """The class whose samples a loss leaves out."""
    return getattr(loss, "ignore_class", None)


def _mask_of(loss: Any, y: Tensor, output: Any) -> Tensor | None:
    """Which values a loss is the mean of: those of the output's mask, and not of the class that the loss ignores."""
    mask: Tensor | None = output._keras_mask if _has_mask(output) else None
    ignored = _ignored(loss)
    if ignored is None:
        return mask
    valid = torch.ne(y, ignored)
    return valid if mask is None else mask.to(torch.bool) & valid.reshape(mask.shape)


def _divisor(weight: Tensor | None, mask: Tensor | None) -> Tensor:
    """What Keras divides the sum of a loss by. As there, one of the two may have a last dim of size 1 more."""
    if weight is None or mask is None:
        return weight.sum() if weight is not None else mask.sum() if mask is not None else torch.ones(())
    if weight.dim() == mask.dim() + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    elif mask.dim() == weight.dim() + 1 and mask.shape[-1] == 1:
        mask = mask.squeeze(-1)
    return (weight * mask.to(weight.dtype)).sum()


def _no_common_weight(added: Sequence[Any], num_step: int) -> str:
    beside = "a loss of add_loss or of an activity regularizer" if added else "several outputs"
    return (
        f"fit() has {beside} beside a mask (mask_zero, Masking, ignore_class) or the reduction "
        "'mean_with_sample_weight': each part of the loss is a mean over another number, so the micro-batches of a "
        "step have no common weight, and losses would depend on their size. Leave out the mask or that reduction; or "
        f"have one micro-batch in each step, on one worker: --plan 'batch(size={num_step},micro={num_step})'."
    )


def _reductions_of(model: Any) -> list[str]:
    """How each compiled loss makes one number of a batch."""
    found = [str(one.reduction) for one in _losses_of(model)]
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
