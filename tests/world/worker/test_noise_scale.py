"""The noise scale in real runs: where it is known by construction, and the same under every layout."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from forked import World
from layout_runs import EXACT, RESUME, Text, next_word, prepared
from paceline.events import StepDone, decode
from paceline.plan import AllReduce, Batch, Cast, Int8, Layout, ParameterServer, Plan
from paceline.worker.step import gradient_pass

WIDTH, STEPS, SIGNAL = 200, 60, 16.0
KNOWN = WIDTH / SIGNAL  # samples: each number of a sample's gradient has a variance of 1


class Gradients(Dataset[Tensor]):
    """Samples that are their own gradients: one direction of squared length SIGNAL, and Gaussian noise."""

    def __len__(self) -> int:
        return 16 * STEPS

    def __getitem__(self, number: int) -> Tensor:
        noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
        noise[0] += SIGNAL**0.5
        return noise


def measured(worker: Any, *, sums: bool = False) -> float | None:
    model = worker.prepare(nn.Linear(WIDTH, 1, bias=False))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.01))

    def forward(model: nn.Module, micro: Tensor) -> Any:
        return (model(micro).sum(), 7 * len(micro)) if sums else model(micro).mean()

    step = worker.stepper(model, optim, forward=forward)
    for batch in worker.batches(Gradients(), epochs=1):
        step(batch)
    return worker._loop.executor.noise.samples


@pytest.mark.parametrize(
    ("workers", "plan", "sums"),
    [
        (1, Plan(batch=Batch(size=16, micro=5)), False),
        (3, Plan(batch=Batch(size=16, micro=3)), False),
        (2, Plan(layout=Layout(shard=2), batch=Batch(size=16, micro=2)), False),
        (2, Plan(batch=Batch(size=16, micro=4), wire=Cast(dtype="bf16")), True),
    ],
    ids=[
        "micro-batches of one replica",
        "uneven shares of three",
        "rows of one replica",
        "sums over seven tokens each, rounded",
    ],
)
def test_it_is_what_the_samples_were_made_with(world: World, workers: int, plan: Plan, sums: bool) -> None:
    run = functools.partial(measured, sums=sums)
    found = world(run, workers, plan, save_at_end=False)
    assert found[0] == pytest.approx(KNOWN, rel=0.15)
    assert all(one == found[0] for one in found)
    lines = (world.worker_dir(0) / "events.jsonl").read_text().splitlines()
    told = [record.event for record in map(decode, lines) if isinstance(record.event, StepDone)]
    assert told[-1].noise_scale == found[0] and told[0].noise_scale is None


def first_step(worker: Any) -> tuple[list[tuple[float, float]], float | None]:
    model, optim = prepared(worker, drop=0.0)
    step = worker.stepper(model, optim, next_word, clip_norm=0.5)
    for batch in worker.batches(Text(), epochs=1):
        step(batch)
        break
    gradients = worker._models.reducers.sum_over([model])
    return [(part.weight, part.square) for part in gradients.parts], gradients.measured_square


@pytest.fixture(scope="module")
def whole_replicas(tmp_path_factory: pytest.TempPathFactory) -> Any:
    plan = Plan(batch=RESUME, compute=EXACT)
    return World(tmp_path_factory.mktemp("whole"))(first_step, 2, plan, save_at_end=False)[0]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(layout=Layout(shard=2), batch=RESUME, compute=EXACT),
        Plan(layout=Layout(tensor=2), batch=RESUME, compute=EXACT),
        Plan(sync=AllReduce(op="adasum"), batch=RESUME, compute=EXACT),
        Plan(sync=ParameterServer(servers=2), batch=RESUME, compute=EXACT),
    ],
    ids=str,
)
def test_norms_of_parts_and_of_the_mean_are_those_of_whole_replicas(
    world: World, whole_replicas: Any, plan: Plan
) -> None:
    for parts, square in world(first_step, 2 * plan.layout.workers_each, plan, save_at_end=False):
        assert [weight for weight, _ in parts] == [8.0, 8.0]
        assert [one for _, one in parts] == pytest.approx([one for _, one in whole_replicas[0]], rel=1e-9)
        assert square == pytest.approx(whole_replicas[1], rel=1e-9)


def test_what_stages_share_is_left_out_of_all_norms_and_nothing_else_is(world: World, whole_replicas: Any) -> None:
    plan = Plan(layout=Layout(stages=2), batch=RESUME, compute=EXACT)
    for parts, square in world(first_step, 4, plan, save_at_end=False):
        squares = [one for _, one in parts]
        assert all(0.0 < one < other for one, (_, other) in zip(squares, whole_replicas[0], strict=True))
        # Norms of parts of the mean: not below that of the mean (Jensen), in the same parameters.
        assert square is not None and square < whole_replicas[1]
        assert square <= sum(one / 0.5 for one in squares)


def test_later_in_training_only_some_steps_are_measured(world: World) -> None:
    def run(worker: Any) -> list[int]:
        model, optim = prepared(worker, drop=0.0)
        step = worker.stepper(model, optim, next_word)
        found: list[int] = []
        for batch in worker.batches(Text(), epochs=10):
            step(batch)
            if worker._models.reducers.sum_over([model]).parts:
                found.append(batch.step)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_pass, "NOISE_EACH", 2)
        patch.setattr(gradient_pass, "NOISE_EVERY", 3)
        assert world(run, 2, Plan(batch=RESUME), max_steps=8, save_at_end=False) == [[1, 2, 3, 6]] * 2


def test_it_can_be_switched_off(world: World) -> None:
    parts = world(first_step, 2, Plan(batch=RESUME, wire=Int8()), save_at_end=False, noise_scale=False)
    assert parts == [([], None)] * 2
    assert '"noise_scale": null' in (world.worker_dir(0) / "events.jsonl").read_text()
