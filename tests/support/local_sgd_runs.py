"""The training run that the tests of LocalSGD and Gossip share."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.plan import (
    Batch,
    Compute,
    Layout,
    Plan,
)
from paceline.worker.state.state_registry import model_entries

__all__ = ["BATCH", "EXACT", "OPTIMIZERS", "STEPS", "assert_same", "model_of", "plan_of", "samples", "train"]

EXACT = Compute(precision="fp64")
BATCH = Batch(size=20, micro=3, shuffle=False)  # 7 micro-batches; the last step of an epoch has 2 of the 46 samples
STEPS = 3  # of an epoch
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02),
}


class Net(nn.Module):
    """Batch norm, and weights that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(46, 6, generator=draw), torch.randint(4, (46,), generator=draw))


def model_of() -> Net:
    torch.manual_seed(5)
    return Net()


def train(
    worker: Any, *, optimizer: str = "adamw", clip_norm: float | None = None, by_hand: bool = False, epochs: int = 3
) -> dict[str, Any]:
    model = worker.prepare(model_of())
    optim = worker.prepare(OPTIMIZERS[optimizer](model.parameters()))
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=clip_norm)
    losses: list[float] = []
    for batch in worker.batches(samples(), epochs=epochs):
        if not by_hand:
            losses.append(float(step(batch)))
            continue
        total = 0.0
        for x, y in batch:
            loss = F.cross_entropy(model(x), y)
            worker.backward(loss)
            total += float(loss.detach()) * len(x) / batch.num_here
        if clip_norm is not None:
            worker.clip_gradients(clip_norm)
        optim.step()
        losses.append(total if len(batch) else float("nan"))
    state = {name: value.clone() for name, value in model_entries(model)[0].items()}
    return {"losses": losses, "state": state, "sent": worker._models.reducers.wire_bytes()}


def plan_of(sync: Any, replicas: int, **parts: Any) -> Plan:
    return Plan(**{"layout": Layout(replicas=replicas), "sync": sync, "batch": BATCH, "compute": EXACT, **parts})


def assert_same(found: dict[str, Any], state: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, value in state.items():
        assert torch.allclose(found["state"][name].double(), value.double(), rtol=tolerance, atol=tolerance), name
