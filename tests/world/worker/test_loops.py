"""Loops as people write them, right and wrong: several models and streams, gradient passes left early, other backward
calls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forked import WorkersFailed, World
from paceline.events import StepDone, decode
from paceline.monitor.audit.audit import audit
from paceline.plan import AllReduce, Batch, Compute, Gossip, Guard, Layout, LocalSGD, ParameterServer, Plan

EXACT = Compute(precision="fp64")
PLAN = Plan(batch=Batch(size=16, micro=4), compute=EXACT, sync=AllReduce(bucket_bytes=200))


def dataset(count: int = 49) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def net(width: int = 16, out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))


def sgd(worker: Any, *models: nn.Module) -> Any:
    return worker.prepare(torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1))


def state(*models: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def assert_like_one_process(world: World, train: Callable[[Any], Any], workers: int = 3, plan: Plan = PLAN) -> None:
    results, oracle = world(train, workers, plan), world.one_process(train, plan)
    for result in results:
        for value, same, right in zip(result, results[0], oracle, strict=True):
            assert torch.equal(value, same), "workers differ"
            torch.testing.assert_close(value, right, rtol=1e-8, atol=1e-9)


def test_several_models_in_one_pass_with_an_idle_worker(world: World) -> None:
    """The last step has one sample: two of three workers send zeros, in the order in which the busy one sends."""

    def train(worker: Any) -> list[Tensor]:
        encoder, decoder = worker.prepare(net(out=6)), worker.prepare(net())
        step = worker.stepper([encoder, decoder], sgd(worker, encoder, decoder), forward=through)
        for batch in worker.batches(dataset(), epochs=2):
            step(batch)
        return state(encoder, decoder)

    def through(models: list[nn.Module], micro: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(models[1](models[0](micro[0])), micro[1])

    assert_like_one_process(world, train)


def test_a_layer_used_in_some_micro_batches_of_several_models(world: World) -> None:
    def train(worker: Any) -> list[Tensor]:
        first, second = worker.prepare(net(out=6)), worker.prepare(net())
        optim = sgd(worker, first, second)
        for batch in worker.batches(dataset(), epochs=2):
            for x, y in batch:
                worker.backward(F.cross_entropy(second(first(x) if float(x[0, 0]) > 0 else x), y))
            optim.step()
        return state(first, second)

    assert_like_one_process(world, train)


def test_parameters_shared_by_two_models_count_once(world: World) -> None:
    def train(worker: Any) -> list[Tensor]:
        trunk = nn.Linear(6, 6)
        first, second = nn.Sequential(trunk, nn.Linear(6, 4)), nn.Sequential(trunk, nn.Tanh(), nn.Linear(6, 4))
        worker.prepare(first)
        worker.prepare(second)
        optim = worker.prepare(torch.optim.SGD({*first.parameters(), *second.parameters()}, lr=0.1))
        optim.param_groups[0]["params"].sort(key=lambda p: p.numel())
        step = worker.stepper(
            [first, second],
            optim,
            forward=lambda models, m: (
                sum(F.cross_entropy(model(m[0]), m[1], reduction="sum") for model in models),
                len(m[1]),
            ),
            clip_norm=0.3,
        )
        for batch in worker.batches(dataset(), epochs=2):
            step(batch)
        return state(first, second)

    whole = Plan(batch=Batch(size=16, micro=16), compute=EXACT)
    results, oracle = world(train, 3, PLAN), world.one_process(train, whole)
    for result in results:
        for value, right in zip(result, oracle, strict=True):
            torch.testing.assert_close(value, right, rtol=1e-8, atol=1e-9)


def test_freezing_inside_the_forward_as_gans_do(world: World) -> None:
    def train(worker: Any) -> list[Tensor]:
        maker, judge = worker.prepare(net(out=6)), worker.prepare(net(out=1))
        optims = [sgd(worker, maker), sgd(worker, judge)]

        def judged(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Tensor:
            judge.requires_grad_(True)
            return F.softplus(-model(micro[0])).mean() + F.softplus(model(maker(micro[0]).detach())).mean()

        def made(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Tensor:
            judge.requires_grad_(False)
            return F.softplus(-judge(model(micro[0]))).mean()

        step_judge = worker.stepper(judge, optims[1], forward=judged)
        step_maker = worker.stepper(maker, optims[0], forward=made)
        for batch in worker.batches(dataset(), epochs=2):
            step_judge(batch)
            step_maker(batch)
        return state(maker, judge)

    assert_like_one_process(world, train)


def test_the_other_models_of_a_plain_loop_cost_no_traffic(world: World) -> None:
    def train(worker: Any) -> None:
        used, idle = worker.prepare(net()), worker.prepare(net(width=64))
        optim = sgd(worker, used)
        assert idle is not None
        for batch in worker.batches(dataset(), epochs=1):
            for x, y in batch:
                worker.backward(F.cross_entropy(used(x), y))
            optim.step()

    world(train, 2, PLAN)
    records = [decode(line) for line in (world.worker_dir(0) / "events.jsonl").read_text().splitlines()]
    sent = [record.event.num_bytes_sent for record in records if isinstance(record.event, StepDone)]
    num_used, num_idle = (sum(p.numel() for p in net(width=width).parameters()) for width in (16, 64))
    assert sent[0] > 8 * (num_used + num_idle)  # at first nobody knows
    assert all(8 * num_used < later < 8 * (num_used + 50) for later in sent[1:])  # and a few numbers of the metadata


def test_two_streams_at_once_are_numbered_and_audited(world: World) -> None:
    def train(worker: Any) -> list[Tensor]:
        maker, critic = worker.prepare(net()), worker.prepare(net())
        optims = [sgd(worker, maker), sgd(worker, critic)]
        step_maker, step_critic = (
            worker.stepper(model, optim, F.cross_entropy) for model, optim in zip((maker, critic), optims, strict=True)
        )
        critic_batches = worker.batches(dataset(), name="critic", epochs=3)
        steps = []
        for batch in worker.batches(dataset(20)):
            for _ in range(3):
                other = next(critic_batches)
                step_critic(other)
                steps.append(other.step)
            step_maker(batch)
            steps.append(batch.step)
        assert steps == list(range(1, len(steps) + 1))
        assert worker.step == len(steps)
        return state(maker, critic)

    assert_like_one_process(world, train, 2)
    records = [decode(line) for line in (world.worker_dir(0) / "events.jsonl").read_text().splitlines()]
    told = [record.event.step for record in records if isinstance(record.event, StepDone)]
    assert told == list(range(1, 9))
    assert audit(world.run_dir).is_clean


def test_a_batch_without_an_optimizers_step_is_a_skipped_step(world: World) -> None:
    def train(worker: Any) -> int:
        model = worker.prepare(net())
        step = worker.stepper(model, sgd(worker, model), F.cross_entropy)
        for batch in worker.batches(dataset(48)):
            if batch.serial != 2:
                step(batch)
        return worker.step

    assert world(train, 2, PLAN) == [3, 3]
    log = (world.worker_dir(0) / "events.jsonl").read_text()
    assert "no prepared optimizer stepped for batch 2" in log
    assert log.count('"skipped": true') == 1
    assert audit(world.run_dir).is_clean


def test_a_run_in_which_no_step_has_trained_fails_and_one_that_was_not_to_train_does_not(world: World) -> None:
    def train(worker: Any, *, how: str) -> int:
        model = worker.prepare(net())
        optim = sgd(worker, model)
        worst = math.inf if how == "infinite" else 1.0
        for batch in worker.batches(dataset(48)):
            for inputs, targets in batch:
                loss = F.cross_entropy(model(inputs), targets) * worst
                if how != "only looks":
                    worker.backward(loss)
            if how in ("infinite", "trained"):
                optim.step()
            optim.zero_grad()
        return worker.step

    for how, says in (
        ("infinite", "in all its 3 steps losses or gradients were not finite"),
        ("unstepped", "in all its 3 steps no prepared optimizer stepped"),
    ):
        with pytest.raises(
            WorkersFailed, match="RuntimeError: the run has trained nothing: in all its 3 steps"
        ) as caught:
            world(functools.partial(train, how=how), 1, PLAN)
        assert says in caught.value.errors[0]
    assert world(functools.partial(train, how="only looks"), 1, PLAN) == [3]
    assert world(functools.partial(train, how="trained"), 1, PLAN, fresh=True) == [3]
    assert world(functools.partial(train, how="trained"), 1, PLAN) == [3], (
        "nothing is left to do, and that is no failure"
    )


@pytest.mark.parametrize("sync", [LocalSGD(every=2), Gossip(every=1), ParameterServer(staleness=None)], ids=str)
def test_replicas_that_take_steps_by_themselves_fail_where_none_of_them_has_trained(world: World, sync: Any) -> None:
    plan = Plan(layout=Layout(replicas=2), batch=PLAN.batch, compute=EXACT, sync=sync)

    def train(worker: Any, *, how: str) -> int:
        model = worker.prepare(net())
        step = worker.stepper(model, sgd(worker, model), lambda output, target: F.cross_entropy(output, target) * scale)
        for batch in worker.batches(dataset(64)):
            is_other = worker.rank == 0 and not plan.is_asynchronous
            scale = 1.0 if how == "one" and worker.step == 2 and not is_other else math.inf
            step(batch)
        return worker.step

    with pytest.raises(WorkersFailed) as caught:
        world(functools.partial(train, how="none"), 2, plan)
    assert caught.value.errors.keys() == {0, 1}
    for said in caught.value.errors.values():
        assert "the run has trained nothing: in all its 4 steps losses or gradients were not finite" in said
    assert world(functools.partial(train, how="one"), 2, plan, fresh=True) == [4, 4], "one replica has, in one step"


def test_an_error_that_is_caught_leaves_no_trace_of_its_pass(world: World) -> None:
    def train(worker: Any, *, fails: bool) -> list[Tensor]:
        model = worker.prepare(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
        calls = 0

        def loss(output: Tensor, target: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if fails and calls == 2:
                raise KeyError("once")
            return F.cross_entropy(output, target)

        step = worker.stepper(model, sgd(worker, model), loss)
        for batch in worker.batches(dataset(48)):
            try:
                step(batch)
            except KeyError:
                batch.num_passes = 0  # the same random numbers again
                step(batch)
        return [*state(model), *[buffer.clone() for buffer in model.buffers()]]

    failed = world.one_process(lambda worker: train(worker, fails=True), PLAN)
    smooth = world.one_process(lambda worker: train(worker, fails=False), PLAN)
    assert all(torch.equal(one, other) for one, other in zip(failed, smooth, strict=True))


def test_large_but_finite_gradients_are_clipped_not_skipped(world: World) -> None:
    def train(worker: Any) -> list[float]:
        model = worker.prepare(nn.Linear(6, 1))
        step = worker.stepper(model, sgd(worker, model), lambda o, t: o.mean() * 1e30, clip_norm=1.0)
        for batch in worker.batches(dataset(16)):
            step(batch)
        return [float(step.grad_norm), float(model.weight.grad.norm())]

    large, clipped = world.one_process(train, Plan(batch=Batch(size=16)))
    assert large > 1e29
    assert clipped <= 1.0001


def pass_left_early(worker: Any, model: nn.Module, optim: Any) -> None:
    for batch in worker.batches(dataset()):
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
            break
        optim.step()


def plain_backward(worker: Any, model: nn.Module, optim: Any) -> None:
    for batch in worker.batches(dataset()):
        for x, y in batch:
            F.cross_entropy(model(x), y).backward()
        optim.step()


def empty_pass(worker: Any, model: nn.Module, optim: Any) -> None:
    for batch in worker.batches(dataset()):
        for x, _ in batch:
            model(x)
        optim.step()


def wiped(worker: Any, model: nn.Module, optim: Any) -> None:
    for batch in worker.batches(dataset()):
        for x, y in batch:
            optim.zero_grad()
            worker.backward(F.cross_entropy(model(x), y))
        optim.step()


def accumulates(worker: Any, model: nn.Module, optim: Any) -> None:
    for number, batch in enumerate(worker.batches(dataset())):
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
        if number % 2:
            optim.step()
            optim.zero_grad()


def average_inside(worker: Any, model: nn.Module, optim: Any) -> None:
    for batch in worker.batches(dataset()):
        for x, _ in batch:
            worker.average(float(x.mean()))


def loss_and_accuracy(worker: Any, model: nn.Module, optim: Any) -> None:
    step = worker.stepper(model, optim, lambda o, t: (F.cross_entropy(o, t), (o.argmax(1) == t).float().mean() * 0.9))
    for batch in worker.batches(dataset()):
        step(batch)


def stranger_in_the_optimizer(worker: Any, model: nn.Module, optim: Any) -> None:
    other = worker.prepare(net())
    worker.stepper(model, sgd(worker, model, other), F.cross_entropy)


def replaced_layer(worker: Any, model: Any, optim: Any) -> None:
    model[4] = nn.Linear(16, 4)
    sgd(worker, model)


def accumulates_for_one(worker: Any, *_: Any) -> None:
    model = worker.prepare(net())
    slow = worker.prepare(torch.optim.SGD(model[4].parameters(), lr=0.1), name="slow")
    fast = worker.prepare(torch.optim.SGD(model[0].parameters(), lr=0.1))
    for number, batch in enumerate(worker.batches(dataset())):
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
        fast.step()
        fast.zero_grad()
        if number % 2:
            slow.step()
            slow.zero_grad()


def late_group(worker: Any, model: nn.Module, optim: Any) -> None:
    optim.add_param_group({"params": nn.Linear(2, 2).parameters()})
    step = worker.stepper(model, sgd(worker, model), F.cross_entropy)
    for batch in worker.batches(dataset()):
        step(batch)
        optim.step()


def thawed_inside(worker: Any, model: Any, optim: Any) -> None:
    model[0].requires_grad_(False)

    def thaw(o: Tensor, t: Tensor) -> Tensor:
        model[0].requires_grad_(True)
        return F.cross_entropy(o, t)

    step = worker.stepper(model, optim, thaw)
    for batch in worker.batches(dataset()):
        step(batch)


def over(worker: Any, model: Any, optim: Any) -> None:
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in list(worker.batches(dataset())):
        step(batch)


def report_a_vector(worker: Any, model: Any, optim: Any) -> None:
    worker.report(scores=torch.zeros(3))


def report_text(worker: Any, model: Any, optim: Any) -> None:
    worker.report(name="seven")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (pass_left_early, "was left early"),
        (plain_backward, r"call worker\.backward\(loss\) instead"),
        (empty_pass, r"called no worker\.backward"),
        (wiped, "was removed within a gradient pass over a batch"),
        (accumulates, r"gradients of batch 1 are still there, and 'optimizer' has not stepped on them"),
        (accumulates_for_one, r"gradients of batch 1 are still there, and 'slow' has not stepped on them"),
        (average_inside, r"worker\.average\(\) was called inside a step"),
        (loss_and_accuracy, "a pair whose second part is 0"),
        (stranger_in_the_optimizer, "holds 6 parameters that are not of this stepper's models"),
        (replaced_layer, "holds 2 parameters that were in no model when it was prepared"),
        (late_group, "holds 2 parameters that were in no model when it was prepared"),
        (thawed_inside, "was thawed"),
        (over, "is over: the loop has asked for the next batch"),
        (report_a_vector, r"scores=\.\.\.\) got a tensor of shape \[3\]"),
        (report_text, "name='seven'"),
    ],
)
def test_what_would_train_wrongly_is_an_error_with_the_remedy(
    world: World, wrong: Callable[[Any, nn.Module, Any], None], says: str
) -> None:
    def train(worker: Any) -> None:
        model = worker.prepare(net())
        wrong(worker, model, sgd(worker, model))

    with pytest.raises(WorkersFailed, match=says):
        world(train, 1, Plan(batch=Batch(size=16, micro=4)))


def changes_what_is_frozen(worker: Any) -> list[float]:
    torch.manual_seed(0)
    model = worker.prepare(net())
    step = worker.stepper(model, sgd(worker, model), F.cross_entropy)
    losses = list[float]()
    for number, batch in enumerate(worker.batches(dataset())):
        model[0].requires_grad_(number % 2 == 0)
        model[2].requires_grad_(number % 2 == 1)
        losses.append(float(step(batch)))
    return losses


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(replicas=1, shard=2)], ids=str)
def test_one_layer_is_frozen_when_another_is_thawed(world: World, layout: Layout) -> None:
    batch = Batch(size=16, micro=4)
    alone = world.one_process(changes_what_is_frozen, Plan(batch=batch))
    for losses in world(changes_what_is_frozen, 2, Plan(layout=layout, batch=batch), save_at_end=False):
        assert losses == pytest.approx(alone, rel=1e-5)


def looks_between_steps(worker: Any) -> list[float]:
    torch.manual_seed(0)
    model = worker.prepare(net())
    step = worker.stepper(model, sgd(worker, model), F.cross_entropy)
    losses = list[float]()
    for batch in worker.batches(dataset()):
        losses.append(float(step(batch)))
        with torch.no_grad():
            model(dataset().tensors[0][:4])
    return losses


@pytest.mark.parametrize("zero", [1, 3])
def test_a_forward_between_steps_does_not_disturb_snapshots(world: World, zero: Any) -> None:
    guard, batch = Guard(on_spike="rollback", snapshot_every=1), Batch(size=16, micro=4)
    alone = world.one_process(looks_between_steps, Plan(batch=batch))
    plan = Plan(layout=Layout(replicas=1, shard=2, zero=zero), batch=batch, guard=guard)
    for losses in world(looks_between_steps, 2, plan, save_at_end=False):
        assert losses == pytest.approx(alone, rel=1e-5)
