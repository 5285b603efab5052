"""What the pool's policy decides: within the nodes, within each run's sizes, the same for the same facts, explained."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PlanError
from paceline.pool.policy import PoolDecision, PoolJob, allocate, decide

FOUR_NODES = dict.fromkeys("abcd", 4)


def power(exponent: float) -> Callable[[int, int], float]:
    return lambda nodes, replicas: replicas**exponent * (1.0 if nodes == 1 else 0.9)


def job(exponent: float = 0.8, **facts: object) -> PoolJob:
    return dataclasses.replace(PoolJob(speedup=power(exponent), max_replicas=16), **facts)  # type: ignore[arg-type]


def sizes(decision: PoolDecision) -> dict[str, int]:
    return {name: len(places) for name, places in decision.allocations.items()}


@st.composite
def pools(draw: st.DrawFn) -> tuple[dict[str, PoolJob], dict[str, int]]:
    """Runs with any facts, some of which hold devices, and nodes of any size."""
    nodes = {f"node-{at}": draw(st.integers(0, 8)) for at in range(draw(st.integers(0, 6)))}
    free = [name for name, devices in nodes.items() for _ in range(devices)]
    jobs: dict[str, PoolJob] = {}
    for at in range(draw(st.integers(0, 10))):
        least = draw(st.integers(0, 6))
        held = draw(st.integers(0, min(len(free), 8)))
        remaining = draw(st.none() | st.floats(0, 1e6))
        jobs[f"run-{at}"] = job(
            draw(st.floats(0.0, 1.0)),
            min_replicas=least,
            max_replicas=max(1, least) + draw(st.integers(0, 20)),
            age=draw(st.floats(0, 1e5)),
            attained=draw(st.floats(0, 1e6)),
            allocation=[free.pop() for _ in range(held)],
            remaining=remaining,
            priority=draw(st.sampled_from([0.5, 1.0, 3.0])),
            deadline=None if remaining is None else draw(st.none() | st.floats(0, 1e5)),
        )
    return jobs, nodes


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(pools())
def test_no_node_gives_more_than_it_has_and_every_run_stays_within_its_sizes(
    pool: tuple[dict[str, PoolJob], dict[str, int]],
) -> None:
    jobs, nodes = pool
    decision = decide(jobs, nodes, 100.0)
    used = Counter(node for places in decision.allocations.values() for node in places)
    assert all(count <= nodes[node] for node, count in used.items())
    for name, places in decision.allocations.items():
        assert jobs[name].fewest <= len(places) <= jobs[name].max_replicas
    fitting = [one for one in jobs.values() if one.fewest <= sum(nodes.values())]
    if sum(one.fewest for one in fitting) <= sum(nodes.values()):
        assert len(decision.allocations) == len(fitting)


@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@given(pools())
def test_the_same_facts_give_the_same_decision_whatever_their_order(
    pool: tuple[dict[str, PoolJob], dict[str, int]],
) -> None:
    jobs, nodes = pool
    turned = decide(dict(reversed(jobs.items())), dict(reversed(nodes.items())), 100.0)
    assert decide(jobs, nodes, 100.0) == turned
    assert allocate(jobs, nodes, 100.0) == turned.allocations


@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@given(pools())
def test_each_change_and_each_run_that_waits_has_a_sentence_with_its_name(
    pool: tuple[dict[str, PoolJob], dict[str, int]],
) -> None:
    jobs, nodes = pool
    decision = decide(jobs, nodes, 100.0)
    changed = {name for name in jobs if list(jobs[name].allocation) != decision.allocations.get(name, [])}
    assert {change.job for change in decision.changes} == changed
    assert decision.waiting.keys() == jobs.keys() - decision.allocations.keys()
    texts = {change.job: change.reason for change in decision.changes} | dict(decision.waiting)
    assert all(text.startswith(name) and text.endswith(".") and "\n" not in text for name, text in texts.items())


@pytest.mark.parametrize(("jobs", "nodes"), [({}, FOUR_NODES), ({}, {}), ({"x": job()}, {}), ({"x": job()}, {"a": 0})])
def test_nothing_is_given_where_there_is_nothing_to_give_or_to_give_to(
    jobs: dict[str, PoolJob], nodes: dict[str, int]
) -> None:
    assert allocate(jobs, nodes, 0.0) == {}


def test_a_run_that_is_larger_than_the_pool_waits_and_is_told_so() -> None:
    decision = decide({"huge": job(min_replicas=32, max_replicas=32), "small": job()}, FOUR_NODES, 0.0)
    assert sizes(decision) == {"small": 16}
    assert decision.waiting == {"huge": "huge cannot start: its minimum is 32 replicas, and the pool has 16 devices."}


def test_a_run_with_little_left_gets_more_than_one_with_much() -> None:
    found = sizes(decide({"short": job(remaining=600.0), "long": job(remaining=6e5)}, FOUR_NODES, 0.0))
    assert found["short"] > found["long"] >= 1


def test_without_a_word_of_what_is_left_a_run_that_has_had_little_gets_more() -> None:
    found = sizes(decide({"new": job(attained=60.0), "old": job(attained=1e6)}, FOUR_NODES, 0.0))
    assert found["new"] > found["old"] >= 1


def test_a_run_that_is_no_faster_with_more_keeps_one_device() -> None:
    assert sizes(decide({"flat": job(0.0), "steep": job(1.0)}, FOUR_NODES, 0.0)) == {"flat": 1, "steep": 12}


def test_a_slow_size_is_passed_over_on_the_way_to_a_fast_one() -> None:
    """As on real networks: 4 devices of a node are as fast as 8 on two, and 16 on four are twice as fast."""
    paces = {1: 1.0, 2: 2.0, 3: 2.5, 4: 4.0, 8: 4.0, 12: 4.5, 16: 8.0}
    one = job(speedup=lambda nodes, replicas: paces[replicas], allocation=["a"] * 4)
    assert sizes(decide({"one": one}, FOUR_NODES, 0.0)) == {"one": 16}


@pytest.mark.parametrize(("faster", "changes"), [(1.05, 0), (1.3, 1)])
def test_a_run_moves_only_where_that_pays(faster: float, changes: int) -> None:
    one = job(speedup=lambda nodes, replicas: faster if replicas > 4 else 1.0, allocation=["a"] * 4)
    assert len(decide({"one": one}, FOUR_NODES, 0.0).changes) == changes


def test_an_allocation_that_stays_is_returned_in_its_order() -> None:
    held = ["c", "a", "a"]
    assert allocate({"one": job(max_replicas=3, allocation=held)}, FOUR_NODES, 0.0) == {"one": held}


def test_four_replicas_go_to_one_node_though_smaller_gaps_are_there() -> None:
    jobs = {"held": job(max_replicas=2, allocation=["a", "a"]), "new": job(max_replicas=4)}
    assert allocate(jobs, {"a": 4, "b": 4}, 0.0) == {"held": ["a", "a"], "new": ["b"] * 4}


def test_a_run_whose_node_is_gone_gets_others() -> None:
    decision = decide({"one": job(max_replicas=4, allocation=["gone"] * 4)}, FOUR_NODES, 0.0)
    assert sizes(decision) == {"one": 4}
    assert decision.changes[0].reason.endswith("the devices that it had are no longer there.")


def test_a_higher_priority_gets_more() -> None:
    jobs = {"a": job(priority=4.0, remaining=1e4), "b": job(remaining=1e4)}
    found = sizes(decide(jobs, FOUR_NODES, 0.0))
    assert found["a"] > found["b"]


def test_a_deadline_gets_the_size_that_meets_it_and_one_that_has_passed_gets_none() -> None:
    late = job(1.0, remaining=1e4)
    others = {f"short-{at}": job(1.0, remaining=100.0) for at in range(4)}
    assert sizes(decide({"late": late, **others}, FOUR_NODES, 0.0))["late"] == 1
    due = dataclasses.replace(late, deadline=2000.0)
    found = sizes(decide({"late": due, **others}, FOUR_NODES, 0.0))
    assert due.speedup(2, found["late"]) * (2000.0 - due.moving_s) >= 1e4
    assert sizes(decide({"late": due, **others}, FOUR_NODES, 3000.0))["late"] == 1


def test_of_two_deadlines_that_cannot_both_be_met_the_earlier_one_is() -> None:
    jobs = {
        name: job(1.0, remaining=1e4, deadline=deadline) for name, deadline in (("early", 1000.0), ("later", 1001.0))
    }
    found = sizes(decide(jobs, FOUR_NODES, 0.0))
    assert found["early"] > 8 > found["later"]


def test_sentences_name_sizes_time_and_reason() -> None:
    jobs = {
        "bert-1": job(remaining=5e5, allocation=["a"] * 4 + ["b"] * 4 + ["c"] * 4 + ["d"] * 4),
        "cifar-3": job(remaining=2000.0),
    }
    texts = {change.job: change.reason for change in decide(jobs, FOUR_NODES, 0.0).changes}
    assert texts["cifar-3"].startswith("cifar-3 starts with ")
    assert "of its pace: it has 16 h 48 min left, and 1 of 2 runs go first." in texts["bert-1"]
    alone = decide({"cifar-3": job(remaining=2000.0, allocation=["a"] * 4)}, FOUR_NODES, 0.0)
    (change,) = alone.changes
    assert change.reason.startswith("cifar-3 goes from 4 to 16 replicas on 4 nodes: it goes on 2.73 times as fast")
    assert change.reason.endswith(" earlier.")


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"min_replicas": 4, "max_replicas": 2}, "asks for 4 to 2 replicas"),
        ({"min_replicas": -1}, "asks for -1 to 16 replicas"),
        ({"max_replicas": 0, "min_replicas": 0}, "asks for 0 to 0 replicas"),
        ({"attained": -1.0}, "attained of a run is -1.0"),
        ({"remaining": math.nan}, "remaining of a run is nan"),
        ({"priority": 0.0}, "priority of a run is 0.0"),
        ({"deadline": 60.0}, "does not say what it has left"),
    ],
)
def test_facts_that_cannot_be_are_refused_with_their_value(facts: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        job(**facts)  # type: ignore[arg-type]


def test_a_node_with_a_negative_number_of_devices_is_refused() -> None:
    with pytest.raises(PlanError, match="Node 'a' has -1 devices"):
        allocate({}, {"a": -1}, 0.0)


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf])
def test_a_speedup_that_is_no_number_is_refused_with_its_size(wrong: float) -> None:
    one = job(speedup=lambda nodes, replicas: wrong if replicas == 8 else 1.0)
    with pytest.raises(PlanError, match=f"on 2 nodes with 8 replicas is {wrong!r}"):
        allocate({"one": one}, FOUR_NODES, 0.0)


def test_a_thousand_runs_ask_for_few_speedups() -> None:
    """The cost is the number of questions: about four times the logarithm of a run's largest size, for each run."""
    asked = Counter[str]()

    def speedup(nodes: int, replicas: int) -> float:
        asked["calls"] += 1
        return replicas**0.7

    jobs = {
        f"run-{at}": PoolJob(speedup=speedup, max_replicas=256, age=float(at), attained=float(at * 50))
        for at in range(1000)
    }
    decision = decide(jobs, {f"node-{at}": 8 for at in range(1250)}, 0.0)
    assert sum(map(len, decision.allocations.values())) > 9_900
    assert asked["calls"] < 50 * len(jobs)


def test_a_run_that_is_nearly_done_is_not_moved_and_a_long_one_is() -> None:
    held = {"allocation": ["a"], "attained": 1e4}
    for remaining, size in ((20.0, 1), (5000.0, 16)):
        assert sizes(decide({"run": job(0.9, remaining=remaining, **held)}, FOUR_NODES, 0.0)) == {"run": size}
    assert sizes(decide({"run": job(0.9, **held)}, FOUR_NODES, 0.0)) == {"run": 16}, "it may have much left"
    assert sizes(decide({"run": job(0.9, remaining=0.0, moving_s=0.0, **held)}, FOUR_NODES, 0.0))["run"] >= 1
