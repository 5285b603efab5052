"""The switch between pretended sites, in pretended time: what a frame's way takes, and what is dropped."""

from __future__ import annotations

import pytest

from paceline.testing.switch import WAITS_S, Switch

RATE, DELAY_S = 1000.0, 0.05  # bytes a second


def frame(sender: int, receiver: int, *, num_bytes: int = 100) -> bytes:
    return bytes([*[receiver] * 6, *[sender] * 6]).ljust(num_bytes, b"x")


def switch(num_sites: int = 2, *, bytes_per_s: float | None = RATE) -> Switch:
    """A switch that has seen where everybody is, a long time ago."""
    made = Switch(num_sites, bytes_per_s=bytes_per_s, delay_s=DELAY_S)
    for site in range(num_sites):
        made.take(-1e6, site, frame(site, 255))
    made.due(-1e5)
    return made


def arrivals(one: Switch) -> list[tuple[float, int, bytes]]:
    """Let time pass until nothing is on its way: when what arrived where."""
    found: list[tuple[float, int, bytes]] = []
    while (when := one.next_at()) is not None:
        found += [(round(when, 6), *arrived) for arrived in one.due(when)]
    return found


def test_a_frame_takes_the_delay_and_its_time_on_both_cables() -> None:
    one = switch()
    one.take(0.0, 0, frame(0, 1, num_bytes=20))
    assert arrivals(one) == [(pytest.approx(0.02 + DELAY_S + 0.02), 1, frame(0, 1, num_bytes=20))]


def test_frames_of_one_site_arrive_in_order_and_no_faster_than_its_cable() -> None:
    one = switch()
    sent = [frame(0, 1, num_bytes=50 + number) for number in range(4)]
    for each in sent:
        one.take(0.0, 0, each)
    came = arrivals(one)
    assert [each for _, _, each in came] == sent
    assert came[-1][0] == pytest.approx((sum(map(len, sent)) + len(sent[-1])) / RATE + DELAY_S)


def test_two_senders_share_the_receivers_cable() -> None:
    one = switch(3)
    one.take(0.0, 0, frame(0, 2))
    one.take(0.0, 1, frame(1, 2))
    assert [when for when, _, _ in arrivals(one)] == pytest.approx([0.1 + DELAY_S + 0.1, 0.1 + DELAY_S + 0.2])


def test_a_later_frame_that_is_sooner_at_the_receiver_does_not_wait_for_one_still_on_the_way() -> None:
    one = switch(3)
    one.take(0.0, 0, frame(0, 2, num_bytes=150))
    one.take(0.01, 1, frame(1, 2, num_bytes=20))
    assert [len(each) for _, _, each in arrivals(one)] == [20, 150]


def test_both_directions_of_a_cable_are_there_at_once() -> None:
    one = switch()
    one.take(0.0, 0, frame(0, 1))
    one.take(0.0, 1, frame(1, 0))
    assert [when for when, _, _ in arrivals(one)] == pytest.approx([0.2 + DELAY_S] * 2)


def test_what_would_wait_too_long_for_a_cable_is_dropped() -> None:
    one = switch()
    for _ in range(10):
        one.take(0.0, 0, frame(0, 1))
    taken = int(WAITS_S * RATE / 100) + 1  # the last of them waits just so long
    assert len(arrivals(one)) == taken < 10
    one.take(100.0, 0, frame(0, 1))
    assert len(arrivals(one)) == 1


def test_without_a_rate_only_the_delay_counts() -> None:
    one = switch(bytes_per_s=None)
    for _ in range(1000):
        one.take(0.0, 0, frame(0, 1))
    assert {when for when, _, _ in arrivals(one)} == {DELAY_S}


def test_a_frame_for_an_unknown_address_goes_to_all_others() -> None:
    one = switch(4)
    one.take(0.0, 1, frame(1, 255))
    assert sorted(site for _, site, _ in arrivals(one)) == [0, 2, 3]
