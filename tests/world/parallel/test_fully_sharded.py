"""Replicas that are split over several workers (ZeRO) train like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quick
from forked import World
from paceline.checkpoint.reader import open_checkpoint
from paceline.comm.sharded_tensors import full_tensor
from paceline.errors import PlanError
from paceline.parallel.partial_state import reading_parts
from paceline.plan import Batch, Compute, Layout, Plan

EXACT = Compute(precision="fp64")
PLAN = Plan(batch=Batch(size=16, micro=3), compute=EXACT)  # 6 micro-batches; the last step of an epoch has 1

LAYOUTS = [
    pytest.param(Layout(shard=2, zero=1), id="shard2-zero1"),
    pytest.param(Layout(shard=2, zero=2), id="shard2-zero2"),
    pytest.param(Layout(shard=2, zero=3), id="shard2-zero3"),
    pytest.param(Layout(shard=4, zero=1), id="shard4-zero1"),
    pytest.param(Layout(shard=4, zero=3), id="shard4-zero3"),
    pytest.param(Layout(replicas=2, shard=2, zero=1), id="2x2-zero1"),
    pytest.param(Layout(replicas=2, shard=2, zero=2), id="2x2-zero2"),
    pytest.param(Layout(replicas=2, shard=2, zero=3), id="2x2-zero3"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks with dropout and batch norm, two tied layers, one that is never used, and rows that do not divide."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(6, width, bias=False)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.tied = nn.Linear(width, width)
        self.tied_again = nn.Linear(width, width)
        self.tied_again.weight = self.tied.weight
        self.head = nn.Linear(width, 4)
        self.idle = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.tied_again(torch.relu(self.tied(x)))))


def dataset(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    with reading_parts():
        return {name: full_tensor(value).clone() for name, value in model.state_dict().items()}


def by_stepper(worker: Any) -> dict[str, Any]:
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=0.5)
    losses, norms = [], []
    for batch in worker.batches(dataset(34), epochs=2):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    found = worker.evaluate(model, dataset(14), F.cross_entropy)
    return {"losses": losses, "norms": norms, "evaluated": found["loss"], "state": state_of(model)}


def by_plain_loop(worker: Any) -> dict[str, Any]:
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    losses, norms = [], []
    for batch in worker.batches(dataset(34), epochs=2):
        total, count = 0.0, 0
        for x, y in batch:
            loss = F.cross_entropy(model(x), y)
            worker.backward(loss)
            if not batch.is_void:
                total, count = total + float(loss.detach()) * len(x), count + len(x)
        norms.append(float(full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        optim.step()
        optim.zero_grad()
        losses.append(float(worker.average(total)) / float(worker.average(float(count))))
    found = worker.evaluate(model, dataset(14), F.cross_entropy)
    return {"losses": losses, "norms": norms, "evaluated": found["loss"], "state": state_of(model)}


def assert_same(results: list[dict[str, Any]], oracle: dict[str, Any], tolerance: float = 1e-9) -> None:
    for result in results:
        for key in ("losses", "norms", "evaluated"):
            assert result[key] == pytest.approx(oracle[key], rel=tolerance), key
        for name, value in oracle["state"].items():
            torch.testing.assert_close(
                result["state"][name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def workers_of(layout: Layout) -> int:
    return (layout.replicas if isinstance(layout.replicas, int) else 1) * layout.shard


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return World(tmp_path_factory.mktemp("oracle")).one_process(by_stepper, PLAN)


@pytest.mark.parametrize("layout", quick.without((LAYOUTS[0], LAYOUTS[2]), LAYOUTS))  # four workers are two as well
def test_every_layout_trains_like_one_process(world: World, oracle: dict[str, Any], layout: Layout) -> None:
    plan = Plan(layout=layout, batch=PLAN.batch, compute=EXACT)
    assert_same(world(by_stepper, workers_of(layout), plan), oracle)


@pytest.mark.parametrize("layout", quick.spread(LAYOUTS, step=3))
def test_the_plain_loop_does_too(world: World, oracle: dict[str, Any], layout: Layout) -> None:
    plan = Plan(layout=layout, batch=PLAN.batch, compute=EXACT)
    assert_same(world(by_plain_loop, workers_of(layout), plan), oracle)


RESUME = Batch(size=16, micro=4)  # four micro-batches: work for up to four workers


def plan_of(layout: Layout) -> Plan:
    return Plan(layout=layout, batch=RESUME, compute=EXACT)


def train(worker: Any) -> dict[int, float]:
    """Steps, and their losses, of this attempt."""
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    schedule = worker.prepare(torch.optim.lr_scheduler.StepLR(optim, 3, 0.5))
    step = worker.stepper(model, optim, F.cross_entropy)
    losses: dict[int, float] = {}
    for batch in worker.batches(dataset(), epochs=6):  # 24 steps
        loss = float(step(batch))
        losses[worker.step] = loss
        schedule.step()
    return losses


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return World(tmp_path_factory.mktemp("full_tensor")).one_process(train, plan_of(Layout()))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(Layout(replicas=4), Layout(shard=2, zero=2), id="dp4-to-shard2"),
        pytest.param(Layout(shard=4), Layout(), id="shard4-to-one"),
        pytest.param(Layout(replicas=2, shard=2), Layout(replicas=3), id="2x2-to-dp3"),
        pytest.param(Layout(shard=3, zero=1), Layout(replicas=2, shard=2), id="shard3-to-2x2"),
    ],
)
def test_a_checkpoint_of_any_layout_goes_on_under_any_other(
    world: World, whole_run: dict[int, float], before: Layout, after: Layout
) -> None:
    first = world(train, workers_of(before), plan_of(before), max_steps=4)
    second = world(train, workers_of(after), plan_of(after))
    for result in first:
        assert result == pytest.approx({step: whole_run[step] for step in range(1, 5)}, rel=1e-9)
    for result in second:
        assert result == pytest.approx({step: whole_run[step] for step in range(5, 25)}, rel=1e-9)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # that is how a single process reads
def test_torchs_own_loader_reads_a_sharded_checkpoint(world: World) -> None:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    def run(worker: Any) -> dict[str, Tensor]:
        model = worker.prepare(Net())
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        step = worker.stepper(model, optim, F.cross_entropy)
        for batch in worker.batches(dataset()):
            step(batch)
        return state_of(model)

    expected = world(run, 3, plan_of(Layout(shard=3)))[0]
    (path,) = (world.run_dir / "checkpoints").iterdir()
    checkpoint = open_checkpoint(path)
    loaded = {f"model.{name}": torch.zeros_like(value) for name, value in expected.items()}
    load(loaded, storage_reader=FileSystemReader(path), no_dist=True)
    own = checkpoint.load(loaded)  # each tensor against its checksum, which is put together from those of its rows
    for name, value in expected.items():
        assert torch.equal(loaded[f"model.{name}"], value), name
        assert torch.equal(own[f"model.{name}"], value), name
    assert {file.name for file in path.glob("*.distcp")} >= {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"}


def test_units_that_are_named_are_gathered_and_recomputed_as_a_whole(world: World, oracle: dict[str, Any]) -> None:
    def by_units(worker: Any) -> dict[str, Any]:
        model = worker.prepare(Net(), units=["blocks.1", "head"])
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
        step = worker.stepper(model, optim, F.cross_entropy, clip_norm=0.5)
        losses = [float(step(batch)) for batch in worker.batches(dataset(34), epochs=2)]
        units = [name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")]
        recomputed = [name for name, module in model.named_modules() if "forward" in vars(module)]
        with pytest.raises(PlanError, match=r"unit tied shares weight with what is outside of it: leave it out"):
            worker.prepare(Net(), units=["blocks.*", "tied"])
        return {"losses": losses, "units": units, "recomputed": recomputed}

    plan = Plan(layout=Layout(shard=2), batch=PLAN.batch, compute=Compute(precision="fp64", recompute="blocks"))
    for found in world(by_units, 2, plan, save_at_end=False):
        assert found["units"] == ["", "blocks.1", "head"] and found["recomputed"] == ["blocks.1", "head"]
        assert found["losses"] == pytest.approx(oracle["losses"], rel=1e-9)
