"""Replicas whose layers are cut over several workers train like one process, alone and mixed with other axes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quick
from forked import World
from layout_runs import (
    EXACT,
    RESUME,
    ROWS,
    Net,
    Text,
    assert_same,
    beside,
    by_plain_loop,
    by_stepper,
    next_word,
    plan_of,
    prepared,
    train,
    without_dropout,
    workers_of,
)
from paceline.checkpoint.reader import open_checkpoint
from paceline.errors import CheckpointError, PlanError
from paceline.plan import Batch, Guard, Layout, Plan
from tensor_models import hugging_face

LAYOUTS = [
    pytest.param(Layout(tensor=2), id="tensor2"),
    pytest.param(Layout(tensor=4), id="tensor4"),
    pytest.param(Layout(replicas=2, tensor=2), id="2xtensor2"),
    pytest.param(Layout(shard=2, tensor=2), id="shard2xtensor2"),
    pytest.param(Layout(shard=2, zero=1, tensor=2), id="shard2-zero1xtensor2"),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return World(tmp_path_factory.mktemp("oracle")).one_process(by_stepper, plan_of(Layout()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_like_one_process(world: World, oracle: dict[str, Any], layout: Layout) -> None:
    assert_same(world(by_stepper, workers_of(layout), plan_of(layout)), oracle)


@pytest.mark.parametrize("axes", [{}, {"replicas": 2}, {"shard": 2}, quick.further({"shard": 2, "zero": 1})], ids=str)
def test_with_tokens_cut_between_layers_it_trains_like_one_process(
    world: World, tmp_path: Path, axes: dict[str, Any]
) -> None:
    def run(worker: Any) -> Any:  # what needs the whole of what is cut warns, and is slow
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* needs the whole of what is split")
            return without_dropout(worker)

    layout = Layout(**axes, tensor=2, sequence=True)  # parts of a tensor draw other dropout than the whole
    expected = beside(tmp_path).one_process(without_dropout, plan_of(Layout()))
    assert_same(world(run, workers_of(layout), plan_of(layout)), expected)


def test_nothing_is_kept_of_parameters_whose_rows_were_split(world: World) -> None:
    """Numbers that name them would name others later."""

    def run(worker: Any) -> None:
        model, _ = prepared(worker)
        known = {id(parameter) for parameter in model.parameters()}
        assert (
            worker._models.layout.split_ids
            and worker._models.layout.split_ids | worker._models.layout.partial_ids <= known
        )

    world(run, 4, plan_of(Layout(shard=2, tensor=2, sequence=True)))


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]])
def test_the_plain_loop_does_too(world: World, oracle: dict[str, Any], layout: Layout) -> None:
    assert_same(world(by_plain_loop, workers_of(layout), plan_of(layout)), oracle)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(shard=2, tensor=2)], ids=str)
def test_recomputed_blocks_give_the_same(world: World, oracle: dict[str, Any], layout: Layout) -> None:
    assert_same(world(by_stepper, workers_of(layout), plan_of(layout, recompute="blocks")), oracle)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_bf16_is_near_and_fp32_is_nearer(
    world: World, oracle: dict[str, Any], precision: str, tolerance: float
) -> None:
    for result in world(by_stepper, 2, plan_of(Layout(tensor=2), precision=precision)):
        assert result["losses"] == pytest.approx(oracle["losses"], rel=tolerance)


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return World(tmp_path_factory.mktemp("whole")).one_process(train, Plan(batch=RESUME, compute=EXACT))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(Layout(replicas=4), Layout(tensor=2), id="dp4-to-tensor2"),
        pytest.param(Layout(tensor=4), Layout(), id="tensor4-to-one"),
        quick.further(Layout(replicas=2, tensor=2), Layout(replicas=3), id="2xtensor2-to-dp3"),
        pytest.param(Layout(shard=2, tensor=2), Layout(shard=3, zero=1), id="shard2xtensor2-to-shard3"),
        quick.further(Layout(shard=2), Layout(shard=2, tensor=2), id="shard2-to-shard2xtensor2"),
    ],
)
def test_a_checkpoint_of_any_layout_goes_on_under_any_other(
    world: World, whole_run: dict[int, float], before: Layout, after: Layout
) -> None:
    first = world(train, workers_of(before), Plan(layout=before, batch=RESUME, compute=EXACT), max_steps=4)
    second = world(train, workers_of(after), Plan(layout=after, batch=RESUME, compute=EXACT))
    for result in first:
        assert result == pytest.approx({step: whole_run[step] for step in range(1, 5)}, rel=1e-9)
    for result in second:
        assert result == pytest.approx({step: whole_run[step] for step in range(5, 25)}, rel=1e-9)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # that is how a single process reads
@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(shard=2, tensor=2)], ids=str)
def test_torchs_own_loader_reads_what_cut_layers_saved(world: World, tmp_path: Path, layout: Layout) -> None:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    one = beside(tmp_path)
    plan = Plan(layout=layout, batch=RESUME, compute=EXACT)
    world(train, workers_of(layout), plan, max_steps=4)
    one(train, 1, Plan(batch=RESUME, compute=EXACT), max_steps=4)
    (path,), (other,) = ((each.run_dir / "checkpoints").iterdir() for each in (world, one))
    checkpoint, expected = open_checkpoint(path).load(), open_checkpoint(other).load()
    loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
    load(loaded, storage_reader=FileSystemReader(path), no_dist=True)
    assert checkpoint.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(checkpoint[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(loaded[name], checkpoint[name]), name
    assert sum(file.stat().st_size for file in path.glob("__1_*.distcp")) > 0.2 * sum(
        file.stat().st_size for file in path.glob("*.distcp")
    ) / (workers_of(layout) - 1), "the second worker has written its share"


class Noting(torch.optim.SGD):
    """Keeps of each parameter something that has another shape, once it `notes`."""

    notes = True

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups if Noting.notes else ():
            for parameter in group["params"]:
                self.state[parameter]["lengths"] = torch.zeros(3)
        return loss


def test_state_that_has_not_its_parameters_shape_is_refused_at_once_or_where_it_comes_later_when_it_is_saved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(worker: Any) -> None:
        torch.manual_seed(3)
        model = worker.prepare(Net())
        with pytest.raises(PlanError, match=r"Noting keeps lengths \[3\] for .*under Layout\(replicas=1, tensor=2\)"):
            worker.prepare(Noting(model.parameters(), lr=0.1))
        monkeypatch.setattr(Noting, "notes", False)
        optim = worker.prepare(Noting(model.parameters(), lr=0.1))
        monkeypatch.setattr(Noting, "notes", True)
        step = worker.stepper(model, optim, next_word)
        for batch in worker.batches(Text()):
            step(batch)
            with pytest.raises(CheckpointError, match=r"cannot store lengths of model\..*state has its parameters'"):
                worker.save()
            break

    world(run, 2, Plan(layout=Layout(tensor=2), batch=RESUME, compute=EXACT), save_at_end=False)


# -------------------------------------------------------------------------------------------------------- what can fail


def test_a_spike_rolls_back_cut_state(world: World, tmp_path: Path) -> None:
    def spiky(worker: Any) -> list[float]:
        model, optim = prepared(worker)
        step = worker.stepper(model, optim, lambda o, y: next_word(o, y) * (1e4 if spikes else 1.0))
        losses = []
        for number, batch in enumerate(worker.batches(Text(), epochs=4)):
            spikes = number == 11
            losses.append(float(step(batch)))
        return losses

    guard = Guard(on_spike="rollback", window=8, snapshot_every=4)
    batch = Batch(size=16, micro=4)
    expected = beside(tmp_path).one_process(spiky, Plan(batch=batch, compute=EXACT, guard=guard))
    for found in world(spiky, 2, Plan(layout=Layout(tensor=2), batch=batch, compute=EXACT, guard=guard)):
        assert found == pytest.approx(expected, rel=1e-9)


def test_clipping_by_the_norm_of_a_part_is_refused(world: World) -> None:
    def run(worker: Any) -> None:
        model, _ = prepared(worker)
        for batch in worker.batches(Text()):
            for x, y in batch:
                worker.backward(next_word(model(x), y))
            with pytest.raises(PlanError, match=r"holds a part of it: .* worker\.clip_gradients\(max_norm\)"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            break

    world(run, 2, plan_of(Layout(tensor=2)), save_at_end=False)


def test_what_cannot_be_cut_is_refused_with_the_remedy(world: World) -> None:
    def run(worker: Any) -> None:
        with pytest.raises(PlanError, match=r"(?s)Use tensor=.*worker\.prepare\(model, cut=\{.*'replicated'\}\)"):
            worker.prepare(Net())  # four heads

    world(run, 3, plan_of(Layout(tensor=3)))


@pytest.mark.parametrize(("kind", "words", "tensor"), [("gpt2", 101, 4), ("llama", 96, 2), ("bert", 99, 4)])
def test_models_of_transformers_work_as_they_are(
    world: World, tmp_path: Path, kind: str, words: int, tensor: int
) -> None:
    def run(worker: Any) -> list[float]:
        torch.manual_seed(3)
        model = worker.prepare(hugging_face(kind, vocab_size=words))
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        step = worker.stepper(model, optim, forward=lambda one, micro: one(input_ids=micro[0], labels=micro[0]).loss)
        return [float(step(batch)) for batch in worker.batches(Text(ROWS))]

    pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")  # once, for all workers
    batch = Batch(size=16, micro=4)
    expected = beside(tmp_path).one_process(run, Plan(batch=batch, compute=EXACT))
    for found in world(run, tensor, Plan(layout=Layout(tensor=tensor), batch=batch, compute=EXACT)):
        assert found == pytest.approx(expected, rel=1e-9)


def looks_in_inference_mode(worker: Any) -> list[float]:
    torch.manual_seed(0)
    model = worker.prepare(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)))
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), F.mse_loss)
    x, found = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), list[float]()
    for batch in worker.batches(TensorDataset(x, x[:, :4])):
        found.append(float(step(batch)))
        with torch.inference_mode():
            seen = x[:4].clone()
            found.append(float(model(seen).sum()))
            seen.mul_(2)  # what inference mode changes, no version tells
            found.append(float(model(seen).sum()))
    return found


def test_forwards_in_inference_mode_between_steps(world: World) -> None:
    batch = Batch(size=8, micro=4)
    alone = world.one_process(looks_in_inference_mode, Plan(batch=batch))
    for found in world(looks_in_inference_mode, 2, Plan(layout=Layout(tensor=2), batch=batch), save_at_end=False):
        assert found == pytest.approx(alone, rel=1e-4, abs=1e-5)
