"""Verify that experts can be distributed: the result of a token must not depend on other tokens, nor on its other
experts.

Distributed experts work on pairs of one token and one expert, and their results are added up. Code that normalizes
weights *inside* of the experts, for example, would give other numbers then, and nothing would show it. So it is tried
on random tokens beforehand: with all experts, and with the experts that each worker will have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PlanError
from paceline.parallel.expert.find_experts import RoutedExperts

__all__ = ["verify_separable"]

LEAST_TOKENS = 8
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # for 16-bit weights
ROUGH = 0.1  # of 16 bits


@torch.no_grad()
def verify_separable(
    one: RoutedExperts, function: Callable[..., Tensor], stand_in_for: Callable[[int], Any], *, size: int
) -> bool:
    """Verify that experts are separable; returns whether that could be tried, and raises PlanError if they are not.

    `function` is the module's forward, as a function of the module. Its result for the whole module must be the sum of
    those for `stand_in_for(worker)` of `size` workers, each on tokens of its own experts. It cannot be tried if no dim
    of the weights is the tokens' width, or if results are not finite.
    """
    modes = [(module, module.training) for module in one.module.modules()]
    one.module.eval()  # dropout would differ between calls
    try:
        for tokens in _tokens(one, size):
            try:
                pairs = [_whole_and_parts(one, function, stand_in_for, tokens, top=top, size=size) for top in (1, 2)]
            except (RuntimeError, ValueError):  # torch raises these for a width that does not fit
                continue
            if not all(whole.isfinite().all() for whole, _ in pairs):
                return False  # uninitialized weights, for example, cannot be compared
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
    stand_in_for: Callable[[int], Any],
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
        made = function(stand_in_for(worker), tokens[row], numbers[:, None], weights[row, slot][:, None])
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
            f"{name} returns for a token something else than the sum of what each of its experts returns alone, so "
            "they cannot be distributed over workers. Does its forward change the weights, so that they sum up to one, "
            "or look at other tokens, or number the experts by anything but len(self), self.num_experts and its "
            "weights? Do that in the module that routes."
        )
