"""Rounds: what several optimizers, the end of the data, and numbers that are broken on one replica do to them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import quick
from forked import WorkersFailed, World
from paceline.plan import Batch, Compute, Gossip, Layout, LocalSGD, Nesterov, Plan

BATCH = Batch(size=8, micro=2, shuffle=False)
STEPS = 7


def plan_of(sync: Any, layout: Layout | None = None) -> Plan:
    return Plan(layout=layout or Layout(replicas=2), sync=sync, batch=BATCH, compute=Compute(precision="fp64"))


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(8 * STEPS, 4, generator=draw), torch.randn(8 * STEPS, 4, generator=draw))


def weights(*models: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for model in models for parameter in model.parameters()])


def by_hand(worker: Any, *, evaluates: bool = False, skips: bool = False) -> dict[int, Tensor]:
    """Two optimizers over different parameters; returns the weights after each step, as the next one finds them."""
    torch.manual_seed(5)
    model = worker.prepare(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    first, second = (worker.prepare(torch.optim.SGD(model[place].parameters(), lr=0.1)) for place in (0, 2))
    seen: dict[int, Tensor] = {}
    for batch in worker.batches(samples(), epochs=1):
        seen[worker.step] = weights(model)
        for x, y in batch:
            worker.backward(F.mse_loss(model(x), y))
        if skips and worker.rank == 1 and worker.step == 1:
            first.zero_grad()
            second.zero_grad()
            continue  # one replica takes no step for this batch
        first.step()
        if evaluates:
            worker.evaluate(model, samples(), F.mse_loss)
        second.step()
    return {**seen, worker.step: weights(model)}


def in_turns(worker: Any) -> dict[int, Tensor]:
    """Two models, and for each batch a step of the one and then of the other."""
    torch.manual_seed(5)
    maker, judge = worker.prepare(nn.Linear(4, 4)), worker.prepare(nn.Linear(4, 1))
    of_judge = worker.stepper(
        judge,
        worker.prepare(torch.optim.SGD(judge.parameters(), lr=0.1)),
        forward=lambda judge, micro: F.softplus(judge(maker(micro[0]).detach()) - judge(micro[1])).mean(),
    )
    of_maker = worker.stepper(
        maker,
        worker.prepare(torch.optim.SGD(maker.parameters(), lr=0.1)),
        forward=lambda maker, micro: F.softplus(-judge(maker(micro[0]))).mean(),
    )
    seen: dict[int, Tensor] = {}
    for batch in worker.batches(samples(), epochs=1):
        seen[worker.step] = weights(maker, judge)
        of_judge(batch)
        of_maker(batch)
    return {**seen, worker.step: weights(maker, judge)}


@pytest.mark.parametrize(
    ("run", "sync"),
    [
        (by_hand, LocalSGD(every=3, outer=Nesterov())),
        (functools.partial(by_hand, evaluates=True), LocalSGD(every=3)),
        (in_turns, LocalSGD(every=3)),
        (in_turns, Gossip(every=3, average_every=6)),
    ],
    ids=["two optimizers", "an evaluation between two", "two steppers", "gossip"],
)
def test_a_round_ends_when_all_optimizers_of_its_last_step_have_stepped(world: World, run: Any, sync: Any) -> None:
    one, other = world(run, 2, plan_of(sync), save_at_end=False)
    are_equal = [step for step in range(STEPS + 1) if torch.equal(one[step], other[step])]
    assert are_equal == [0, 3, 6, STEPS]


def test_a_replica_that_leaves_out_a_step_sends_its_fragment_all_the_same(world: World) -> None:
    run = functools.partial(by_hand, skips=True)
    one, other = world(run, 2, plan_of(LocalSGD(every=2, overlap=1)), save_at_end=False)
    assert torch.equal(one[STEPS], other[STEPS])


def train(worker: Any, *, spoil: Any = lambda worker, loss: loss, data: Any = None) -> None:
    torch.manual_seed(5)
    model = worker.prepare(nn.Linear(4, 4))
    step = worker.stepper(
        model,
        worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)),
        forward=lambda model, micro: spoil(worker, F.mse_loss(model(micro[0]), micro[1])),
    )
    for batch in worker.batches(samples() if data is None else data(worker), epochs=1):
        step(batch)


@pytest.mark.parametrize("limits", [{"max_steps": 5}, {}], ids=["max_steps", "the data's end"])
def test_a_save_that_was_due_in_the_last_round_is_done_after_it(world: World, limits: dict[str, int]) -> None:
    world(train, 2, plan_of(LocalSGD(every=64)), save_every=4, save_at_end=False, **limits)
    (kept,) = (world.run_dir / "checkpoints").iterdir()
    assert kept.name == f"step_{limits.get('max_steps', STEPS):08}"


def test_a_skipped_step_is_told_as_one_of_its_replica(world: World) -> None:
    def spoil(worker: Any, loss: Tensor) -> Tensor:
        return loss * float("inf") if worker.rank == 1 and worker.step == 1 else loss

    world(functools.partial(train, spoil=spoil), 2, plan_of(LocalSGD(every=3)), save_at_end=False)
    assert "step 2 was skipped by this replica" in (world.worker_dir(1) / "events.jsonl").read_text()


def test_all_workers_say_that_weights_are_broken_whoevers_rows_are(world: World) -> None:
    def run(worker: Any) -> None:
        torch.manual_seed(5)
        model = worker.prepare(nn.Linear(4, 4))
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.mse_loss)
        for batch in worker.batches(samples(), epochs=1):
            step(batch)
            if worker.rank == 3 and worker.step == 2:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.to_local().fill_(float("nan"))

    with pytest.raises(WorkersFailed) as failed:
        world(run, 4, plan_of(LocalSGD(every=2), Layout(replicas=2, shard=2)), save_at_end=False)
    assert sorted(failed.value.errors) == [0, 1, 2, 3]
    for text in failed.value.errors.values():
        assert "how far the replicas have moved is not finite" in text


class Uneven(IterableDataset[Any]):
    """One step more for one worker than for the other."""

    def __init__(self, rank: int) -> None:
        self._num = 8 * (2 + rank)

    def __iter__(self) -> Iterator[Any]:
        return (samples()[place] for place in range(self._num))


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        (LocalSGD(every=2), "ended here after step 2, and another replica has come to step 3"),
        (LocalSGD(every=5), "ended here after step 2, and another replica has come to step 3"),
        (LocalSGD(every=2, overlap=1), "sent by some replicas after another step"),
    ],
    ids=str,
)
def test_data_that_ends_earlier_on_one_replica_is_an_error(world: World, sync: LocalSGD, message: str) -> None:
    with pytest.raises(WorkersFailed) as failed:
        world(functools.partial(train, data=lambda worker: Uneven(worker.rank)), 2, plan_of(sync), save_at_end=False)
    assert message in failed.value.errors[0]


def trains_more(worker: Any, *, is_thawed: bool) -> Tensor:
    """After the second step the last layer is trained, too: it is thawed, or given to the optimizer."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].requires_grad_(not is_thawed)
    worker.prepare(model)
    optim = worker.prepare(torch.optim.SGD(model.parameters() if is_thawed else model[0].parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.mse_loss)
    first = weights(model[2])
    for batch in worker.batches(samples(), epochs=1):
        if worker.step == 2 and is_thawed:
            model[2].requires_grad_(True)
        elif worker.step == 2:
            assert torch.equal(weights(model[2]), first)
            optim.add_param_group({"params": list(model[2].parameters())})
        step(batch)
    assert not torch.equal(weights(model[2]), first)
    return weights(model)


@pytest.mark.parametrize(
    ("sync", "is_thawed"),
    [
        (LocalSGD(every=3, outer=Nesterov()), True),
        (LocalSGD(every=4, fragments=2, overlap=1), False),
        (Gossip(every=1, average_every=3), True),
        quick.further(LocalSGD(every=3, outer=Nesterov()), False),
        quick.further(LocalSGD(every=4, fragments=2, overlap=1), True),
        quick.further(Gossip(every=1, average_every=3), False),
    ],
    ids=str,
)
def test_what_is_trained_from_the_middle_of_a_round_on_is_equal_at_its_end(
    world: World, sync: Any, is_thawed: bool
) -> None:
    run = functools.partial(trains_more, is_thawed=is_thawed)
    one, other = world(run, 2, plan_of(sync), save_at_end=False)
    assert torch.equal(one, other)


def test_who_leaves_the_loop_earlier_than_the_others_saves_nothing(world: World) -> None:
    def run(worker: Any) -> None:
        model = worker.prepare(nn.Linear(4, 4))
        step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), F.mse_loss)
        for batch in worker.batches(samples(), epochs=1):
            step(batch)
            if worker.rank == 0 and worker.step == 2:
                break

    with pytest.raises(WorkersFailed) as failed:
        world(run, 2, plan_of(LocalSGD(every=5)))
    assert "after step 2, and another one has gone past that place, to step 5" in failed.value.errors[0]
    assert not list((world.run_dir / "checkpoints").glob("step_*"))


def test_a_request_to_leave_that_one_has_heard_while_another_evaluates_before_its_step(world: World) -> None:
    def run(worker: Any) -> None:
        model = worker.prepare(nn.Linear(4, 4))
        step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), F.mse_loss)
        for batch in worker.batches(samples(), epochs=1):
            if worker.step == 2:  # where the other one is still at the end of its step 2, and wants the round to end
                worker.evaluate(model, samples(), F.mse_loss)
            if worker.step == 1 and worker.rank == 1:
                worker._consensus._notice = SimpleNamespace(came=True)
            step(batch)

    with pytest.raises(WorkersFailed) as failed:
        world(run, 2, plan_of(LocalSGD(every=4)))
    for text in failed.value.errors.values():
        assert text.strip().endswith("CleanExit: 75"), text
    (kept,) = (world.run_dir / "checkpoints").iterdir()
    assert kept.name == "step_00000003"
