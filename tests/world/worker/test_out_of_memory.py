"""A worker gets no memory in a step: all take the step in smaller micro-batches, as if the plan had said so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import IterableDataset

import quick
from forked import WorkersFailed, World
from paceline.events import MicroBatchHalved, WorkerStarted, decode
from paceline.monitor.audit.audit import audit
from paceline.plan import AllReduce, Batch, Guard, Int8, Plan, PowerSGD, Sync, TopK, Wire
from step_programs import Net, dataset, trained

ROOM = 4  # samples for which a worker has memory
PLANNED, HALVED = Batch(size=32, micro=ROOM * 4), Batch(size=32, micro=ROOM)


class Rows(IterableDataset[Any]):
    """The same samples, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(dataset())


def more_than_there_is() -> Tensor:
    return torch.empty(1 << 58)


def program(
    *, place: str = "", rank: int = 1, plain: bool = False, data: Any = None, since: int = 1
) -> Callable[[Any], dict[str, Any]]:
    """Training in which one worker has memory for `ROOM` samples from a step on: in the forward, or in backward."""

    def train(worker: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        model = worker.prepare(Net())
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))

        def is_full(samples: int) -> bool:
            return samples > ROOM and worker.rank == rank and worker.step + 1 >= since

        def loss(output: Tensor, target: Tensor) -> Tensor:
            if place == "forward" and is_full(len(output)):
                more_than_there_is()
            if place == "backward" and is_full(len(output)):
                output.register_hook(lambda gradient: gradient + more_than_there_is())
            return F.cross_entropy(output, target)

        losses: list[float] = []
        step = worker.stepper(model, optim, loss)
        for batch in worker.batches(dataset() if data is None else data, epochs=2):
            if not plain:
                losses.append(float(step(batch)))
                continue
            for x, y in batch:
                worker.backward(loss(model(x), y))
            optim.step()
            optim.zero_grad()
        return trained(model, losses) | {"micro": worker._parts.sizes.samples}

    return train


def halvings(world: World) -> list[MicroBatchHalved]:
    lines = (world.worker_dir(0) / "events.jsonl").read_text().splitlines()
    return [one for one in (decode(line).event for line in lines) if isinstance(one, MicroBatchHalved)]


def assert_equal(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(results, expected, strict=True):
        assert one["losses"] == other["losses"] and one["micro"] == other["micro"] == ROOM
        for name, value in other["state"].items():
            assert torch.equal(one["state"][name], value), name


CASES: dict[str, tuple[str, bool, Sync, Wire | None]] = {
    "forward": ("forward", False, AllReduce(), None),
    "backward": ("backward", False, AllReduce(), None),
    "plain loop": ("backward", True, AllReduce(), None),
    "int8": ("backward", False, AllReduce(algorithm="ring"), Int8()),
    "topk": ("backward", False, AllReduce(), TopK(ratio=0.1)),
    "powersgd": ("forward", False, AllReduce(), PowerSGD(rank=1)),
    "adasum": ("backward", False, AllReduce(op="adasum"), None),
}


@pytest.mark.parametrize(
    ("place", "plain", "sync", "wire"),
    [
        *[pytest.param(*CASES[name], id=name) for name in ("forward", "plain loop")],
        *[pytest.param(*CASES[name], id=name, marks=pytest.mark.thorough) for name in ("int8", "adasum")],
        *[quick.further(*CASES[name], id=name) for name in ("backward", "topk", "powersgd")],
    ],
)
def test_the_step_is_taken_as_if_the_plan_had_had_smaller_micro_batches(
    world: World, place: str, plain: bool, sync: Sync, wire: Wire | None
) -> None:
    about: dict[str, Any] = {"sync": sync} | ({} if wire is None else {"wire": wire})
    results = world(program(place=place, plain=plain), 2, Plan(batch=PLANNED, **about))
    told = halvings(world)
    assert [(one.step, one.workers, one.before, one.after) for one in told] == [(1, [1], 16, 8), (1, [1], 8, 4)]
    assert all(one.message.startswith("DefaultCPUAllocator: can't allocate memory: you tried") for one in told)
    assert not audit(world.run_dir).problems
    expected = World(world.run_dir.parent / "alone")
    expected.run_dir.parent.mkdir()
    assert_equal(results, expected(program(plain=plain), 2, Plan(batch=HALVED, **about)))


@pytest.mark.parametrize("data", [None, Rows()], ids=["map", "iterable"])
def test_one_process_does_the_same_in_the_middle_of_an_epoch(world: World, data: Any) -> None:
    def micros(worker: Any) -> list[list[int]]:
        seen: list[list[int]] = []
        model = worker.prepare(torch.nn.Linear(6, 4))
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))

        def loss(output: Tensor, target: Tensor) -> Tensor:
            seen[-1].append(len(output))
            return F.cross_entropy(more_than_there_is() if worker.step == 1 and len(output) > ROOM else output, target)

        step = worker.stepper(model, optim, loss)
        for batch in worker.batches(dataset() if data is None else data, epochs=1):
            seen.append([])
            step(batch)
        return seen

    assert world(micros, 1, Plan(batch=Batch(size=16, micro=8))) == [[[8, 8], [8, 4, 4, 4, 4], [4, 4, 4, 4], [2]]]
    assert not audit(world.run_dir).problems


def test_a_run_goes_on_in_the_micro_batches_that_it_had_unless_its_plan_says_otherwise(world: World) -> None:
    plan = Plan(batch=PLANNED)
    world(program(place="forward"), 2, plan, max_steps=2)
    results = world(program(place="forward"), 2, plan, max_steps=4)
    assert [one["micro"] for one in results] == [ROOM, ROOM] and not halvings(world)
    events = [decode(line).event for line in (world.worker_dir(0) / "events.jsonl").read_text().splitlines()]
    plans = [one.plan for one in events if isinstance(one, WorkerStarted)]
    assert plans == [f"replicas=2+batch(micro={ROOM})"], "what it tells is what it runs"
    other = world(program(), 2, Plan(batch=Batch(size=16, micro=8)))
    assert [one["micro"] for one in other] == [8, 8]


def test_what_may_not_be_halved_is_an_error_with_advice_where_there_is_some(world: World) -> None:
    with pytest.raises(WorkersFailed, match="can't allocate memory") as stopped:
        world(program(place="forward"), 2, Plan(batch=PLANNED, guard=Guard(on_out_of_memory="stop")))
    assert "of one sample already" not in str(stopped.value)

    def train(worker: Any) -> None:
        model = worker.prepare(torch.nn.Linear(6, 4))
        step = worker.stepper(
            model, worker.prepare(torch.optim.SGD(model.parameters())), lambda *_: more_than_there_is()
        )
        for batch in worker.batches(dataset()):
            step(batch)

    with pytest.raises(WorkersFailed, match=r"(?s)can't allocate memory.*of one sample already.*recompute=blocks"):
        world(train, 1, Plan(batch=Batch(size=4, micro=2)))


def test_an_error_that_is_not_about_memory_is_raised_as_it_is(world: World) -> None:
    def train(worker: Any) -> None:
        model = worker.prepare(torch.nn.Linear(6, 4))
        step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters())), lambda *_: [][1])
        for batch in worker.batches(dataset()):
            step(batch)

    with pytest.raises(WorkersFailed, match="IndexError"):
        world(train, 1, Plan(batch=PLANNED))
