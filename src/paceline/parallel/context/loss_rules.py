"""Losses on slices of the tokens: each worker's own sums and counts are added up, so the output is never gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor.shape_rules import at, full_shape
from paceline.parallel.tensor.split_shapes import CannotSplit
from paceline.parallel.tensor.split_tensor import Rule, SplitTensor, name_of

__all__ = ["LOSSES"]

NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
DEFAULTS = {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None, "reduction": "mean"}


def _cross_entropy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Classes are in dim 1 (dim 0 of one sample); targets are one class per token."""
    given: dict[str, Any] = {**DEFAULTS, "label_smoothing": 0.0, **dict(zip(NAMES, args, strict=False)), **kwargs}
    scores, target, weight = given["input"], given["target"], given["weight"]
    if not isinstance(scores, SplitTensor) or given["size_average"] is not None or given["reduce"] is not None:
        raise CannotSplit("the scores are not sliced, or a deprecated way to reduce is used")
    classes = 1 if scores.ndim > 1 else 0
    if target.is_floating_point() or target.ndim != scores.ndim - 1 or scores.split_dim == classes:
        raise CannotSplit("its targets are not one class for each token")
    dim = scores.split_dim - (scores.split_dim > classes)
    if not isinstance(target, SplitTensor):
        target = scores.ops.meet(target, dim - target.ndim, scores.sections, split=scores)
    elif (target.split_dim, target.sections) != (dim, scores.sections):
        raise CannotSplit("scores and targets are sliced in different ways")
    options: dict[str, Any] = {"weight": weight, "ignore_index": given["ignore_index"]}
    if name_of(func) == "cross_entropy":
        options["label_smoothing"] = given["label_smoothing"]
    if given["reduction"] == "none":
        return at(func(scores, target, reduction="none", **options), scores, dim)
    own = func(scores, target, reduction="sum", **options)
    if given["reduction"] == "sum":
        return scores.ops.total(own)
    is_counted = target != given["ignore_index"]
    count = is_counted.sum() if weight is None else weight[target.clamp_min(0)].masked_fill(~is_counted, 0).sum()
    return scores.ops.total(own) / scores.ops.total(count.to(own.dtype).detach())


def _each(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elementwise losses: sums and means are added up over the workers."""
    options = {key: value for key, value in kwargs.items() if value is not None}
    reduction = options.pop("reduction", "mean")
    odd = [key for key, value in options.items() if isinstance(value, Tensor) or key in ("size_average", "reduce")]
    if len(args) != 2 or _shape(args[0]) != _shape(args[1]) or odd or reduction not in ("none", "sum", "mean"):
        raise CannotSplit(f"this form of it is not followed: {odd or reduction}")
    lead = next(one for one in args if isinstance(one, SplitTensor))
    met: list[Tensor] = []
    for one in args:
        if isinstance(one, SplitTensor) and (one.split_dim, one.sections) != (lead.split_dim, lead.sections):
            raise CannotSplit("two tensors meet that are sliced in different ways")
        is_sliced = isinstance(one, SplitTensor)
        met.append(one if is_sliced else lead.ops.meet(one, lead.split_dim - lead.ndim, lead.sections, split=lead))
    each = func(*met, **options, reduction="none")
    if reduction == "none":
        return at(each, lead, lead.split_dim)
    summed = lead.ops.total(each.sum())
    return summed / full_shape(lead).numel() if reduction == "mean" else summed


def _shape(tensor: Tensor) -> torch.Size:
    return full_shape(tensor) if isinstance(tensor, SplitTensor) else tensor.shape


LOSSES: dict[str, Rule] = {
    **dict.fromkeys(("cross_entropy", "nll_loss"), _cross_entropy),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"), _each),
}
