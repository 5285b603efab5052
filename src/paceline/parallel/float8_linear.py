"""torchao's linear layer in FP8, put into the place of a linear layer that stays the same object.

torchao swaps modules for others. Here a module changes its class only, so that hooks, references and wrappers of the
user's still mean it. Imported only where a plan says FP8: torchao takes seconds.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

__all__ = ["AutocastFloat8Linear", "use_float8"]


class AutocastFloat8Linear(Float8Linear):
    """A linear layer that computes in FP8 what autocast would compute in bf16, on any device.

    torchao's own looks at CUDA's autocast only. The weight is rounded to bf16 first, as ZeRO gathers it on CUDA: so one
    process has the numbers of many.
    """

    def forward(self, input: Tensor) -> Tensor:
        device, weight = input.device.type, self.weight
        if torch.is_autocast_enabled(device):
            half = torch.get_autocast_dtype(device)
            input, weight = input.to(half), weight.to(half)
        output = matmul_with_hp_or_float8_args.apply(input, weight.t(), self.linear_mm_config, self.config)
        bias: Any = self.bias  # torch declares no None
        return output if bias is None else output + bias.to(output.dtype)


def use_float8(module: nn.Module, *, recipe: str, emulates: bool) -> None:
    """Have a linear layer compute in FP8 from now on. `recipe`: one of torchao's names."""
    swapped: Any = convert_to_float8_training(nn.ModuleList([module]), config=_config(recipe, emulates))
    for name, value in vars(swapped[0]).items():
        vars(module).setdefault(name, value)
    module.__class__ = AutocastFloat8Linear


@functools.cache
def _config(recipe: str, emulates: bool) -> Float8LinearConfig:
    # A micro-batch has any number of tokens, over which gradients of weights sum: padded to a multiple of 16.
    found = Float8LinearConfig.from_recipe_name(recipe)
    return dataclasses.replace(found, emulate=emulates, pad_inner_dim=True)
