"""Where parameters lie: the same for everybody, and as even as whole parameters allow."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.schedule.parameter_placement import in_turn, placed_on

sizes = st.dictionaries(st.text(max_size=4), st.integers(0, 10**6), max_size=40)


@given(sizes, st.integers(1, 9))
def test_no_server_has_more_than_its_share_and_one_parameter(num_bytes: dict[str, int], servers: int) -> None:
    places = placed_on(num_bytes, servers=servers)
    loads = [sum(num_bytes[name] for name, one in places.items() if one == server) for server in range(servers)]
    assert [*places] == [*num_bytes] and sum(loads) == sum(num_bytes.values())
    assert max(loads) <= sum(num_bytes.values()) / servers + max(num_bytes.values(), default=0)


@given(sizes, st.integers(1, 9), st.randoms())
def test_the_order_of_names_does_not_matter(num_bytes: dict[str, int], servers: int, random: Random) -> None:
    names = [*num_bytes]
    random.shuffle(names)
    shuffled = {name: num_bytes[name] for name in names}
    assert placed_on(shuffled, servers=servers) == placed_on(num_bytes, servers=servers)


def test_the_largest_go_apart() -> None:
    assert placed_on({"a": 4, "b": 9, "c": 3, "d": 8}, servers=2) == {"b": 0, "d": 1, "a": 1, "c": 0}
    with pytest.raises(ValueError, match="servers is 0"):
        placed_on({}, servers=0)


@pytest.mark.parametrize(
    "hosts, order",
    [((0, 0, 0, 0), [0, 1, 2, 3]), ((0, 0, 1, 1), [0, 2, 1, 3]), ((0, 1, 1, 2, 0), [0, 1, 3, 2, 4])],
)
def test_servers_are_spread_over_hosts_first(hosts: tuple[int, ...], order: list[int]) -> None:
    assert in_turn(hosts) == order
