"""Adasum as its paper has it: the reference that tests hold the shared-out form against."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["combined"]


def combined(gradients: Sequence[Tensor]) -> Tensor:
    """Combine neighbours, and what came of them, until one is left."""
    nodes = list(gradients)
    while len(nodes) > 1:
        pairs = [_pair(one, other) for one, other in zip(nodes[::2], nodes[1::2], strict=False)]
        nodes = pairs + nodes[len(nodes) - len(nodes) % 2 :]
    return nodes[0]


def _pair(one: Tensor, other: Tensor) -> Tensor:
    between, ones, others = (one * other).sum(), one.square().sum(), other.square().sum()
    if ones == 0 or others == 0:
        return one + other
    return one * (1 - between / (2 * ones)) + other * (1 - between / (2 * others))
