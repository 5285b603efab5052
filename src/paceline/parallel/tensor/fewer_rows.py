"""A layer of torch that is verified by itself is tried with fewer rows: what a split of it computes does not depend on
their number, and tables of a whole vocabulary are a model's largest tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from paceline.parallel.sample_input import SampleInput
from paceline.parallel.tensor.layers import Layer
from paceline.parallel.tensor.split_tensor import mapped

__all__ = ["with_fewer_rows"]

EACH = 64  # rows for each worker; the number keeps its remainder


def with_fewer_rows(
    block: nn.Module, layers: Sequence[Layer], call: SampleInput, *, size: int
) -> tuple[nn.Module, Sequence[Layer], SampleInput]:
    """Return a smaller layer, its split and a call of it in place of a plain linear layer or embedding; others are
    returned as they are."""
    if type(block) not in (nn.Linear, nn.Embedding) or len(layers) != 1 or layers[0].name:
        return block, layers, call
    made: Any = block
    (layer,), rows = layers, len(made.weight)
    fewer = EACH * size + rows % size
    is_split_by_rows = layer.sections == (rows,) and (type(block) is nn.Linear) == (layer.role in ("column", "head"))
    is_hooked = "forward" in vars(block) or any(value for key, value in vars(block).items() if key.endswith("_hooks"))
    if fewer >= rows or is_hooked or not is_split_by_rows:
        return block, layers, call
    like = {"device": made.weight.device, "dtype": made.weight.dtype}
    smaller: Any  # without numbers: to draw some would move the script's generator
    if isinstance(block, nn.Linear):
        smaller = skip_init(nn.Linear, block.in_features, fewer, bias=made.bias is not None, **like)
        if made.bias is not None:
            smaller.bias.requires_grad_(made.bias.requires_grad)
    else:
        if made.padding_idx is not None and made.padding_idx >= fewer:
            return block, layers, call
        smaller = skip_init(nn.Embedding, fewer, made.embedding_dim, padding_idx=made.padding_idx, **like)
        call = SampleInput(args=_below(call.args, fewer), kwargs=_below(dict(call.kwargs), fewer))
    smaller.weight.requires_grad_(made.weight.requires_grad)
    return smaller.train(block.training), [dataclasses.replace(layer, sections=(fewer,))], call


def _below(given: Any, rows: int) -> Any:
    def change(one: Any) -> Any:
        is_token = isinstance(one, Tensor) and not one.is_floating_point() and one.dtype != torch.bool
        return one % rows if is_token else one

    return mapped(given, change)
