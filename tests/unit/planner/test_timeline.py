"""A predicted step as a timeline: its end is the step's, and its stages follow their schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from paceline.logs.trace_events import TraceSlice
from paceline.plan import Plan
from paceline.planner.cluster import catalogue
from paceline.planner.constants import built_in
from paceline.planner.model_costs import transformer
from paceline.planner.search import PricedPlan, price
from paceline.planner.timeline import step_slices

MODEL = transformer(layers=32, hidden=1024, heads=16, sequence=512, vocabulary=32000)


def priced(text: str) -> PricedPlan:
    return price(Plan.parse(text).resolve(8), MODEL, catalogue().cluster("h100x8-ib"), built_in(), workers=8)


def end_of(slices: Sequence[TraceSlice]) -> float:
    return max(one.begin_s + (one.duration_s or 0.0) for one in slices)


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        ("batch(size=64,micro=4)", 1e-6),
        ("shard=8+batch(size=64,micro=4)+compute(recompute=blocks)", 1e-6),
        ("batch(size=8192,micro=1)", 1e-6),
        ("stages=4+batch(size=64,micro=2)", 0.12),
        ("stages=4+schedule=zero-bubble+batch(size=64,micro=2)", 0.12),
    ],
)
def test_the_timeline_ends_when_the_step_does(plan: str, tolerance: float) -> None:
    one = priced(plan)
    assert end_of(list(step_slices(one))) == pytest.approx(one.step.step_s, rel=tolerance)


def test_each_stage_has_a_row_with_all_micro_batches_that_do_not_overlap() -> None:
    found = list(step_slices(priced("stages=4+batch(size=64,micro=2)")))
    rows = {one.row for one in found}
    assert rows == {f"stage worker {number}" for number in range(4)}
    for row in rows:
        spans = sorted((one.begin_s, one.begin_s + (one.duration_s or 0.0)) for one in found if one.row == row)
        assert all(first[1] <= second[0] + 1e-9 for first, second in itertools.pairwise(spans))
        names = [one.name for one in found if one.row == row]
        assert [name for name in names if name.startswith("forward")] == [f"forward {micro}" for micro in range(16)]
        assert names[-1] == "waiting" or "optimizer" in names
