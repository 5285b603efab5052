"""Pipeline schedules are right for all sizes, cost what the papers say, and agree with torch's where both have them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

import quick
from paceline.schedule.balanced_partition import part_costs, partition_evenly
from paceline.schedule.pipeline import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    Action,
    StageMessage,
    build,
    in_flight_bound,
    messages,
    peak_in_flight,
    problems,
    proofs,
)
from paceline.schedule.pipeline_timeline import StageCost, ideal_bubble_share, simulate


def kinds() -> list[tuple[str, int]]:
    return [(name, 1) for name in SCHEDULES] + [("interleaved", 2), ("interleaved", 3)]


@pytest.mark.parametrize("name, stages_per_worker", kinds())
def test_schedules_are_right_for_1_to_16_workers_and_1_to_32_micro_batches(name: str, stages_per_worker: int) -> None:
    for num_workers, num_micro in quick.some(list(itertools.product(range(1, 17), range(1, 33))), step=7):
        pipeline = build(name, num_workers=num_workers, num_micro=num_micro, stages_per_worker=stages_per_worker)
        assert problems(pipeline) == [], (num_workers, num_micro)


def with_order(name: str, worker_index: int, order: tuple[Action, ...]) -> Any:
    pipeline = build(name, num_workers=2, num_micro=2)
    orders = tuple(order if w == worker_index else kept for w, kept in enumerate(pipeline.orders))
    return dataclasses.replace(pipeline, orders=orders)


F10, F11, B10, B11 = (Action(1, kind, micro) for kind in (FORWARD, BACKWARD) for micro in (0, 1))


@pytest.mark.parametrize(
    "order, says",
    [
        ((F10, B10, F11), "worker 1 lacks 1B1"),
        ((F10, B10, F11, B11, Action(0, FORWARD, 0)), "worker 1 has 0F0"),
        ((F10, F10, B10, F11, B11), "worker 1 does an action twice"),
        ((B10, F10, F11, B11), "1B0 comes before 1F0"),
        ((F10, F11, B11, B10), "worker 1 keeps 2 activations at once, more than 1"),
    ],
)
def test_the_checker_finds_what_is_wrong(order: tuple[Action, ...], says: str) -> None:
    assert any(text.startswith(says) for text in problems(with_order("1f1b", 1, order)))


def test_the_checker_finds_a_deadlock_and_who_waits() -> None:
    first = tuple(Action(0, kind, micro) for kind, micro in ((FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1)))
    stuck = with_order("gpipe", 0, first)  # the other worker wants both forwards before it goes back
    assert problems(stuck) == ["worker 0 waits for ever before 0B0", "worker 1 waits for ever before 1F1"]


def test_each_schedule_keeps_as_many_activations_as_it_promises() -> None:
    peaks = {
        name: [peak_in_flight(order) for order in build(name, num_workers=4, num_micro=8).orders] for name in SCHEDULES
    }
    assert peaks["gpipe"] == [8, 8, 8, 8]
    assert peaks["1f1b"] == [4, 3, 2, 1]
    assert peaks["zero-bubble"] == [4, 4, 4, 4]
    pipeline = build("interleaved", num_workers=4, num_micro=8, stages_per_worker=2)
    assert [peak_in_flight(order) for order in pipeline.orders] == [in_flight_bound(pipeline, w) for w in range(4)]


@pytest.mark.parametrize("num_workers, num_micro", [(1, 3), (2, 2), (2, 8), (4, 4), (4, 12), (8, 16)])
@pytest.mark.parametrize("name, stages_per_worker", kinds())
def test_the_bubble_of_equal_stages_is_that_of_the_papers(
    name: str, stages_per_worker: int, num_workers: int, num_micro: int
) -> None:
    pipeline = build(name, num_workers=num_workers, num_micro=num_micro, stages_per_worker=stages_per_worker)
    for cost in (StageCost(), StageCost(forward=3, backward_input=4, backward_weight=2)):
        assert simulate(pipeline, cost).bubble_share == pytest.approx(ideal_bubble_share(pipeline, cost), abs=1e-12)


def test_the_simulator_waits_for_messages_and_for_the_slowest_stage() -> None:
    pipeline = build("1f1b", num_workers=2, num_micro=2)
    slow = simulate(pipeline, [StageCost(), StageCost(forward=5)])
    assert slow.spans[1][0] == (F10, 1.0, 6.0)
    assert slow.makespan == 1 + 2 * (5 + 2) + 2  # forward, the slow stage twice, the last backward
    late = simulate(pipeline, StageCost(send=0.5))
    assert late.spans[1][0] == (F10, 1.5, 2.5)
    with pytest.raises(ValueError, match="1 costs were given for 2 stages"):
        simulate(pipeline, [StageCost()])


def test_messages_come_in_the_order_in_which_they_are_made_and_answers_prove_them() -> None:
    pipeline = build("1f1b", num_workers=2, num_micro=3)
    assert messages(pipeline, 0, 1) == tuple(StageMessage(FORWARD, 0, 1, micro) for micro in range(3))
    assert messages(pipeline, 1, 0) == tuple(StageMessage(BACKWARD, 1, 0, micro) for micro in range(3))
    assert proofs(pipeline, 0)[StageMessage(FORWARD, 0, 1, 1)] == StageMessage(BACKWARD, 1, 0, 1)
    both_first = build("gpipe", num_workers=2, num_micro=2)
    assert set(proofs(both_first, 0).values()) == {StageMessage(BACKWARD, 1, 0, 0)} and len(proofs(both_first, 0)) == 2
    assert proofs(pipeline, 1) == {StageMessage(BACKWARD, 1, 0, 0): StageMessage(FORWARD, 0, 1, 2)}


@pytest.mark.parametrize(
    "name, numbers, says",
    [
        ("zigzag", {"num_workers": 2, "num_micro": 2}, "'zigzag' is not known. Use one of: gpipe, 1f1b"),
        ("1f1b", {"num_workers": 2, "num_micro": 0}, "2 workers, 0 micro-batches"),
        ("1f1b", {"num_workers": 2, "num_micro": 2, "stages_per_worker": 2}, "Use schedule='interleaved'"),
    ],
)
def test_schedules_that_cannot_be_are_refused(name: str, numbers: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(name, **numbers)


def torchs(orders: Any) -> tuple[tuple[str, ...], ...]:
    """torch's orders as text, without its pauses and its sums of gradients between replicas."""
    texts = ([str(action) for action in order if action is not None] for order in orders.values())
    return tuple(tuple(text for text in order if not text.endswith("REDUCE_GRAD")) for order in texts)


def ours(name: str, **numbers: int) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(str, order)) for order in build(name, **numbers).orders)


@pytest.mark.parametrize("num_workers, num_micro", [(2, 4), (4, 4), (4, 8), (3, 9)])
def test_orders_are_those_of_torch(num_workers: int, num_micro: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    numbers = {"num_workers": num_workers, "num_micro": num_micro}
    for name, theirs in (("gpipe", schedules.ScheduleGPipe), ("1f1b", schedules.Schedule1F1B)):
        schedule = theirs.__new__(theirs)
        schedule.__dict__.update(_n_microbatches=num_micro, _num_stages=num_workers, pp_group_size=num_workers)
        orders = torchs(schedule._get_pipeline_order())
        if name == "1f1b":  # torch's listing (not its run) numbers the last worker's forwards from 1: a slip
            assert orders[-1][0] == f"{num_workers - 1}F1"
            orders = (*orders[:-1], ours(name, **numbers)[-1])
        assert ours(name, **numbers) == orders, name
    for name, theirs, each in (
        ("interleaved", schedules.ScheduleInterleaved1F1B, 2),
        ("zero-bubble", schedules.ScheduleInterleavedZeroBubble, 1),
    ):
        group = SimpleNamespace(is_first=True, is_last=True)
        schedule = theirs.__new__(theirs)
        rounds = max(1, num_micro // num_workers)
        schedule.__dict__.update(
            pp_group_size=num_workers,
            n_local_stages=each,
            _n_microbatches=num_micro,
            microbatches_per_round=num_micro // rounds,
            number_of_rounds=rounds,
            _stages=[group] * each,
        )
        orders = {worker: schedule._calculate_single_rank_operations(worker) for worker in range(num_workers)}
        stages = {"stages_per_worker": 2} if each == 2 else {}
        assert ours(name, **numbers, **stages) == torchs(orders), name


def test_a_row_is_cut_as_evenly_as_by_trying_all_cuts() -> None:
    numbers = random.Random(0)
    for _ in range(200):
        costs = [numbers.choice((0, 1, 1, 2, 5, 9)) for _ in range(numbers.randint(1, 9))]
        num_parts = numbers.randint(1, len(costs))
        extra = [numbers.choice((0, 0, 3)) for _ in range(num_parts)]
        closed = {place for place in range(1, len(costs)) if numbers.random() < 0.2}
        places = [place for place in range(1, len(costs)) if place not in closed]
        if len(places) < num_parts - 1:
            with pytest.raises(ValueError, match=f"cannot make {num_parts} parts"):
                partition_evenly(costs, num_parts, extra=extra, closed=closed)
            continue
        least = min(
            max(part_costs(costs, (0, *cut), extra=extra)) for cut in itertools.combinations(places, num_parts - 1)
        )
        starts = partition_evenly(costs, num_parts, extra=extra, closed=closed)
        assert max(part_costs(costs, starts, extra=extra)) == least
        assert starts[0] == 0 and closed.isdisjoint(starts) and len(set(starts)) == num_parts


def test_one_heavy_item_gets_a_part_for_itself() -> None:
    assert partition_evenly([1, 1, 1, 9, 1, 1], 3) == (0, 3, 4)
    assert partition_evenly([4, 4, 4, 4], 2, extra=(0, 8)) == (0, 3)
    with pytest.raises(ValueError, match="1 extra costs were given for 2 parts"):
        partition_evenly([1, 2], 2, extra=[1])
