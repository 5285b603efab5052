"""A run's weight is the expected number of runs that wait for it."""

from __future__ import annotations

import random

import pytest

from paceline.pool.facts import PoolJob
from paceline.pool.weights import chance_of_longer, weights


def job(**facts: float) -> PoolJob:
    return PoolJob(speedup=lambda nodes, replicas: float(replicas), max_replicas=8, **facts)  # type: ignore[arg-type]


def test_runs_that_say_what_they_have_left_count_all_that_finish_later() -> None:
    found = weights({"a": job(remaining=10.0), "b": job(remaining=1e4), "c": job(remaining=100.0)})
    assert found == {"a": 3.0, "c": 2.0, "b": 1.0}


def test_of_runs_of_a_kind_the_first_goes_first() -> None:
    found = weights({f"run-{age:g}": job(attained=1000.0, age=age) for age in (50.0, 70.0, 60.0)})
    assert found == {"run-70": 3.0, "run-60": 2.0, "run-50": 1.0}


def test_a_new_run_counts_more_than_an_old_one_and_both_chances_add_to_one() -> None:
    found = weights({"new": job(attained=100.0), "old": job(attained=1e5)})
    assert found["new"] > 1.9 and found["old"] < 1.1
    assert found["new"] + found["old"] == pytest.approx(3.0, abs=1e-6)


def test_a_run_that_says_it_is_short_counts_more_than_one_that_says_nothing() -> None:
    found = weights({"said": job(remaining=100.0), "silent": job(attained=900.0)})
    assert found["said"] == pytest.approx(1.9, abs=0.01)
    assert found["silent"] == pytest.approx(1.1, abs=0.01)


def test_priorities_count_as_so_many_runs() -> None:
    found = weights({"first": job(remaining=100.0), "dear": job(remaining=1000.0, priority=3.0)})
    assert found == {"first": 4.0, "dear": 3.0}


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 1.0005, 3.0, 200.0])
def test_the_chance_is_that_of_two_draws_with_heavy_tails(ratio: float) -> None:
    draws = random.Random(0)

    def left(service: float) -> float:
        return service * (1 / (1 - draws.random()) - 1)

    longer = sum(left(ratio) > left(1.0) for _ in range(20_000)) / 20_000
    assert chance_of_longer(ratio) == pytest.approx(longer, abs=0.015)
    assert chance_of_longer(ratio) + chance_of_longer(1 / ratio) == pytest.approx(1.0, abs=1e-3)
