"""Small training programs whose steps are compared with those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.plan import Compute

__all__ = ["EXACT", "Net", "assert_same", "dataset", "plain_net", "train_plain_net", "trained"]


EXACT = Compute(precision="fp64")


class Net(nn.Module):
    """Dropout, batch norm, tied weights and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12, bias=False)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(12, 12)
        self.tied_again = nn.Linear(12, 12)
        self.tied_again.weight = self.tied.weight
        self.head = nn.Linear(12, 4)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.norm(self.first(x))))
        return self.head(torch.tanh(self.tied_again(torch.relu(self.tied(x)))))


def dataset(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def trained(model: nn.Module, losses: list[float]) -> dict[str, Any]:
    return {"losses": losses, "state": {name: value.clone() for name, value in model.state_dict().items()}}


def assert_same(results: list[dict[str, Any]], oracle: dict[str, Any], tolerance: float = 1e-9) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(oracle["losses"], rel=max(tolerance, 1e-6))
        for name, value in oracle["state"].items():
            torch.testing.assert_close(
                result["state"][name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        for name, value in results[0]["state"].items():
            assert torch.equal(result["state"][name], value), f"{name} differs between workers"


def plain_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def train_plain_net(worker: Any) -> dict[str, Any]:
    model = worker.prepare(plain_net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    step = worker.stepper(model, optim, F.cross_entropy)
    losses = [float(step(batch)) for batch in worker.batches(dataset(), epochs=2)]
    return trained(model, losses)
