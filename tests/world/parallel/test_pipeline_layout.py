"""Replicas that are cut into stages train like one process, alone and as several replicas."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import quick
import stage_models
from forked import WorkersFailed, World
from paceline.errors import PlanError
from paceline.parallel.pipeline import stage_worker as stages_run
from paceline.parallel.pipeline.stage_transfer import StageExchange
from paceline.plan import Batch, Guard, Layout, Plan
from paceline.schedule.pipeline import Action, StageMessage, build
from paceline.schedule.pipeline_timeline import StageCost, simulate
from staged_net import (
    EXACT,
    LENGTH,
    RESUME,
    WIDTH,
    Net,
    Text,
    assert_same,
    beside,
    by_sums,
    mean_loss,
    plan_of,
    prepared,
    run,
    sum_loss,
    train,
    workers_of,
)

LAYOUTS = [
    pytest.param(Layout(stages=2), id="stages2"),
    pytest.param(Layout(stages=3, schedule="gpipe"), id="stages3-gpipe"),
    pytest.param(Layout(stages=4), id="stages4"),
    pytest.param(Layout(stages=2, schedule="interleaved", stages_per_worker=2), id="stages2-interleaved"),
    pytest.param(Layout(stages=3, schedule="zero-bubble"), id="stages3-zero-bubble"),
    pytest.param(Layout(replicas=2, stages=2), id="2xstages2"),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return World(tmp_path_factory.mktemp("oracle")).one_process(run, plan_of(Layout()))


@pytest.mark.parametrize("layout", quick.without(LAYOUTS[2:3], LAYOUTS))
def test_every_schedule_trains_like_one_process(world: World, oracle: dict[str, Any], layout: Layout) -> None:
    assert_same(world(run, workers_of(layout), plan_of(layout)), oracle)


@pytest.mark.parametrize("layout", [quick.further(Layout(stages=2)), Layout(replicas=2, stages=2)], ids=str)
def test_losses_as_sum_and_count_are_weighed_by_their_counts(world: World, tmp_path: Path, layout: Layout) -> None:
    batch = Batch(size=16, micro=6)  # three micro-batches: one replica has two of them
    expected = beside(tmp_path).one_process(by_sums, Plan(batch=batch, compute=EXACT))
    assert_same(world(by_sums, workers_of(layout), Plan(layout=layout, batch=batch, compute=EXACT)), expected)


def test_dropout_is_the_same_for_any_stages_and_replicas(world: World, tmp_path: Path) -> None:
    def dropped(worker: Any) -> list[float]:
        torch.manual_seed(3)
        model = worker.prepare(Net(drop=0.3))
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        step = worker.stepper(model, optim, mean_loss)
        return [float(step(batch)) for batch in worker.batches(Text())]

    expected = world(dropped, 2, plan_of(Layout(stages=2)), save_at_end=False)[0]
    assert len(set(expected)) == 4
    for layout in (Layout(stages=4, schedule="gpipe"), Layout(replicas=2, stages=2)):
        for found in beside(tmp_path / str(layout.stages))(dropped, 4, plan_of(layout), save_at_end=False):
            assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("recompute", ["blocks", "selective"])
def test_recomputed_blocks_give_the_same(world: World, oracle: dict[str, Any], recompute: str) -> None:
    assert_same(world(run, 2, plan_of(Layout(stages=2), recompute=recompute)), oracle)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2)])
def test_bf16_is_near_and_fp32_is_nearer(
    world: World, oracle: dict[str, Any], precision: str, tolerance: float
) -> None:
    for result in world(run, 2, plan_of(Layout(stages=2), precision=precision)):
        assert result["losses"] == pytest.approx(oracle["losses"], rel=tolerance)


# --------------------------------------------------------------------------------------------------------------- models


def by_forward(model_of: Any, data: Any, forward: Any) -> Any:
    """A training of another model, as a function of the worker."""

    def run(worker: Any) -> list[float]:
        torch.manual_seed(3)
        model = worker.prepare(model_of())
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        step = worker.stepper(model, optim, forward=forward)
        return [float(step(batch)) for batch in worker.batches(data, epochs=2)]

    return run


class Plain(nn.Module):
    """Two layers, with a skip over the cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x))) + self.first.bias.sum()


def without_dropout(model: nn.Module) -> nn.Module:
    """Every rate of dropout in modules and in a configuration of transformers is nought."""
    for thing in (*model.modules(), *(module.config for module in model.modules() if hasattr(module, "config"))):
        for name in (
            "p",
            "dropout",
            "dropout_prob",
            "dropout_rate",
            "attn_pdrop",
            "attention_dropout",
            "hidden_dropout_prob",
        ):
            if isinstance(getattr(thing, name, None), float):
                setattr(thing, name, 0.0)
    return model


class Rows(Dataset[dict[str, Tensor]]):
    """What named batches hold, sample by sample."""

    def __init__(self, micros: list[dict[str, Tensor]]) -> None:
        self.columns = {name: torch.cat([micro[name] for micro in micros]) for name in micros[0]}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: column[number] for name, column in self.columns.items()}


def assert_trains_alike(world: World, tmp_path: Path, train: Any) -> None:
    batch = Batch(size=8, micro=3)
    expected = beside(tmp_path).one_process(train, Plan(batch=batch, compute=EXACT))
    for found in world(train, 2, Plan(layout=Layout(stages=2), batch=batch, compute=EXACT)):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "kind", quick.without(("llama", "bert", "vit"), ("gpt2", "llama", "bert", "t5", "vit", "mixtral"))
)
def test_models_of_transformers_work_as_they_are(world: World, tmp_path: Path, kind: str) -> None:
    case = stage_models.make(kind, num_micro=5)
    model = without_dropout(case.model)
    assert_trains_alike(
        world, tmp_path, by_forward(lambda: model, Rows(case.micros), lambda one, micro: one(**micro).loss)
    )


@pytest.mark.parametrize("kind", ["plain", "resnet"])
def test_skips_over_the_cut_and_batch_norms_work(world: World, tmp_path: Path, kind: str) -> None:
    model = Plain() if kind == "plain" else stage_models.make("resnet").model
    shape = (30, 5) if kind == "plain" else (30, 3, 8, 8)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    data = TensorDataset(rows, rows.flatten(1)[:, :5].sin())
    train = by_forward(lambda: model, data, lambda one, micro: F.mse_loss(one(micro[0]), micro[1]))
    assert_trains_alike(world, tmp_path, train)


def test_parameters_may_be_frozen_and_thawed_between_steps(world: World, tmp_path: Path) -> None:
    def work(worker: Any) -> list[float]:
        model, optim = prepared(worker)
        early = [*model.words.parameters(), *model.places.parameters(), *model.blocks[0].parameters()]
        for parameter in early:
            parameter.requires_grad_(False)
        step = worker.stepper(model, optim, mean_loss)
        losses = []
        for number, batch in enumerate(worker.batches(Text(), epochs=2)):
            if number == 3:
                for parameter in early:
                    parameter.requires_grad_(True)
            losses.append(float(step(batch)))
        return losses

    expected = beside(tmp_path).one_process(work, plan_of(Layout()))
    for found in world(work, 2, plan_of(Layout(stages=2))):
        assert found == pytest.approx(expected, rel=1e-9)


# -------------------------------------------------------------------------------------------------------- what can fail


def test_a_spike_rolls_back_all_stages(world: World, tmp_path: Path) -> None:
    def spiky(worker: Any) -> list[float]:
        model, optim = prepared(worker)
        step = worker.stepper(model, optim, lambda o, y: mean_loss(o, y) * (1e4 if spikes else 1.0))
        losses = []
        for number, batch in enumerate(worker.batches(Text(), epochs=4)):
            spikes = number == 11
            losses.append(float(step(batch)))
        return losses

    guard = Guard(on_spike="rollback", window=8, snapshot_every=4, check_every=3)
    expected = beside(tmp_path).one_process(spiky, Plan(batch=RESUME, compute=EXACT, guard=guard))
    layout = Layout(replicas=2, stages=2)
    for found in world(spiky, 4, Plan(layout=layout, batch=RESUME, compute=EXACT, guard=guard)):
        assert found == pytest.approx(expected, rel=1e-9)


def test_uses_that_stages_do_not_allow_say_what_to_write(world: World) -> None:
    def work(worker: Any) -> None:
        model, _ = prepared(worker)
        with pytest.raises(RuntimeError, match=r"only a part of it\. Train by step = worker\.stepper"):
            model(torch.zeros(2, LENGTH, dtype=torch.int64))
        for batch in worker.batches(Text()):
            with pytest.raises(RuntimeError, match=r"plain loop .*: step = worker\.stepper\(model, optim, loss\)"):
                for _ in batch:
                    pass
            break

    world(work, 2, plan_of(Layout(stages=2)), save_at_end=False)


def test_a_loss_that_needs_weights_of_another_stage_is_refused_with_the_remedy(world: World) -> None:
    def work(worker: Any) -> None:
        model, optim = prepared(worker)

        def forward(one: Any, micro: Any) -> Tensor:
            output = one(micro[0])
            return mean_loss(output, micro[1]) + F.linear(output[..., :WIDTH], one.places.weight).mean()

        step = worker.stepper(model, optim, forward=forward)
        for batch in worker.batches(Text()):
            with pytest.raises(PlanError, match=r"places\.weight is used on stage 1, which does not have it.*sample="):
                step(batch)
            break
        other = worker.prepare(Net())
        with pytest.raises(PlanError, match=r"a stepper over 2 models .* one pipeline is of one model"):
            worker.stepper([model, other], optim, forward=forward)

    world(work, 2, plan_of(Layout(stages=2)), save_at_end=False)


class InNest(nn.Module):
    """Between its units it asks for what is in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x if bool(x.max() > 0) else -x)


def test_what_cannot_be_cut_is_refused_when_it_is_prepared(world: World) -> None:
    def work(worker: Any) -> None:
        with pytest.raises(PlanError, match=r"after first and before the next unit.* asks for the contents"):
            worker.prepare(InNest())
        with pytest.raises(PlanError, match=r"Linear has 0 modules .*\(stages=2\) makes 2 stages\. Use fewer"):
            worker.prepare(nn.Linear(3, 3))
        with pytest.raises(PlanError, match=r"'blocks\.9' is no unit that is called"):
            worker.prepare(Net(), stages=["blocks.9"])

    world(work, 2, plan_of(Layout(stages=2)), save_at_end=False)


def test_stages_begin_where_the_script_says_and_the_console_tells_it(world: World) -> None:
    def work(worker: Any) -> list[str]:
        model = worker.prepare(Net(), stages=["blocks.3"])
        return [name for name, parameter in model.named_parameters() if not parameter.is_meta]

    first, last = world(work, 2, plan_of(Layout(stages=2)))
    assert "blocks.2.qkv.weight" in first and "blocks.3.qkv.weight" not in first
    assert "blocks.3.qkv.weight" in last and "blocks.2.qkv.weight" not in last
    told = (world.worker_dir(0) / "events.jsonl").read_text()
    assert re.search(
        r"Net is partitioned into 2 stages: words to blocks\.2 \(\d units\): [\d.]+ KiB; blocks\.3 to idle \(4 units\)",
        told,
    )


def pretend_time(worker: Any, costs: Sequence[StageCost], folder: Path) -> None:
    """Have passes go by a clock on which an action takes what its stage costs, and a message nothing."""
    now_s = [0.0]

    class Clock:
        def __init__(self, _: torch.device) -> None:
            now_s[0] = 0.0

        def now(self) -> float:
            return now_s[0]

        def seconds(self, moment: float) -> float:
            return moment

    class Stamped(StageExchange):
        def take(self, message: StageMessage) -> dict[int, Tensor]:
            arrived = super().take(message)
            now_s[0] = max(now_s[0], float(stamp(message).read_text()))
            return arrived

        def send(self, message: StageMessage, tensors: Mapping[int, Tensor]) -> None:
            written = stamp(message).with_suffix(".part")  # a trial sends what is named alike again
            written.write_text(str(now_s[0]))
            written.replace(stamp(message))
            super().send(message, tensors)

    def stamp(message: StageMessage) -> Path:
        return folder / "-".join(map(str, (worker.step, *message)))

    def timed(do: Any) -> Any:
        def action_of(run: Any, action: Action, arrived: Any) -> Any:
            now_s[0] += costs[action.stage].of(action.kind)
            return do(run, action, arrived)

        return action_of

    code: Any = stages_run
    code._DeviceTimer, code.StageExchange = Clock, Stamped
    code._PipelineStep._do_forward, code._PipelineStep._do_backward = (
        timed(code._PipelineStep._do_forward),
        timed(code._PipelineStep._do_backward),
    )


def test_the_wait_of_a_pipeline_is_told_beside_the_schedules_ideal(world: World, tmp_path: Path) -> None:
    costs = [StageCost(), StageCost(forward=3)]

    def work(worker: Any) -> None:
        pretend_time(worker, costs, tmp_path)
        train(worker)

    world(work, 2, Plan(layout=Layout(stages=2), batch=RESUME, compute=EXACT), max_steps=6)
    told = (world.worker_dir(0) / "events.jsonl").read_text()
    share = simulate(build("1f1b", num_workers=2, num_micro=4), costs).bubble_share
    assert share == 1 - 4 * (3 + 5) / (2 * 23)  # one forward, the slow stage four times, one backward
    assert (
        f"pipeline 1f1b of 2 stages, 4 micro-batches: workers wait {share:.0%} of a step, the schedule's ideal is 20%"
        in told
    )
    assert "pipeline" not in (world.worker_dir(1) / "events.jsonl").read_text()


def test_what_is_reported_inside_of_the_forward_is_told_by_the_last_stage(world: World) -> None:
    def work(worker: Any) -> None:
        model, optim = prepared(worker)

        def forward(one: Any, micro: Any) -> Tensor:
            output = one(micro[0])
            worker.report(hits=(output.argmax(2) == micro[1]).double().mean())
            return mean_loss(output, micro[1])

        step = worker.stepper(model, optim, forward=forward)
        for batch in worker.batches(Text()):
            step(batch)

    world(work, 2, plan_of(Layout(stages=2)), save_at_end=False)
    first, last = ((world.worker_dir(rank) / "events.jsonl").read_text() for rank in (0, 1))
    assert "StepDone" in first and "hits" not in first
    assert len(re.findall(r'"metrics": {"hits": 0\.\d+', last)) == 4


def test_a_count_that_another_stages_unit_made_is_refused(world: World) -> None:
    def work(worker: Any) -> None:
        model, optim = prepared(worker)

        def forward(one: Any, micro: Any) -> Any:
            early: list[Tensor] = []
            hook = one.words.register_forward_hook(lambda _, __, out: early.append(out))
            output = one(micro[0])
            hook.remove()
            return sum_loss(output, micro[1])[0], early[0].detach().abs().sum()

        step = worker.stepper(model, optim, forward=forward)
        for batch in worker.batches(Text()):
            step(batch)

    with pytest.raises(WorkersFailed) as caught:
        world(work, 2, plan_of(Layout(stages=2)), save_at_end=False)
    assert "compute it from the inputs, as in (target != -100).sum()" in str(caught.value)
