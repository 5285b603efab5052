"""Linear layers whose weight is codes of a package for quantised bases, such as bitsandbytes.

Where a forward is run without weights, their own forward cannot be: it asks for what the package keeps beside the
codes, which no placeholder has. What they return has the shape and the type of any linear layer's result.

On CPUs with AVX512-BF16 bitsandbytes packs codes anew when a layer runs in evaluation mode, for good: scales are
rounded to bf16, and such layers have no gradient. A model that is trained must keep its codes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError

__all__ = ["coded_layers_as_linear", "has_codes", "keep_codes"]

NUMBER = 0.02  # neither 0, by which models may divide, nor large
PACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes 0.50: an attribute of 4-bit layers


def has_codes(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose frozen weight is no matrix of numbers."""
    weight = _kept_weight(module)
    if not isinstance(module, nn.Linear) or weight is None or weight.requires_grad:
        return False
    is_number = weight.is_floating_point() or weight.is_complex()
    return not is_number or tuple(weight.shape) != (module.out_features, module.in_features)


@contextlib.contextmanager
def coded_layers_as_linear(model: nn.Module) -> Iterator[None]:
    """Within it, such layers return what linear layers would, of one number for all of the weight."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and has_codes(module)]
    former = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        vars(layer)["forward"] = functools.partial(_linear, layer)
    try:
        yield
    finally:
        for layer, forward in zip(layers, former, strict=True):
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = forward


def keep_codes(model: nn.Module) -> None:
    """Have layers keep their codes as they are, in evaluation mode, too. Raises PlanError where they are packed."""
    packed: list[str] = []
    for name, module in model.named_modules():
        if vars(module).get(PACKS):
            setattr(module, PACKS, False)
        kept: Any = getattr(_kept_weight(module), "quant_state", None)
        if getattr(kept, "packing_format_for_cpu", False):
            packed.append(name)
    if packed:
        raise PlanError(
            f"bitsandbytes has packed the codes of {len(packed)} layers ({packed[0]}, ...) for inference on this CPU, "
            "when the model ran in evaluation mode: such layers have no gradient. Load the model again, and give it to "
            "worker.prepare before it runs."
        )


def _kept_weight(module: nn.Module) -> nn.Parameter | None:
    """The parameter itself. To read the attribute of a parametrization computes it, and may change its buffers."""
    return dict(module.named_parameters(recurse=False)).get("weight")


def _linear(layer: Any, input: Tensor) -> Tensor:
    weight = input.detach().new_full((1, 1), NUMBER).expand(layer.out_features, layer.in_features)
    bias = None if layer.bias is None else layer.bias.to(input.dtype)
    return torch.nn.functional.linear(input, weight, bias)
