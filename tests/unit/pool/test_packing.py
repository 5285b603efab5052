"""Replicas go to as few nodes as there are gaps for, and runs that stay keep theirs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.pool.packing import Gaps, place


def test_the_smallest_gap_that_holds_all_is_taken() -> None:
    assert Gaps({"a": 4, "b": 2, "c": 3}).take(2) == ["b", "b"]


def test_a_large_run_takes_whole_nodes_first() -> None:
    assert Gaps({"a": 1, "b": 4, "c": 2, "d": 4}).take(9) == ["b"] * 4 + ["d"] * 4 + ["a"]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 30))
def test_the_number_of_nodes_is_told_before_they_are_taken(devices: list[int], replicas: int) -> None:
    gaps = Gaps({f"node-{at}": count for at, count in enumerate(devices)})
    replicas = min(replicas, gaps.total)
    told = gaps.num_nodes(replicas)
    taken = Counter(gaps.take(replicas))
    assert len(taken) == told and sum(taken.values()) == replicas
    assert all(count <= devices[int(node.removeprefix("node-"))] for node, count in taken.items())
    assert gaps.total == sum(devices) - replicas


def test_gaps_that_would_spread_a_run_make_it_smaller() -> None:
    """Three gaps of one device are worth less to it than one device."""
    nodes = {"a": 2, "b": 2, "c": 2}
    held = {"x": ["a"], "y": ["b"], "z": ["c"], "new": []}
    sizes = {"x": [1], "y": [1], "z": [1], "new": [3, 1, 2]}
    found = place(sizes, held, nodes, lambda name, num_nodes, replicas: replicas / num_nodes**2)
    assert found == {"x": ["a"], "y": ["b"], "z": ["c"], "new": ["a"]}


def test_a_run_that_is_placed_first_leaves_the_minimum_of_the_others() -> None:
    sizes = {"large": [4, 2], "small": [1]}
    found = place(sizes, {"large": [], "small": []}, {"a": 4}, lambda name, num_nodes, replicas: float(replicas))
    assert len(found["small"]) == 1 and len(found["large"]) == 2
