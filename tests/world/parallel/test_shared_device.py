"""Workers that share a device: tensors go through the host, under every layout, and the numbers are one process's.

The host stands for the device: every tensor counts as one of the device, and is copied there and back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
import quick
from forked import World
from paceline.comm.devices.host_staged_group import HostStagedGroup
from paceline.parallel.pipeline.staged_transport import HostStagedTransport
from paceline.plan import Plan
from paceline.worker.membership import join_context

REST = "batch(size=16,micro=4)+compute(precision=fp64)"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        parts = [one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(24, 16), Block(), Block(), nn.Linear(16, 24))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def train(worker: paceline.Worker) -> list[float]:
    model = worker.prepare(net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, loss_of, clip_norm=1.0)
    words = torch.randint(24, (64, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for batch in worker.batches(TensorDataset(words[:, :-1], words[:, 1:])):
        losses.append(worker.gather(float(step(batch))))
    return [sum(found) / len(found) for found in losses]


def told_copies(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Path) -> None:
    """Have a method leave a note when it is called, in whichever worker."""
    made = getattr(owner, name)

    def telling(*args: Any, **fields: Any) -> Any:
        note.touch()
        return made(*args, **fields)

    monkeypatch.setattr(owner, name, telling)


@pytest.mark.parametrize(
    ("layout", "by"),
    [
        ("shard=2", "reduce_scatter"),
        ("stages=2", "send"),
        quick.further("replicas=2", "all_reduce"),
        quick.further("replicas=2+allreduce(algorithm=ring)", "all_reduce"),
        quick.further("shard=2+zero=1", "all_reduce"),
        quick.further("tensor=2", "all_reduce"),
        quick.further("context=2", "all_reduce"),
    ],
)
def test_workers_that_share_a_device_have_the_losses_of_one_process(
    layout: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    alone = world.one_process(train, Plan.parse(f"replicas=1+{REST}"))
    monkeypatch.setattr(join_context, "tensor_way", lambda device, wanted: "staged")
    told_copies(monkeypatch, HostStagedTransport if by == "send" else HostStagedGroup, by, tmp_path / "copied")
    together = world(train, 2, Plan.parse(f"{layout}+{REST}"))
    assert (tmp_path / "copied").exists(), "the tensors went another way"
    assert together[0] == pytest.approx(alone, rel=1e-9)
