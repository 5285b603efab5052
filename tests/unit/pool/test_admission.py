"""Runs whose minima do not fit together take turns, and none waits for longer than the bound."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.pool.admission import admitted, longest_wait_s
from paceline.pool.facts import PoolJob, PoolTerms

TERMS = PoolTerms(interval_s=60.0, patience_s=600.0, turn_s=300.0)


def linear(nodes: int, replicas: int) -> float:
    return float(replicas)


def job(**facts: object) -> PoolJob:
    return dataclasses.replace(PoolJob(speedup=linear, max_replicas=16, min_replicas=4), **facts)  # type: ignore[arg-type]


def test_where_all_fit_all_are_let_in() -> None:
    jobs = {f"run-{at}": job() for at in range(4)}
    assert admitted(jobs, dict.fromkeys(jobs, 1.0), 16, 0.0, TERMS) == set(jobs)


def test_a_run_that_is_larger_than_the_pool_keeps_none_out() -> None:
    jobs = {"huge": job(min_replicas=16, waiting_s=1e6), "small": job()}
    assert admitted(jobs, {"huge": 9.0, "small": 1.0}, 8, 0.0, TERMS) == {"small"}


def test_the_weights_decide_while_none_has_lost_patience() -> None:
    jobs = {name: job() for name in "abc"}
    assert admitted(jobs, {"a": 1.0, "b": 3.0, "c": 2.0}, 8, 0.0, TERMS) == {"b", "c"}


def test_a_run_that_has_lost_patience_goes_before_all_but_those_in_their_turn() -> None:
    jobs = {
        "in its turn": job(allocation=["n"] * 4, held_s=100.0),
        "turn over": job(allocation=["n"] * 4, held_s=400.0),
        "patient": job(waiting_s=500.0),
        "overdue": job(waiting_s=700.0),
    }
    heavy = {"in its turn": 1.0, "turn over": 8.0, "patient": 9.0, "overdue": 1.0}
    assert admitted(jobs, heavy, 8, 0.0, TERMS) == {"in its turn", "overdue"}


def test_a_deadline_that_presses_goes_before_the_weights_but_not_before_lost_patience() -> None:
    jobs = {
        "due": job(remaining=4000.0, deadline=1200.0, allocation=["n"] * 4, held_s=400.0),  # it needs 1,000 s with 4
        "later": job(remaining=4000.0, deadline=1900.0),
        "far": job(remaining=4000.0, deadline=2500.0),
        "missed": job(remaining=4000.0, deadline=-1.0),
        "heavy": job(),
    }
    light = dict.fromkeys(jobs, 1.0) | {"heavy": 9.0}
    assert admitted(jobs, light, 4, 0.0, TERMS) == {"due"}
    assert admitted(jobs, light, 8, 0.0, TERMS) == {"due", "heavy"}, "the others have time, or none left"
    assert admitted(jobs, light, 8, 800.0, TERMS) == {"due", "later"}
    jobs["overdue"] = job(waiting_s=700.0)
    assert admitted(jobs, light | {"overdue": 1.0}, 4, 0.0, TERMS) == {"overdue"}


def test_none_overtakes_a_large_run_that_has_lost_patience() -> None:
    jobs = {
        "in its turn": job(allocation=["n"] * 4, held_s=100.0),
        "large": job(min_replicas=8, waiting_s=900.0),
        "overdue": job(waiting_s=800.0),
        "new": job(),
    }
    assert admitted(jobs, dict.fromkeys(jobs, 1.0), 8, 0.0, TERMS) == {"in its turn"}


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 8), min_size=2, max_size=14),
    st.lists(st.floats(0.1, 100.0), min_size=14, max_size=14),
    st.integers(8, 16),
)
def test_every_run_gets_its_minimum_within_the_bound(minima: list[int], heavy: list[float], devices: int) -> None:
    """Runs that never end, and weights that never change: the worst there is."""
    weights = {f"run-{at}": heavy[at] for at in range(len(minima))}
    since = dict.fromkeys(weights, 0.0)  # since each waits, or runs
    running: set[str] = set()
    bound = longest_wait_s({name: job(min_replicas=least) for name, least in zip(weights, minima, strict=True)}, TERMS)
    for tick in range(250):
        now = tick * TERMS.interval_s
        jobs = {
            name: job(
                min_replicas=least,
                allocation=["n"] * least if name in running else [],
                waiting_s=now - since[name],
                held_s=now - since[name],
            )
            for name, least in zip(weights, minima, strict=True)
        }
        chosen = admitted(jobs, weights, devices, 0.0, TERMS)
        assert sum(jobs[name].fewest for name in chosen) <= devices
        for name in weights:
            waited = now - since[name]
            if (name in chosen) != (name in running):
                since[name] = now
            assert name in running or waited <= bound
        running = chosen


@pytest.mark.parametrize(("waiting", "seconds"), [(0, 960.0), (3, 2040.0)])
def test_the_bound_grows_by_a_turn_for_each_run_that_waits(waiting: int, seconds: float) -> None:
    jobs = {f"run-{at}": job() for at in range(waiting)} | {"running": job(allocation=["n"] * 4)}
    assert longest_wait_s(jobs, TERMS) == seconds
