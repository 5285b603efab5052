"""What a step promises beside equal losses: skipped steps, reports, compute options, and wrong use by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forked import WorkersFailed, World
from paceline.events import Reported, StepDone, StreamOpened, decode
from paceline.monitor.audit.audit import audit
from paceline.plan import Batch, Cast, Compute, Plan
from step_programs import EXACT, Net, assert_same, dataset, plain_net, train_plain_net, trained


def test_the_users_own_random_state_is_not_touched_by_steps(world: World) -> None:
    def train(worker: Any) -> list[float]:
        model = worker.prepare(plain_net())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.cross_entropy)
        drawn = []
        for batch in worker.batches(dataset(), epochs=1):
            step(batch)
            drawn.append(float(torch.rand(())))
        return drawn

    plan = Plan(batch=Batch(size=16, micro=4))
    results = world(train, 2, plan)
    assert results[0] == results[1] == world.one_process(train, plan)


def test_unused_parameters_are_named_once_and_left_alone(world: World) -> None:
    def train(worker: Any) -> dict[str, Any]:
        model = worker.prepare(Net())
        before = model.idle.weight.detach().clone()
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
        step = worker.stepper(model, optim, F.cross_entropy)
        for batch in worker.batches(dataset(), epochs=1):
            step(batch)
        return {"same": torch.equal(before, model.idle.weight), "grad": model.idle.weight.grad}

    results = world(train, 2, Plan(batch=Batch(size=16, micro=4)))
    assert all(result["same"] and result["grad"] is None for result in results)
    log = (world.worker_dir(0) / "events.jsonl").read_text()
    assert log.count("got no gradient from any worker") == 1
    assert "model.idle.bias, model.idle.weight" in log


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_non_finite_gradients_skip_the_step_on_all_workers(world: World, bad_rank: int) -> None:
    def train(worker: Any) -> list[Any]:
        model = worker.prepare(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
        optim = worker.prepare(torch.optim.Adam(model.parameters(), lr=0.1))

        def loss(output: Tensor, target: Tensor) -> Tensor:
            value = F.cross_entropy(output, target)
            return value * math.inf if worker.step == 1 and worker.rank == bad_rank else value

        step = worker.stepper(model, optim, loss)
        seen = []
        for batch in worker.batches(dataset(), epochs=1):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            step(batch)
            seen.append(all(torch.equal(before[name], value) for name, value in model.state_dict().items()))
        return seen

    results = world(train, 2, Plan(batch=Batch(size=16, micro=4)))
    assert results[0] == results[1] == [False, True, False, False]
    log = (world.worker_dir(0) / "events.jsonl").read_text()
    assert "step 2 was skipped on all workers: its gradients are not finite" in log
    assert '"skipped": true' in log


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.03), ("fp16", 0.004)])
def test_cast_wires_round_once_and_halve_the_bytes(world: World, dtype: Any, tolerance: float) -> None:
    batch = Batch(size=16, micro=4)
    results = world(train_plain_net, 2, Plan(batch=batch, wire=Cast(dtype=dtype)))
    oracle = world.one_process(train_plain_net, Plan(batch=batch))
    assert results[0]["losses"] == pytest.approx(oracle["losses"], rel=tolerance)
    assert results[0]["losses"] != oracle["losses"]
    assert all(torch.equal(results[0]["state"][name], results[1]["state"][name]) for name in oracle["state"])


def test_bf16_compute_trains_and_stays_equal_between_workers(world: World) -> None:
    plan = Plan(batch=Batch(size=16, micro=4), compute=Compute(precision="bf16"))
    results = world(train_plain_net, 2, plan)
    assert results[0]["losses"] == pytest.approx(world.one_process(train_plain_net, plan)["losses"], rel=0.02)
    assert results[0]["losses"][-1] < results[0]["losses"][0]
    assert all(value.dtype == torch.float32 for value in results[0]["state"].values())


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train_deep(worker: Any) -> dict[str, Any]:
    model = worker.prepare(Deep())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy)
    return trained(model, [float(step(batch)) for batch in worker.batches(dataset(), epochs=1)])


def test_recomputed_blocks_change_nothing_not_even_buffers(world: World) -> None:
    batch = Batch(size=16, micro=4)
    kept = world.one_process(train_deep, Plan(batch=batch, compute=EXACT))
    again = world(train_deep, 2, Plan(batch=batch, compute=Compute(precision="fp64", recompute="blocks")))
    assert_same(again, kept)


@pytest.mark.timeout(300)
def test_compiled_models_train_the_same(world: World) -> None:
    batch = Batch(size=16, micro=4)
    compiled = world(train_plain_net, 2, Plan(batch=batch, compute=Compute(compile=True)), limit_s=280)
    assert_same(compiled, world.one_process(train_plain_net, Plan(batch=batch)), 1e-3)


def train_in_a_plain_loop(worker: Any) -> dict[str, Any]:
    model = worker.prepare(plain_net())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for batch in worker.batches(dataset(), epochs=1):
        total = 0.0
        for x, y in batch:
            loss = F.cross_entropy(model(x), y)
            worker.backward(loss)
            total += float(loss) * len(x)
        optim.step()
        losses.append(sum(worker.gather(total)))
    return trained(model, losses)


@pytest.mark.timeout(300)
def test_compiled_models_train_the_same_in_a_plain_loop(world: World) -> None:
    batch = Batch(size=16, micro=4)
    compiled = world(train_in_a_plain_loop, 2, Plan(batch=batch, compute=Compute(compile=True)), limit_s=280)
    assert_same(compiled, world.one_process(train_in_a_plain_loop, Plan(batch=batch)), 1e-3)


def test_recompute_without_blocks_is_refused_with_the_models_name(world: World) -> None:
    with pytest.raises(WorkersFailed, match="found no repeated blocks in Linear"):
        world(lambda worker: worker.prepare(nn.Linear(2, 2)), 1, Plan(compute=Compute(recompute="blocks")))


def test_values_can_be_reported_in_steps_and_between_them(world: World) -> None:
    def train(worker: Any) -> None:
        model = worker.prepare(plain_net())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.cross_entropy)
        for batch in worker.batches(dataset(), epochs=2):
            worker.report(loss=step(batch), rank=worker.rank)
        worker.report(accuracy=torch.tensor(0.5))

    world(train, 2, Plan(batch=Batch(size=16, micro=4)))
    records = [decode(line) for line in (world.worker_dir(1) / "events.jsonl").read_text().splitlines()]
    steps = [record.event for record in records if isinstance(record.event, StepDone)]
    assert [step.step for step in steps] == list(range(1, 9))
    assert all(step.metrics == {"loss": step.loss, "rank": 1.0} for step in steps)
    assert [record.event for record in records if isinstance(record.event, Reported)] == [
        Reported(step=8, metrics={"accuracy": 0.5})
    ]
    opened = [record.event for record in records if isinstance(record.event, StreamOpened)]
    assert opened == [StreamOpened(name="train", num_samples=50, epochs=2, last_step=8)]


def test_a_failure_in_the_loop_commits_nothing(world: World) -> None:
    """The step under way when an error passes through the loop is neither in the ledger nor in the events."""

    def train(worker: Any) -> None:
        model = worker.prepare(plain_net())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.cross_entropy)
        for batch in worker.batches(dataset(), epochs=2):
            if worker.step == 3 and worker.rank == 1:
                raise KeyError("gone")
            step(batch)

    with pytest.raises(WorkersFailed) as failed:
        world(train, 3, Plan(batch=Batch(size=16, micro=4)))
    assert "lost contact with a peer" in failed.value.errors[0]
    for rank in range(3):
        steps = [
            json.loads(line)["step"] for line in (world.worker_dir(rank) / "ledger.jsonl").open() if '"step"' in line
        ]
        assert steps == [1, 2, 3]
    assert audit(world.run_dir).is_clean


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda worker, model, optim: optim_inside(worker, model, optim), "Put it after the loop"),
        (lambda worker, model, optim: twice(worker, model), "called twice for one micro-batch"),
        (
            lambda worker, model, optim: worker.backward(model(torch.ones(1, 6)).sum()),
            "outside of a loop over a step",
        ),
        (lambda worker, model, optim: worker.stepper(nn.Linear(1, 1), optim, F.mse_loss), "was not prepared"),
        (lambda worker, model, optim: worker.stepper(model, optim), "either loss=fn"),
        (lambda worker, model, optim: worker.stepper(model, optim, F.mse_loss, clip_norm=0.0), "clip_norm is 0.0"),
        (lambda worker, model, optim: step_on(worker, model, optim, lambda o, t: o), "the loss has shape"),
        (lambda worker, model, optim: step_on(worker, model, optim, lambda o, t: 1.0), "the loss is a float"),
        (lambda worker, model, optim: worker.stepper(model, optim, F.mse_loss)([1]), "not a list"),
        (lambda worker, model, optim: worker.prepare(model), "is prepared already"),
        (lambda worker, model, optim: worker.prepare([1]), "it takes models, optimizers"),
        (lambda worker, model, optim: worker.prepare(nn.Embedding(3, 3, sparse=True)), "makes sparse gradients"),
    ],
)
def test_wrong_use_is_refused_with_the_remedy(world: World, wrong: Callable[..., Any], says: str) -> None:
    def train(worker: Any) -> None:
        model = worker.prepare(plain_net())
        wrong(worker, model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)))

    with pytest.raises(WorkersFailed, match=says):
        world(train, 1, Plan(batch=Batch(size=16, micro=4)))


def optim_inside(worker: Any, model: nn.Module, optim: Any) -> None:
    for batch in worker.batches(dataset()):
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
            optim.step()


def twice(worker: Any, model: nn.Module) -> None:
    for batch in worker.batches(dataset()):
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
            worker.backward(F.cross_entropy(model(x), y))


def step_on(worker: Any, model: nn.Module, optim: Any, loss: Callable[[Any, Any], Any]) -> None:
    step = worker.stepper(model, optim, loss)
    step(next(worker.batches(dataset())))


def test_a_worker_that_leaves_out_a_step_is_an_error_on_all(world: World) -> None:
    def train(worker: Any) -> None:
        model = worker.prepare(plain_net())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.cross_entropy)
        for batch in worker.batches(dataset(), epochs=2):
            if worker.rank == 1 and batch.serial == 3:
                continue
            step(batch)

    with pytest.raises(WorkersFailed) as failed:
        world(train, 3, Plan(batch=Batch(size=16, micro=4)))
    assert all("All workers must make the same steps" in failed.value.errors[rank] for rank in range(3))
