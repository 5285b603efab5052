"""How a run gets from the replicas that it has on each node to those that it should have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.pool.shares import first_nodes, free_gpus, next_shares, shares_of, shares_text, startable

SHARES = st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), max_size=3)


def test_a_replica_of_several_workers_is_on_one_node() -> None:
    assert shares_of(["a", "a", "b", "a"], 1) == {"a": 3, "b": 1}
    assert shares_of(["a", "a", "b", "a"], 2) == {"a": 1}
    assert shares_of([], 1) == {}


def test_a_run_begins_where_there_is_room_and_on_as_few_nodes_as_its_least_needs() -> None:
    assert startable({"a": 2, "b": 2}, {"a": 4, "b": 3}, least=3, workers_each=2) == {}
    assert startable({"a": 2, "b": 1}, {"a": 4, "b": 2}, least=3, workers_each=2) == {"a": 2, "b": 1}
    assert startable({"a": 2, "b": 2}, {"a": 2, "b": 1}, least=1, workers_each=1) == {"a": 2}
    assert first_nodes({"b": 1, "a": 1, "c": 3}, 1) == {"c": 3}
    assert first_nodes({"b": 1, "a": 1, "c": 3}, 4) == {"c": 3, "a": 1}


@pytest.mark.parametrize(
    ("target", "present", "free", "then"),
    [
        ({"a": 1, "b": 2}, {"a": 2}, {"b": 2}, {"a": 1, "b": 2}),  # gives and takes
        ({"a": 1, "b": 2}, {"a": 2}, {"b": 1}, {"a": 1}),  # gives, and takes all of a node's or nothing
        ({"b": 2}, {"a": 2}, {"b": 2}, {"a": 2, "b": 2}),  # moves: first it takes
        ({"b": 2}, {"a": 2}, {}, {"a": 2}),  # it cannot move, and keeps what it has
        ({"a": 3}, {"a": 2}, {"a": 1}, {"a": 3}),
    ],
)
def test_a_run_gives_first_unless_too_few_would_be_at_work(
    target: dict[str, int], present: dict[str, int], free: dict[str, int], then: dict[str, int]
) -> None:
    assert next_shares({"a": 2}, target, present, free, least=1, workers_each=1) == then


def test_a_run_that_moves_leaves_when_those_that_come_are_at_work() -> None:
    both = {"a": 2, "b": 2}
    assert next_shares(both, {"b": 2}, {"a": 2}, {}, least=2, workers_each=1) == both
    assert next_shares(both, {"b": 2}, {"a": 2, "b": 1}, {}, least=2, workers_each=1) == both
    assert next_shares(both, {"b": 2}, {"a": 2, "b": 2}, {}, least=2, workers_each=1) == {"b": 2}


@given(SHARES, SHARES, SHARES, st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)), st.integers(1, 4))
def test_no_step_takes_what_is_not_free_or_leaves_too_few(
    now: dict[str, int], target: dict[str, int], present: dict[str, int], free: dict[str, int], least: int
) -> None:
    then = next_shares(now, target, present, free, least=least, workers_each=1)
    assert all(
        share - now.get(node, 0) <= free.get(node, 0) or share <= now.get(node, 0) for node, share in then.items()
    )
    at_work = sum(min(share, present.get(node, 0)) for node, share in then.items())
    assert at_work >= min(least, sum(min(share, present.get(node, 0)) for node, share in now.items()))
    assert all(share <= max(now.get(node, 0), target.get(node, 0)) for node, share in then.items())


def test_gpus_are_given_once() -> None:
    assert free_gpus(("0", "1", "2", "3"), ["1"], 2) == ("0", "2")
    assert free_gpus(None, [], 2) is None
    assert shares_text({"b": 1, "a": 2}) == "a (2), b (1)"
