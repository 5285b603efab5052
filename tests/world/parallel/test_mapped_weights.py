"""Models whose weights are mapped from a file: each layout trains them as it does others, and reads what it keeps."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quick
from forked import World
from paceline.comm.sharded_tensors import full_tensor
from paceline.parallel.partial_state import reading_parts
from paceline.plan import Batch, Compute, Layout, Plan

WIDTH, LARGE = 64, 1024
LAYOUTS = {
    "replicas": Layout(replicas=2),
    "shard": Layout(shard=2),
    "zero-1": Layout(shard=2, zero=1),
    "tensor": Layout(tensor=2),
    "stages": Layout(stages=2),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def from_file(path: Path, width: int) -> Net:
    with torch.device("meta"):
        net = Net(width)
    net.load_state_dict(load_file(path), assign=True)
    return net


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    save_file(Net(WIDTH).state_dict(), path := tmp_path / "model.safetensors")
    return path


def data() -> TensorDataset:
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.argmax(1))


def losses_of(worker: Any, net: Net) -> tuple[list[float], dict[str, Tensor]]:
    model = worker.prepare(net)
    step = worker.stepper(model, worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.01)), F.cross_entropy)
    losses = [float(step(batch)) for batch in worker.batches(data(), epochs=2)]
    return losses, {} if worker.plan.layout.stages > 1 or worker.plan.layout.tensor > 1 else whole(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    with reading_parts():
        return {name: full_tensor(value).clone() for name, value in model.state_dict().items()}


def plan_of(layout: Layout) -> Plan:
    return Plan(layout=layout, batch=Batch(size=8, micro=2), compute=Compute())


@pytest.mark.parametrize("name", quick.spread(list(LAYOUTS), step=2))
def test_each_layout_trains_them_as_weights_that_are_in_memory(world: World, file: Path, name: str) -> None:
    def in_memory(worker: Any) -> tuple[list[float], dict[str, Tensor]]:
        net = Net(WIDTH)
        net.load_state_dict({key: one.clone() for key, one in load_file(file).items()})
        return losses_of(worker, net)

    expected, weights = world.one_process(in_memory, plan_of(Layout()))
    before = file.read_bytes()
    for losses, found in world(lambda worker: losses_of(worker, from_file(file, WIDTH)), 2, plan_of(LAYOUTS[name])):
        assert losses == pytest.approx(expected, rel=1e-5)
        for key, value in found.items():
            torch.testing.assert_close(value, weights[key], rtol=1e-4, atol=1e-5)
    assert file.read_bytes() == before, "training writes to memory, never to the file"


@pytest.mark.parametrize("name", ["replicas", "shard"])
def test_what_one_worker_has_changed_after_loading_is_made_equal(world: World, file: Path, name: str) -> None:
    def work(worker: Any) -> list[float]:
        net = from_file(file, WIDTH)
        net.get_parameter("blocks.1.up.weight").data.add_(worker.rank)
        return losses_of(worker, net)[0]

    first, second = world(work, 2, plan_of(LAYOUTS[name]))
    assert first == pytest.approx(world.one_process(work, plan_of(Layout())), rel=1e-5)
    assert second == first


@pytest.mark.parametrize(("name", "share"), [("replicas", 1.0), ("shard", 0.5)])
def test_at_most_a_fifth_more_memory_is_used_than_what_a_worker_keeps(
    world: World, tmp_path: Path, name: str, share: float
) -> None:
    save_file(Net(LARGE).state_dict(), file := tmp_path / "large.safetensors")  # 64 MiB

    def peak(worker: Any) -> tuple[float, float]:
        net = from_file(file, LARGE)
        worker.gather(worker.rank)  # what comes with the first collective is there
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc_pid_clear_refs(5))
        before = memory_mib("VmRSS")
        worker.prepare(net)
        return memory_mib("VmHWM") - before, max(one.nbytes for one in load_file(file).values()) / 2**20

    kept = share * os.path.getsize(file) / 2**20
    for used, largest in world(peak, 2, plan_of(LAYOUTS[name])):
        assert used < 1.2 * kept + largest + 4, f"{used:.0f} MiB for {kept:.0f}"


def memory_mib(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
