"""A thinned curve has the means and extremes of all its values, whatever their order, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.ui.thinned_series import MOST_COLUMNS, ThinnedSeries

values = st.lists(st.tuples(st.integers(0, 10**7), st.floats(-1e6, 1e6)), min_size=1, max_size=200)


def points(changes: dict[str, Any] | None) -> list[list[float]]:
    assert changes is not None
    return changes["points"]


def put(series: ThinnedSeries, step: int, value: float, *, revision: int = 1) -> None:
    series.add(step, value, None, None, 1.0, revision)


@given(values)
def test_points_are_the_values_where_they_are_few(given_values: list[tuple[int, float]]) -> None:
    by_step = dict(given_values)
    series = ThinnedSeries()
    for step, value in by_step.items():
        put(series, step, value)
    found = points(series.changes(0))
    assert [step for _, step, *_ in found] == sorted(by_step)
    for _, step, value in found:
        assert value == pytest.approx(by_step[int(step)], rel=1e-6, abs=1e-300)


def test_a_long_curve_keeps_its_mean_and_each_spike_in_bounded_memory() -> None:
    series = ThinnedSeries()
    for step in range(100_000):
        put(series, step, 99.0 if step == 54_321 else 1.0)
    found = points(series.changes(0))
    assert MOST_COLUMNS // 2 <= len(found) <= MOST_COLUMNS
    assert series.width == 128
    (spike,) = [one for one in found if one[4] == 99.0]
    assert abs(spike[1] - 54_321) < series.width and spike[3] == 1.0
    assert spike[2] == pytest.approx(1 + 98 / 128)


def test_rows_that_stand_for_many_steps_are_weighted() -> None:
    series = ThinnedSeries()
    series.add(100, 1.0, 0.5, 7.0, 100.0, 1)
    put(series, 100, 4.0)
    assert points(series.changes(0)) == [[100, 100.0, pytest.approx(104 / 101, rel=1e-6), 0.5, 7.0]]


def test_times_are_told_to_the_millisecond() -> None:
    series = ThinnedSeries()
    put(series, 1, 1_795_845_957.3943791)
    assert points(series.changes(0))[0][2] == 1_795_845_957.394


def test_only_what_has_changed_is_told_until_columns_were_merged() -> None:
    series = ThinnedSeries()
    for step in range(MOST_COLUMNS):
        put(series, step, 1.0)
    assert series.changes(1) is None
    put(series, 3, 5.0, revision=2)
    assert series.changes(1) == {"width": 1, "whole": False, "points": [[3, 3.0, 3.0, 1.0, 5.0]]}
    put(series, MOST_COLUMNS, 1.0, revision=3)
    told = series.changes(2)
    assert told is not None and told["whole"] and told["width"] == 2
    assert series.changes(3) is None
