"""What is known of the software that trains: which kernels it has, and what it hides behind compute."""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["EAGER", "FUSED", "MEGATRON", "UNFUSED_ATTENTION", "Software", "paceline"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """`kernels`: "fused" element-wise kernels (Megatron, Transformer Engine, torch.compile) or "single" ones (eager
    torch). `attention`: "flash" (FlashAttention-2, scaled_dot_product_attention), "vendor" (cuDNN, FlashAttention-3),
    or "unfused", which writes all scores. `skips_pairs`: attention skips pairs that a causal model masks.
    `hides_tensor`: products and tensor-parallel communication run at once, if `sequence` is split. `hides_sends`: so do
    sends between interleaved stages. `selective`: what "selective" recompute repeats. `weight_bytes` and
    `gradient_bytes`: of those that are not split, in all their copies. `keeps_gathered`: ZeRO-3 parameters stay
    gathered for a step where there are stages. `gathered_units`: of ZeRO-3, at once: the one that computes, and others.
    """

    name: str
    kernels: Literal["fused", "single"] = "fused"
    attention: Literal["flash", "vendor", "unfused"] = "flash"
    skips_pairs: bool = True
    hides_tensor: bool = False
    hides_sends: bool = False
    selective: Literal["operations", "attention"] = "operations"
    dropout: bool = False
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    keeps_gathered: bool = False
    gathered_units: float = 2.0


EAGER = Software(name="torch", kernels="single")
FUSED = Software(name="torch, compiled")
MEGATRON = Software(
    name="Megatron-Core", attention="vendor", hides_tensor=True, hides_sends=True, selective="attention"
)
UNFUSED_ATTENTION = Software(name="Megatron-LM of 2021", attention="unfused", skips_pairs=False, selective="attention")


def paceline(*, compiles: bool) -> Software:
    """What Paceline's own workers run: eager torch, or torch.compile; weights and gradients in 32 bit."""
    return Software(name="paceline", kernels="fused" if compiles else "single", weight_bytes=4.0, gathered_units=3.0)
