"""A small model with blocks, its data, and plans, for tests of what user code does to parameters and gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.plan import Batch, Compute, Layout, Plan

__all__ = ["Block", "data", "net", "plan_of"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 6), Block(), Block(), nn.Linear(6, 3))


def data() -> TensorDataset:
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


def plan_of(layout: Layout, micro: int = 2) -> Plan:
    return Plan(layout=layout, batch=Batch(size=8, micro=micro), compute=Compute(precision="fp64"))
