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
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, ScalingType, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

__all__ = ["AutocastFloat8Linear", "use_float8"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Casts:
    """How the numbers of one layer are rounded to 8 bits."""

    config: Any  # Float8LinearConfig, whose fields are never None once it is made
    products: LinearMMConfig

    def cast(self, tensor: Tensor, how: Any, role: GemmInputRole, dim: int) -> Tensor:
        """`tensor` in 8 bits with its scale, or as it is. `how`: a CastConfig. `dim`: along which rows have scales."""
        if how.scaling_type is ScalingType.DISABLED:
            return tensor
        granularity = how.scaling_granularity
        found: Any = hp_tensor_to_float8_dynamic(
            tensor,
            how.target_dtype,
            self.products,
            gemm_input_role=role,
            scaling_granularity=granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )
        return found


@torch.compiler.allow_in_graph  # the compiler sees the casts, not this class
class _Float8Product(torch.autograd.Function):
    """`input @ weight.t()` in FP8, which keeps and computes what gradients need, as nn.Linear does.

    torchao's own keeps each input and computes each gradient, also of frozen weights.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_t: Tensor, casts: _Casts) -> Tensor:
        of_input, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if of_weight else None, weight_t if of_input else None)
        ctx.casts, config = casts, casts.config
        rows = casts.cast(input, config.cast_config_input, GemmInputRole.INPUT, -1).reshape(-1, input.shape[-1])
        columns = casts.cast(weight_t, config.cast_config_weight, GemmInputRole.WEIGHT, 0)
        return torch.mm(rows, columns).reshape(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (input, weight_t), casts = grads, ctx.saved_tensors, ctx.casts
        config, rows = casts.config, grad.reshape(-1, grad.shape[-1])
        of_input = of_weight = None
        if weight_t is not None:
            left = casts.cast(rows, config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1)
            how = config.cast_config_weight_for_grad_input
            right: Any = casts.cast(weight_t, how, GemmInputRole.WEIGHT, -1)
            of_input = torch.mm(left, right.t()).reshape(*grad.shape[:-1], -1)
        if input is not None:
            how = config.cast_config_grad_output_for_grad_weight
            left = casts.cast(rows, how, GemmInputRole.GRAD_OUTPUT, 0)
            flat = input.reshape(-1, input.shape[-1])
            right = casts.cast(flat, config.cast_config_input_for_grad_weight, GemmInputRole.INPUT, 0)
            of_weight = torch.mm(left.t(), right).t()
        return of_input, of_weight, None


class AutocastFloat8Linear(Float8Linear):
    """A linear layer that computes in FP8 what autocast would compute in bf16, on any device.

    torchao's own looks at CUDA's autocast only, and not at whether a region turned it off. The weight is rounded to
    bf16 first, as ZeRO gathers it on CUDA: so one process has the numbers of many. Nothing has no largest number, of
    which a scale is made: an expert without tokens computes as written.
    """

    def forward(self, input: Tensor) -> Tensor:
        device, weight = input.device.type, self.weight
        bias: Any = self.bias  # torch declares no None
        if not torch.is_autocast_enabled(device) or input.numel() == 0:
            return F.linear(input, weight, bias)
        half = torch.get_autocast_dtype(device)
        casts = _Casts(self.config, self.linear_mm_config)
        output: Any = _Float8Product.apply(input.to(half), weight.to(half).t(), casts)
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
