"""Goodput: what failures cost, by layout."""

from __future__ import annotations

import pytest

from paceline.planner.axes import Axes
from paceline.planner.goodput import Goodput, goodput

HOUR = 3600.0


def of(axes: Axes, *, mtbf_s: float = 1000 * HOUR, replace_s: float = 300.0, step_s: float = 1.0) -> Goodput:
    return goodput(axes, per_host=8, step_s=step_s, mtbf_s=mtbf_s, replace_s=replace_s)


def test_without_failures_only_saving_costs() -> None:
    assert of(Axes(replicas=64), mtbf_s=1e15).share == pytest.approx(0.99)


def test_a_host_of_many_takes_its_share_of_the_replicas_until_it_is_replaced() -> None:
    found = of(Axes(replicas=64), replace_s=640.0)
    assert sum(found.costs.values()) == pytest.approx(10.0 + 0.2 + 640.0 * 8 / 64)
    assert found.failures_per_day == pytest.approx(8 * 24 / 1000)
    assert found.share == pytest.approx(0.99 / (1 + 8 / (1000 * HOUR) * sum(found.costs.values())))


def test_one_replica_over_hosts_waits_for_the_host_and_repeats_steps() -> None:
    found = of(Axes(shard=64), step_s=4.0)
    assert sum(found.costs.values()) == pytest.approx(10.0 + 300.0 + 1.4 + 5 * 4.0)


def test_a_replica_of_several_hosts_is_lost_with_one_of_them() -> None:
    found = of(Axes(replicas=4, shard=16), replace_s=400.0)
    assert sum(found.costs.values()) == pytest.approx(10.0 + 0.2 + 400.0 / 4)


@pytest.mark.parametrize("axes", [Axes(replicas=8), Axes(shard=8), Axes(replicas=1)])
def test_on_one_host_the_checkpoint_is_all_that_is_left(axes: Axes) -> None:
    assert sum(of(axes).costs.values()) == pytest.approx(10.0 + 300.0 + 6.0 + 150.0)


def test_more_failures_leave_less() -> None:
    shares = [of(Axes(shard=512), mtbf_s=hours * HOUR).share for hours in (10, 100, 1000)]
    assert 0 < shares[0] < shares[1] < shares[2] < 1
