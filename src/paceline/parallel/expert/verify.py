"""Whether experts may be spread: what becomes of a token must not depend on other tokens, nor on its other experts.

Spread experts work on pairs of one token and one expert, and what they make of a token is added up. Code that makes
weights sum up to one *inside* of the experts, say, would give other numbers then, and nobody would notice. So it is
tried on random tokens before the experts are spread, with all of them and with what each worker is going to have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PlanError
from paceline.parallel.expert.find_experts import RoutedExperts

__all__ = ["prove_separable"]

LEAST_TOKENS = 8
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest result
ROUGH = 0.1  # of 16 bits


@torch.no_grad()
def prove_separable(
    one: RoutedExperts, function: Callable[..., Tensor], standing_in: Callable[[int], Any], *, size: int
) -> bool:
    """Return whether it could be tried; raises PlanError where `function` (the forward, as a function) of the whole
    module is not the sum over those of `standing_in(worker)`, of `size` workers, each on tokens of its own experts.

    It cannot be tried where no size of the weights is the tokens' width, or results are not finite.
    """
    modes = [(module, module.training) for module in one.module.modules()]
    one.module.eval()  # dropout draws other numbers each time
    try:
        for tokens in _tokens(one, size):
            try:
                pairs = [_whole_and_parts(one, function, standing_in, tokens, top=top, size=size) for top in (1, 2)]
            except (RuntimeError, ValueError):  # what torch says of a width that does not fit
                continue
            if not all(whole.isfinite().all() for whole, _ in pairs):
                return False  # weights that were never set, say: two of them cannot be compared
            for whole, parts in pairs:
                _compare(one.name, whole.double(), parts.double(), TOLERANCES.get(tokens.dtype, ROUGH))
            return True
    finally:
        for module, mode in modes:
            module.training = mode
    return False


def _whole_and_parts(
    one: RoutedExperts,
    function: Callable[..., Tensor],
    standing_in: Callable[[int], Any],
    tokens: Tensor,
    *,
    top: int,
    size: int,
) -> tuple[Tensor, Tensor]:
    """What all experts make of tokens that have `top` of them each, and what the workers make, added up."""
    generator = torch.Generator().manual_seed(2)
    weights, index = torch.rand(len(tokens), one.count, generator=generator).topk(top, 1)
    weights, index = weights.to(device=tokens.device, dtype=tokens.dtype), index.to(tokens.device)
    whole = function(one.module, tokens, index, weights)
    parts, each = torch.zeros_like(whole), one.count // size
    for worker in range(size):
        row, slot = torch.where(index.div(each, rounding_mode="floor") == worker)
        numbers = index[row, slot] - worker * each
        made = function(standing_in(worker), tokens[row], numbers[:, None], weights[row, slot][:, None])
        parts.index_add_(0, row, made)
    return whole, parts


def _tokens(one: RoutedExperts, size: int) -> Iterator[Tensor]:
    """Random tokens of each width that may be right."""
    weights = [*(getattr(one.module, key) for key in one.stacked)]
    weights += [parameter for _, members in one.members() for parameter in members[0].parameters()]
    widths = dict.fromkeys(width for weight in weights if weight.ndim > 1 for width in reversed(weight.shape))
    generator = torch.Generator().manual_seed(1)
    for width in widths:
        drawn = torch.randn(max(LEAST_TOKENS, size), width, generator=generator)
        yield drawn.to(device=weights[0].device, dtype=weights[0].dtype)


def _compare(name: str, whole: Tensor, parts: Tensor, tolerance: float) -> None:
    if float((whole - parts).abs().max()) > tolerance * float(whole.abs().max()):
        raise PlanError(
            f"{name} makes of a token something else than the sum of what each of its experts makes of it alone, so "
            "they cannot be on several workers. Does its forward change the weights, so that they sum up to one, or "
            "look at other tokens, or number the experts by anything but len(self), self.num_experts and its weights? "
            "Do that in the module that routes."
        )
