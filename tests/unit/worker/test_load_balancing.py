"""Shares for uneven machines: who is slower gets fewer micro-batches, and nobody's gradient changes its weight."""

from __future__ import annotations

import itertools
import random

import pytest

from paceline.schedule.micro_batches import split_by_speed, split_evenly
from paceline.worker.data.load_balancing import EVERY_STEPS, LoadBalancer


def counts(shares: tuple[range, ...]) -> list[int]:
    return [len(share) for share in shares]


@pytest.mark.parametrize(
    ("num_micro", "seconds", "expected"),
    [
        (8, [1.0, 1.0], [4, 4]),
        (9, [1.0, 2.0], [6, 3]),
        (8, [1.0, 1.0, 1.0, 3.0], [3, 2, 2, 1]),
        (4, [1.0, 1.0, 1.0, 100.0], [1, 1, 1, 1]),  # everybody runs one, and so is measured again
        (2, [1.0, 1.0, 1.0], [1, 1, 0]),
        (5, [0.0, 0.0], [3, 2]),
        (1, [5.0], [1]),
    ],
)
def test_the_slower_get_fewer(num_micro: int, seconds: list[float], expected: list[int]) -> None:
    assert counts(split_by_speed(num_micro, seconds)) == expected


def test_no_other_shares_are_done_earlier_and_none_is_left_out() -> None:
    choose = random.Random(7)
    for _ in range(200):
        size, num_micro = choose.randint(1, 4), choose.randint(1, 9)
        seconds = [choose.uniform(0.1, 3.0) for _ in range(size)]
        shares = split_by_speed(num_micro, seconds)
        assert list(itertools.chain(*shares)) == list(range(num_micro))
        done = max(len(share) * one for share, one in zip(shares, seconds, strict=True))
        least = 1 if num_micro >= size else 0
        others = [
            max(number * one for number, one in zip(numbers, seconds, strict=True))
            for numbers in itertools.product(range(least, num_micro + 1), repeat=size)
            if sum(numbers) == num_micro
        ]
        if least:
            assert done <= min(others) * (1 + 1e-9)


def measured(balance: LoadBalancer, seconds: float, num_micro: int = 4) -> float:
    for _ in range(EVERY_STEPS):
        balance.note(seconds * num_micro, num_micro)
    return balance.measured()


def test_shares_change_only_where_that_gains() -> None:
    balance = LoadBalancer(is_on=True)
    assert not balance.agree([0.100, 0.101], 8)
    assert counts(balance.shares(8, 2)) == [4, 4]
    assert balance.agree([0.100, 0.200], 9)
    assert counts(balance.shares(9, 2)) == [6, 3]
    assert not balance.agree([0.101, 0.199], 9), "it is as good as it gets"


def test_one_hiccup_is_no_slowness() -> None:
    balance = LoadBalancer(is_on=True)
    balance.note(40.0, 4)
    assert measured(balance, 0.1) == pytest.approx(0.1)


def test_other_workers_begin_with_even_shares() -> None:
    balance = LoadBalancer(is_on=True)
    assert balance.agree([0.1, 0.3], 8)
    assert counts(balance.shares(8, 3)) == counts(split_evenly(8, 3))
    balance.forget()
    assert counts(balance.shares(8, 2)) == [4, 4]


def test_off_it_never_looks() -> None:
    balance = LoadBalancer(is_on=False)
    assert not any(balance.is_due(step) for step in range(100))
    assert [step for step in range(2 * EVERY_STEPS + 1) if LoadBalancer(is_on=True).is_due(step)] == [
        EVERY_STEPS,
        2 * EVERY_STEPS,
    ]
