"""Every split of the same global batch gives the same training, compared with one process in float64."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forked import WorkersFailed, World
from paceline.events import Reported, StepDone, StreamOpened, decode
from paceline.monitor.audit.audit import audit
from paceline.plan import AllReduce, Batch, Cast, Compute, Plan

EXACT = Compute(precision="fp64")
TINY_BUCKETS = AllReduce(bucket_bytes=256)  # several buckets even for a small model


class Net(nn.Module):
    """Dropout, batch norm, tied weights and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12, bias=False)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(12, 12)
        self.tied_again = nn.Linear(12, 12)
        self.tied_again.weight = self.tied.weight
        self.head = nn.Linear(12, 4)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.norm(self.first(x))))
        return self.head(torch.tanh(self.tied_again(torch.relu(self.tied(x)))))


def dataset(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def trained(model: nn.Module, losses: list[float]) -> dict[str, Any]:
    return {"losses": losses, "state": {name: value.clone() for name, value in model.state_dict().items()}}


def by_stepper(worker: Any) -> dict[str, Any]:
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=0.5)
    losses = []
    for batch in worker.batches(dataset(), epochs=2):
        losses.append(float(step(batch)))
    return trained(model, losses)


def by_plain_loop(worker: Any) -> dict[str, Any]:
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))
    losses = []
    for batch in worker.batches(dataset(), epochs=2):
        total, count = 0.0, 0
        for x, y in batch:
            loss = F.cross_entropy(model(x), y)
            worker.backward(loss)
            total, count = total + float(loss.detach()) * len(x), count + len(x)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        optim.zero_grad()
        losses.append(float(worker.average(torch.tensor(total)) / worker.average(torch.tensor(float(count)))))
    return trained(model, losses)


def assert_same(results: list[dict[str, Any]], oracle: dict[str, Any], tolerance: float = 1e-9) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(oracle["losses"], rel=max(tolerance, 1e-6))
        for name, value in oracle["state"].items():
            torch.testing.assert_close(
                result["state"][name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        for name, value in results[0]["state"].items():
            assert torch.equal(result["state"][name], value), f"{name} differs between workers"


def bare_loop(micro: int) -> dict[str, Any]:
    """The oracle of the oracle: no Paceline at all, but for the order of samples. Without dropout and batch norm."""
    import numpy as np

    from paceline.schedule.sample_order import mix, sample_indices

    torch.random.default_generator.manual_seed(mix(0, 3))
    model = plain_net()
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    data, losses = dataset(), []
    model.double()
    for epoch in range(2):
        order = sample_indices(seed=0, epoch=epoch, num_samples=50, positions=np.arange(50)).tolist()
        for start in range(0, 50, 16):
            x, y = data[order[start : start + 16]]
            loss = F.cross_entropy(model(x.double()), y)
            optim.zero_grad()
            loss.backward()
            optim.step()
            losses.append(float(loss.detach()))
    return trained(model, losses)


def plain_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def train_plain_net(worker: Any) -> dict[str, Any]:
    model = worker.prepare(plain_net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    step = worker.stepper(model, optim, F.cross_entropy)
    losses = [float(step(batch)) for batch in worker.batches(dataset(), epochs=2)]
    return trained(model, losses)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_equals_a_bare_torch_loop(world: World, workers: int) -> None:
    results = world(train_plain_net, workers, Plan(batch=Batch(size=16, micro=5), compute=EXACT, sync=TINY_BUCKETS))
    assert_same(results, bare_loop(5), 1e-7)


@pytest.mark.parametrize("loop", [by_stepper, by_plain_loop])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_any_number_of_workers_trains_like_one(world: World, loop: Callable[[Any], Any], workers: int) -> None:
    plan = Plan(batch=Batch(size=16, micro=3), compute=EXACT, sync=TINY_BUCKETS)
    assert_same(world(loop, workers, plan), world.one_process(by_stepper, plan))


def test_fp32_stays_within_rounding(world: World) -> None:
    plan = Plan(batch=Batch(size=16, micro=4))
    assert_same(world(by_stepper, 3, plan), world.one_process(by_stepper, plan), 1e-4)


def test_ten_samples_on_three_workers_are_counted_once(world: World) -> None:
    def train(worker: Any) -> dict[str, Any]:
        model = worker.prepare(plain_net())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.cross_entropy)
        sizes, losses = [], []
        for batch in worker.batches(dataset(10), epochs=2):
            sizes.append((batch.num_samples, sum(micro.num_samples for micro in batch.micros)))
            losses.append(float(step(batch)))
        return trained(model, losses) | {"sizes": sizes}

    plan = Plan(batch=Batch(size=4, micro=1), compute=EXACT)
    results = world(train, 3, plan)
    assert_same(results, world.one_process(train, plan))
    for step in range(6):
        assert sum(result["sizes"][step][1] for result in results) == results[0]["sizes"][step][0]
    assert [size for size, _ in results[0]["sizes"]] == [4, 4, 2] * 2


def token_loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Every sample counts with another weight, as with padded tokens."""
    x, y = micro
    keep = (x[:, 0] > 0).double() + 0.5
    return (F.cross_entropy(model(x), y, reduction="none") * keep).sum(), keep.sum()


def test_sum_and_count_weigh_tokens_exactly(world: World) -> None:
    def train(worker: Any) -> dict[str, Any]:
        model = worker.prepare(plain_net())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, forward=token_loss)
        return trained(model, [float(step(batch)) for batch in worker.batches(dataset(), epochs=2)])

    whole = Plan(batch=Batch(size=16, micro=16), compute=EXACT)
    split = Plan(batch=Batch(size=16, micro=3), compute=EXACT)
    oracle = world.one_process(train, whole)
    assert_same(world(train, 3, split), oracle)


def test_dropout_is_the_same_wherever_a_micro_batch_runs(world: World) -> None:
    def drawn(worker: Any) -> list[tuple[int, int, list[float]]]:
        model = worker.prepare(nn.Linear(1, 1))
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
        found = []
        for batch in worker.batches(dataset(), epochs=1):
            for micro, (x, _) in zip(batch.micros, batch, strict=True):
                found.append((batch.step, micro.index, torch.rand(3).tolist()))
                worker.backward(model(x[:, :1]).mean())
            optim.step()
        return found

    plan = Plan(batch=Batch(size=16, micro=4))
    many = sorted(mask for masks in world(drawn, 3, plan) for mask in masks)
    assert many == sorted(world.one_process(drawn, plan))
    assert len({tuple(mask) for _, _, mask in many}) == len(many)


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


def test_in_batch_losses_see_the_same_micro_batches(world: World) -> None:
    def contrast(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Tensor:
        embedded = F.normalize(model(micro[0]), dim=1)
        return F.cross_entropy(embedded @ embedded.T * 5, torch.arange(len(embedded)))

    def train(worker: Any) -> dict[str, Any]:
        model = worker.prepare(plain_net())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, forward=contrast)
        return trained(model, [float(step(batch)) for batch in worker.batches(dataset(), epochs=2)])

    plan = Plan(batch=Batch(size=16, micro=5), compute=EXACT)
    assert_same(world(train, 4, plan), world.one_process(train, plan))


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


def test_a_parameter_used_on_one_worker_only_is_averaged_over_all(world: World) -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sides = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.sides[int(x[0, 0] > 0)](x)

    def train(worker: Any) -> dict[str, Any]:
        model = worker.prepare(Fork())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.cross_entropy)
        return trained(model, [float(step(batch)) for batch in worker.batches(dataset(), epochs=2)])

    plan = Plan(batch=Batch(size=8, micro=2), compute=EXACT, sync=TINY_BUCKETS)
    assert_same(world(train, 4, plan), world.one_process(train, plan))


def test_frozen_then_thawed_parameters_train_correctly(world: World) -> None:
    def train(worker: Any) -> dict[str, Any]:
        model = worker.prepare(plain_net())
        model[0].requires_grad_(False)
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.cross_entropy)
        losses = []
        for batch in worker.batches(dataset(), epochs=2):
            if batch.epoch == 1:
                model[0].requires_grad_(True)
            losses.append(float(step(batch)))
        return trained(model, losses)

    plan = Plan(batch=Batch(size=16, micro=3), compute=EXACT, sync=TINY_BUCKETS)
    assert_same(world(train, 3, plan), world.one_process(train, plan))


def test_parameter_groups_and_schedulers(world: World) -> None:
    def train(worker: Any) -> dict[str, Any]:
        model = worker.prepare(plain_net())
        groups = [
            {"params": model[0].parameters(), "lr": 0.01},
            {"params": [*model[2].parameters(), *model[4].parameters()]},
        ]
        optim = worker.prepare(torch.optim.Adam(groups, lr=0.05))
        schedule = worker.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=8))
        step = worker.stepper(model, optim, F.cross_entropy)
        losses = []
        for batch in worker.batches(dataset(), epochs=2):
            losses.append(float(step(batch)))
            schedule.step()
        return trained(model, losses) | {"lr": schedule.get_last_lr()}

    plan = Plan(batch=Batch(size=16, micro=3), compute=EXACT)
    results, oracle = world(train, 3, plan), world.one_process(train, plan)
    assert_same(results, oracle, 1e-7)
    assert results[0]["lr"] == oracle["lr"]


def gan_parts(worker: Any) -> tuple[nn.Module, nn.Module, Any, Any]:
    maker = worker.prepare(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)), name="maker")
    judge = worker.prepare(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)), name="judge")
    optims = [worker.prepare(torch.optim.Adam(model.parameters(), lr=0.01)) for model in (maker, judge)]
    return maker, judge, *optims


def judge_loss(judge: nn.Module, maker: nn.Module, real: Tensor) -> Tensor:
    fake = maker(torch.randn(len(real), 2)).detach()
    return F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()


def maker_loss(judge: nn.Module, maker: nn.Module, real: Tensor) -> Tensor:
    return F.softplus(-judge(maker(torch.randn(len(real), 2)))).mean()


def gan_by_steppers(worker: Any) -> dict[str, Any]:
    maker, judge, optim_maker, optim_judge = gan_parts(worker)
    step_judge = worker.stepper(judge, optim_judge, forward=lambda m, micro: judge_loss(m, maker, micro[0]))
    step_maker = worker.stepper(maker, optim_maker, forward=lambda m, micro: maker_loss(judge, m, micro[0]))
    losses = []
    for batch in worker.batches(dataset(), epochs=2):
        losses += [float(step_judge(batch)), float(step_maker(batch))]
    return trained(nn.ModuleList([maker, judge]), losses)


def gan_by_plain_loop(worker: Any) -> dict[str, Any]:
    maker, judge, optim_maker, optim_judge = gan_parts(worker)
    for batch in worker.batches(dataset(), epochs=2):
        for real, _ in batch:
            worker.backward(judge_loss(judge, maker, real))
        optim_judge.step()
        for real, _ in batch:
            worker.backward(maker_loss(judge, maker, real))
        optim_maker.step()
    return trained(nn.ModuleList([maker, judge]), [])


@pytest.mark.parametrize("loop", [gan_by_steppers, gan_by_plain_loop])
def test_a_gan_with_two_optimizers(world: World, loop: Callable[[Any], Any]) -> None:
    plan = Plan(batch=Batch(size=16, micro=3), compute=EXACT)
    assert_same(world(loop, 3, plan), world.one_process(loop, plan), 1e-6)


def test_the_users_hooks_see_and_change_gradients(world: World) -> None:
    def train(worker: Any, *, hook_after: bool) -> dict[str, Any]:
        model = worker.prepare(plain_net())
        calls: list[str] = []

        def halve(parameter: Tensor) -> None:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

        model[0].weight.register_hook(lambda grad: grad * 2)
        if hook_after:  # runs after Paceline's own hook, which must leave it the time to change the gradient
            for parameter in model[2].parameters():
                parameter.register_post_accumulate_grad_hook(halve)
        else:
            for parameter in model[2].parameters():
                parameter.register_hook(lambda grad: grad * 0.5)
        model[0].register_forward_hook(lambda *_: calls.append("forward"))
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.cross_entropy)
        losses = [float(step(batch)) for batch in worker.batches(dataset(48), epochs=1)]
        return trained(model, losses) | {"calls": len(calls)}

    plan = Plan(
        batch=Batch(size=16, micro=8), compute=EXACT, sync=TINY_BUCKETS
    )  # one micro-batch for each of two workers
    results = world(functools.partial(train, hook_after=True), 2, plan)
    assert_same(results, world.one_process(functools.partial(train, hook_after=False), plan))
    assert all(result["calls"] == 3 for result in results)


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
