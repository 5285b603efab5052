"""Replicas that are cut along two axes or more train like one process, and their checkpoints go on anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quick
from context_models import OwnAttention
from forked import World
from layout_runs import (
    EXACT,
    RESUME,
    ROWS,
    Text,
    assert_same,
    beside,
    in_one_epoch,
    next_word,
    plan_of,
    train,
    without_dropout,
    workers_of,
)
from paceline.checkpoint.reader import open_checkpoint
from paceline.comm.sharded_tensors import is_sharded
from paceline.plan import Batch, Compute, Layout, Plan
from tensor_models import hugging_face


class Scaled(nn.Module):
    """Layers, and between them a number for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.full((6,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


class Normed(nn.Module):
    """A layer whose weight is made of two parameters in each forward, and so read again for their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.ones(6) / 2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.direction / self.direction.norm(dim=1, keepdim=True) * self.length[:, None] ** 2
        return torch.tanh(F.linear(x, weight)) + x


MIXTURES = [
    quick.further(Layout(stages=2, tensor=2)),
    Layout(stages=2, tensor=2, sequence=True, schedule="zero-bubble"),
    Layout(replicas=2, stages=2, tensor=2, schedule="interleaved", stages_per_worker=2),
    Layout(shard=2, context=2),
    quick.further(Layout(replicas=2, stages=2, context=2)),
    quick.further(Layout(shard=2, zero=1, stages=2, schedule="interleaved", stages_per_worker=2)),
    Layout(shard=2, zero=2, stages=2, schedule="gpipe"),
    Layout(shard=2, stages=2, tensor=2, sequence=True),
    quick.further(Layout(shard=2, zero=1, stages=2, schedule="zero-bubble")),
    quick.further(Layout(shard=2, zero=2, stages=2, schedule="zero-bubble")),
    Layout(shard=3, stages=2, schedule="zero-bubble"),
    quick.further(Layout(replicas=2, context=2, tensor=2)),
    quick.further(Layout(shard=2, context=2, tensor=2)),
    Layout(stages=2, context=2, tensor=2),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return World(tmp_path_factory.mktemp("oracle")).one_process(in_one_epoch, plan_of(Layout()))


@pytest.mark.parametrize("layout", MIXTURES, ids=str)
def test_every_mixture_trains_like_one_process(world: World, oracle: dict[str, Any], layout: Layout) -> None:
    """Losses, norms before clipping, an evaluation, tied embeddings, a buffer, uneven shares and a last short step."""
    assert_same(world(in_one_epoch, workers_of(layout), plan_of(layout)), oracle)


@pytest.mark.further
def test_rows_stages_and_slices_at_once_train_like_one_process(world: World, oracle: dict[str, Any]) -> None:
    layout = Layout(shard=2, stages=2, context=2)
    for found in world(in_one_epoch, 8, plan_of(layout), max_steps=2, save_at_end=False):
        for what in ("losses", "norms"):
            assert found[what] == pytest.approx(oracle[what][:2], rel=1e-9), what


@pytest.mark.further
def test_blocks_of_a_mixture_are_recomputed_in_16_bits(world: World, oracle: dict[str, Any]) -> None:
    for layout in (Layout(stages=2, tensor=2, sequence=True), Layout(shard=2, stages=2), Layout(context=2, tensor=2)):
        for result in world(in_one_epoch, 4, plan_of(layout, precision="bf16", recompute="blocks")):
            assert result["losses"] == pytest.approx(oracle["losses"], rel=3e-2)
        world.run_dir = world.run_dir.with_name(f"beside_{world.attempt}")


def undropped(worker: Any) -> dict[int, float]:
    return train(worker, drop=0.0)


@pytest.mark.further
def test_a_checkpoint_of_any_mixture_goes_on_under_any_other_layout(world: World, tmp_path: Path) -> None:
    whole = beside(tmp_path).one_process(undropped, Plan(batch=RESUME, compute=EXACT))
    layouts = [
        Layout(stages=2, tensor=2),
        Layout(shard=2, context=2),
        Layout(stages=2, context=2),
        Layout(context=2, tensor=2),
        Layout(shard=2, stages=2),
        Layout(stages=2, tensor=2, sequence=True),
        Layout(),
    ]
    for number, layout in enumerate(layouts):
        plan = Plan(layout=layout, batch=RESUME, compute=EXACT)
        expected = {step: whole[step] for step in (2 * number + 1, 2 * number + 2)}
        for found in world(undropped, workers_of(layout), plan, max_steps=2 * number + 2):
            assert found == pytest.approx(expected, rel=1e-9), layout


class Pair(nn.Module):
    """What every axis but `context` can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def pairs(worker: Any) -> dict[int, float]:
    """Steps, and their losses, of this attempt."""
    torch.manual_seed(3)
    model = worker.prepare(nn.Sequential(*[Pair() for _ in range(2)]))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    step = worker.stepper(model, optim, F.mse_loss)
    rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double()
    losses: dict[int, float] = {}
    for batch in worker.batches(TensorDataset(rows, rows.sin()), epochs=11):  # of four steps
        loss = float(step(batch))
        losses[worker.step] = loss
    return losses


def test_twenty_losses_after_each_change_of_layout_are_those_of_one_process(world: World, tmp_path: Path) -> None:
    whole = beside(tmp_path).one_process(pairs, Plan(batch=RESUME, compute=EXACT))
    world(pairs, 4, Plan(layout=Layout(replicas=4), batch=RESUME, compute=EXACT), max_steps=4)
    for number, ways in enumerate(
        [
            [Layout(replicas=3)],
            [Layout(shard=2, tensor=2)],
            [Layout(stages=2), Layout()],
        ]  # the last one after the third
    ):
        branch = World(tmp_path / str(number))
        shutil.copytree(world.run_dir, branch.run_dir)
        branch.attempt, last = world.attempt, 4
        for layout in ways:
            first, last = last + 1, last + 20
            plan = Plan(layout=layout, batch=RESUME, compute=EXACT)
            for found in branch(pairs, workers_of(layout), plan, max_steps=last):
                assert found == pytest.approx({step: whole[step] for step in range(first, last + 1)}, rel=1e-9), layout


@pytest.mark.parametrize("layout", [Layout(shard=2, stages=2), Layout(stages=2, context=2)], ids=str)
def test_a_checkpoint_of_a_mixture_holds_each_number_once(world: World, tmp_path: Path, layout: Layout) -> None:
    one = beside(tmp_path)
    world(undropped, workers_of(layout), Plan(layout=layout, batch=RESUME, compute=EXACT), max_steps=2)
    one(undropped, 1, Plan(batch=RESUME, compute=EXACT), max_steps=2)
    (path,), (other,) = ((each.run_dir / "checkpoints").iterdir() for each in (world, one))
    found, expected = open_checkpoint(path).load(), open_checkpoint(other).load()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    sizes, whole = ([file.stat().st_size for file in each.glob("*.distcp")] for each in (path, other))
    assert len(sizes) == layout.stages * layout.shard and sum(sizes) < 1.4 * sum(
        whole
    )  # each file has a head of its own


def test_values_that_are_cut_by_features_travel_between_stages(world: World, tmp_path: Path) -> None:
    def work(worker: Any) -> list[float]:
        torch.manual_seed(3)
        layers = [nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)]
        model = worker.prepare(nn.Sequential(*layers), stages=["6"])  # between the two layers of a pair
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        step = worker.stepper(model, optim, F.mse_loss, clip_norm=1.0)
        rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double()
        return [float(step(batch)) for batch in worker.batches(TensorDataset(rows, rows.sin()))]

    expected = beside(tmp_path).one_process(work, plan_of(Layout()))
    for found in world(work, 4, plan_of(Layout(stages=2, tensor=2))):
        assert found == pytest.approx(expected, rel=1e-9)


def test_values_that_are_cut_twice_travel_between_stages(world: World, tmp_path: Path) -> None:
    def work(worker: Any) -> list[float]:
        torch.manual_seed(3)
        layers = [nn.Embedding(48, 16), OwnAttention(16, 4, 2), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)]
        model = worker.prepare(nn.Sequential(*layers, nn.Linear(16, 48)), stages=["5"])  # between the layers of a pair
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        step = worker.stepper(model, optim, next_word, clip_norm=1.0)
        return [float(step(batch)) for batch in worker.batches(Text(32))]

    expected = beside(tmp_path).one_process(work, plan_of(Layout()))
    for found in world(work, 8, plan_of(Layout(stages=2, context=2, tensor=2))):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        pytest.param(Layout(stages=2, tensor=2), ("gpt2", "llama"), id="stages2xtensor2"),
        pytest.param(Layout(context=2, tensor=2), ("gpt2", "llama", "bert"), id="context2xtensor2"),
    ],
)
def test_models_of_transformers_work_as_they_are(
    world: World, tmp_path: Path, layout: Layout, kinds: tuple[str, ...]
) -> None:
    def loss_of(model: Any, micro: tuple[Tensor, Tensor]) -> Tensor:
        return model(input_ids=micro[0], labels=micro[0]).loss

    def work(worker: Any) -> list[list[float]]:
        found: list[list[float]] = []
        for kind in kinds:
            torch.manual_seed(3)
            model = worker.prepare(hugging_face(kind, use_cache=False))
            optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
            step = worker.stepper(model, optim, forward=loss_of)
            found.append([float(step(batch)) for batch in worker.batches(Text(ROWS))])
        return found

    for kind in kinds:
        pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")  # once, for all workers
    batch = Batch(size=16, micro=4)
    expected = beside(tmp_path).one_process(work, Plan(batch=batch, compute=EXACT))
    for found in world(work, 4, Plan(layout=layout, batch=batch, compute=EXACT)):
        for losses, wanted in zip(found, expected, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-6)  # the model computes its loss in single precision


def with_few_kinds(worker: Any) -> dict[str, Any]:
    from paceline.parallel.pipeline import stage_worker

    stage_worker.MOST_KINDS = 1
    return without_dropout(worker)


def test_kinds_of_micro_batches_that_keep_changing_are_forgotten_and_told(world: World, tmp_path: Path) -> None:
    expected = beside(tmp_path).one_process(without_dropout, plan_of(Layout()))
    assert_same(world(with_few_kinds, 2, plan_of(Layout(stages=2))), expected)
    told = "".join(file.read_text() for file in world.run_dir.glob("attempt_1/worker_*/events.jsonl"))
    assert told.count("the shapes of micro-batches keep changing") >= 1


def test_a_parameter_between_units_stays_whole_beside_split_rows(world: World, tmp_path: Path) -> None:
    def work(worker: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        model = worker.prepare(Scaled())
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        step = worker.stepper(model, optim, F.mse_loss, clip_norm=0.1)
        rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double()
        losses, norms = [], []
        for batch in worker.batches(TensorDataset(rows, rows.sin())):
            losses.append(float(step(batch)))
            norms.append(float(step.grad_norm))
        return {"losses": losses, "norms": norms, "split": sum(map(is_sharded, model.parameters()))}

    expected = beside(tmp_path).one_process(work, plan_of(Layout()))
    for found in world(work, 4, plan_of(Layout(shard=2, stages=2))):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert found["split"] == 4  # two layers of this worker's stage


def test_late_gradients_may_need_the_parameters_again(world: World, tmp_path: Path) -> None:
    def work(worker: Any) -> list[float]:
        torch.manual_seed(3)
        model = worker.prepare(nn.Sequential(*[Normed() for _ in range(4)]), sample=(torch.randn(2, 6),))
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        step = worker.stepper(model, optim, F.mse_loss, clip_norm=0.1)
        rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double()
        return [float(step(batch)) for batch in worker.batches(TensorDataset(rows, rows.sin()))]

    expected = beside(tmp_path).one_process(work, plan_of(Layout()))
    for found in world(work, 4, plan_of(Layout(shard=2, stages=2, schedule="zero-bubble"))):
        assert found == pytest.approx(expected, rel=1e-9)


def test_optimizer_state_of_stages_is_kept_in_files_and_comes_back(world: World, tmp_path: Path) -> None:
    whole = beside(tmp_path).one_process(undropped, Plan(batch=RESUME, compute=EXACT), max_steps=4)
    compute = Compute(precision="fp64", offload="optimizer", offload_path=str(tmp_path))
    plan = Plan(layout=Layout(stages=2, shard=2, zero=1), batch=RESUME, compute=compute)
    for steps in ((1, 2), (3, 4)):
        for found in world(undropped, 4, plan, max_steps=steps[-1]):
            assert found == pytest.approx({step: whole[step] for step in steps}, rel=1e-9)
