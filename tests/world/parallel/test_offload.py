"""A model trains the same wherever its state is kept, over checkpoints, layouts and rollbacks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quick
from forked import WorkersFailed, World
from paceline.comm.sharded_tensors import full_tensor
from paceline.parallel.offload import optimizer_state as offloaded_state
from paceline.parallel.partial_state import reading_parts
from paceline.plan import Batch, Compute, Guard, Layout, Plan
from paceline.worker import session
from paceline.worker.state.state_registry import model_entries

BATCH = Batch(size=16, micro=4)


class Block(nn.Module):
    """A Transformer's, with attention and dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_up(x)))))


class Transformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(23, 8)
        self.blocks = nn.ModuleList([Block(8, dropout) for _ in range(2)])
        self.head = nn.Linear(8, 23)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(worker: Any, *, make: Callable[[nn.Module], Any] = adamw, dropout: float = 0.1) -> dict[str, Any]:
    """Losses by step, the weights, and the bytes of mapped files that this process has."""
    model = worker.prepare(Transformer(dropout))
    optim = worker.prepare(make(model))
    scheduler = worker.prepare(torch.optim.lr_scheduler.StepLR(optim, 2))
    step = worker.stepper(model, optim, lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()))
    tokens = torch.randint(0, 23, (64, 9), generator=torch.Generator().manual_seed(1))
    losses: dict[int, float] = {}
    for batch in worker.batches(TensorDataset(tokens[:, :-1], tokens[:, 1:]), epochs=2):
        loss = float(step(batch))
        losses[worker.step] = loss
        scheduler.step()
    with reading_parts():
        weights = {name: full_tensor(value).clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "weights": weights, "mapped": mapped_bytes()}


def mapped_bytes() -> int:
    """Bytes of files that are mapped into this process and have no name any more."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "(deleted)" in line and "disk/" in line]
    return sum(int(stop, 16) - int(first, 16) for first, stop in ranges)


def on_disk(folder: Path) -> Compute:
    return Compute(offload="optimizer", offload_path=str(folder / "disk"))


def apart(folder: Path, name: str) -> World:
    """A world with a run directory of its own."""
    (folder / name).mkdir()
    return World(folder / name)


def assert_same(result: dict[str, Any], oracle: dict[str, Any]) -> None:
    assert result["losses"] == oracle["losses"]
    for name, value in oracle["weights"].items():
        assert torch.equal(result["weights"][name], value), name


@pytest.mark.parametrize(
    ("make", "dropout", "layout"),
    [
        pytest.param(adamw, 0.0, Layout(), id="adamw-one"),
        pytest.param(adamw, 0.3, Layout(replicas=2), id="adamw-dropout-replicas2"),
        pytest.param(momentum, 0.3, Layout(shard=2, zero=2), id="momentum-dropout-shard2"),
    ],
)
def test_state_on_a_disk_changes_no_bit(tmp_path: Path, make: Any, dropout: float, layout: Layout) -> None:
    workers = layout.workers or layout.shard

    def run(worker: Any) -> dict[str, Any]:
        return train(worker, make=make, dropout=dropout)

    kept = apart(tmp_path, "kept")(run, workers, Plan(layout=layout, batch=BATCH))
    away = apart(tmp_path, "away")(run, workers, Plan(layout=layout, batch=BATCH, compute=on_disk(tmp_path)))
    for result, oracle in zip(away, kept, strict=True):
        assert_same(result, oracle)
        assert result["mapped"] > 0 and oracle["mapped"] == 0
    assert os.listdir(tmp_path / "disk") == []


@pytest.mark.parametrize(
    ("first", "layout"),
    [("disk", Layout(replicas=2)), quick.further("memory", Layout(replicas=2)), ("memory", Layout(shard=2))],
)
def test_a_checkpoint_goes_on_wherever_the_state_is_kept_then(
    world: World, tmp_path: Path, first: str, layout: Layout
) -> None:
    whole_run = apart(tmp_path, "full_tensor")(train, 2, Plan(layout=layout, batch=BATCH))[0]
    plans = [
        Plan(layout=layout, batch=BATCH, compute=on_disk(tmp_path)),
        Plan(layout=layout, batch=BATCH),
    ]
    if first == "memory":
        plans.reverse()
    world(train, 2, plans[0], max_steps=3)
    rest = world(train, 2, plans[1])[0]
    assert min(rest["losses"]) == 4
    assert rest["losses"] == {step: whole_run["losses"][step] for step in rest["losses"]}
    for name, value in whole_run["weights"].items():
        assert torch.equal(rest["weights"][name], value), name


def test_a_rollback_puts_offloaded_state_back(tmp_path: Path) -> None:
    def spiked(worker: Any) -> dict[str, Any]:
        model = worker.prepare(nn.Linear(3, 1))
        optim = worker.prepare(torch.optim.Adam(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.mse_loss)
        x = torch.randn(240, 3, generator=torch.Generator().manual_seed(2))
        y = x.sum(1, keepdim=True)
        y[165] = 1e5  # a sample of step 11, and the snapshot is that of step 8
        losses = {}
        for batch in worker.batches(TensorDataset(x, y)):
            loss = float(step(batch))
            losses[worker.step] = loss
        return {"losses": losses, "weights": dict(model_entries(model)[0]), "mapped": mapped_bytes()}

    guard, batch = Guard(on_spike="rollback", snapshot_every=4, window=8), Batch(size=16, micro=4, shuffle=False)
    kept = apart(tmp_path, "kept")(spiked, 2, Plan(batch=batch, guard=guard))[0]
    away = apart(tmp_path, "away")(spiked, 2, Plan(batch=batch, guard=guard, compute=on_disk(tmp_path)))[0]
    assert kept["losses"][11] > 1e6
    assert_same(away, kept)
    plain = apart(tmp_path, "plain")(spiked, 2, Plan(batch=batch))[0]
    assert not torch.equal(plain["weights"]["weight"], kept["weights"]["weight"])


def test_on_the_cpu_the_hosts_memory_is_refused_before_anything_starts(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"computes on the CPU.*nothing would be gained.*offload_path="):
        world(train, 1, Plan(compute=Compute(offload="optimizer")))
    with pytest.raises(WorkersFailed, match=r"offload='all'.*nothing would be gained"):
        world(train, 1, Plan(compute=Compute(offload="all")))


def test_a_full_disk_is_an_error_before_the_first_step(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def full(_: int, __: int, num_bytes: int) -> None:
        asked.append(num_bytes)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WorkersFailed, match=r"optimizer state takes .* Free space there"):
        world(train, 1, Plan(batch=BATCH, compute=on_disk(tmp_path)))
    assert os.listdir(tmp_path / "disk") == []


@pytest.mark.parametrize("layout", [Layout(), Layout(replicas=2), Layout(shard=2)], ids=str)
def test_parameters_that_stream_from_the_host_train_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """On the CPU this saves nothing, so it is refused there; but it goes the way that it goes on a GPU."""
    monkeypatch.setattr(session, "refuse_useless", lambda compute, device: None)
    workers = layout.workers or layout.shard
    kept = apart(tmp_path, "kept")(train, workers, Plan(layout=layout, batch=BATCH))
    away = apart(tmp_path, "away")(train, workers, Plan(layout=layout, batch=BATCH, compute=Compute(offload="all")))
    for result, oracle in zip(away, kept, strict=True):
        assert result["losses"] == pytest.approx(oracle["losses"], rel=1e-6)


def test_parameters_that_stream_on_one_worker_go_on_from_checkpoints_and_back(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "refuse_useless", lambda compute, device: None)
    whole_run = apart(tmp_path, "full_tensor")(train, 1, Plan(batch=BATCH))[0]
    plain, streamed = Plan(batch=BATCH), Plan(batch=BATCH, compute=Compute(offload="all"))
    for plan, stop in ((plain, 2), (streamed, 4), (streamed, 6), (plain, 8)):
        [found] = world(train, 1, plan, max_steps=stop)
        expected = {step: whole_run["losses"][step] for step in (stop - 1, stop)}
        assert found["losses"] == pytest.approx(expected, rel=1e-5), plan


def test_large_parameters_are_stepped_in_pieces_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = apart(tmp_path, "kept")(train, 2, Plan(layout=Layout(shard=2), batch=BATCH))
    monkeypatch.setattr(offloaded_state, "PIECE_BYTES", 64)
    away = apart(tmp_path, "away")(train, 2, Plan(layout=Layout(shard=2), batch=BATCH, compute=on_disk(tmp_path)))
    for result, oracle in zip(away, kept, strict=True):
        assert_same(result, oracle)
