"""Every split of the same global batch gives the same training, compared with one process in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quick
from forked import World
from paceline.plan import AllReduce, Batch, Plan
from step_programs import EXACT, Net, assert_same, dataset, plain_net, train_plain_net, trained

TINY_BUCKETS = AllReduce(bucket_bytes=256)  # several buckets even for a small model


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


@pytest.mark.parametrize("workers", [1, quick.further(2), 3])
def test_equals_a_bare_torch_loop(world: World, workers: int) -> None:
    results = world(train_plain_net, workers, Plan(batch=Batch(size=16, micro=5), compute=EXACT, sync=TINY_BUCKETS))
    assert_same(results, bare_loop(5), 1e-7)


@pytest.mark.parametrize(
    ("workers", "loop"),
    [
        *[(2, by_plain_loop), (3, by_stepper), (5, by_plain_loop)],
        *[quick.further(2, by_stepper), quick.further(3, by_plain_loop), quick.further(5, by_stepper)],
    ],
)
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
