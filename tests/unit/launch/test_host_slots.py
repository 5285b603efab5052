"""Which host a worker is started on."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from paceline.launch.job.placement import HostSlots


def made(*hosts: tuple[int, list[int]]) -> HostSlots:
    """Hosts with so many slots, and these workers on them."""
    slots = HostSlots()
    for host_index, (number, workers) in enumerate(hosts):
        slots.open(host_index, number, workers)
    return slots


def placed(slots: HostSlots, *workers: int, quiet: Collection[int] = ()) -> list[int | None]:
    slots.place(workers, quiet=quiet)
    return [slots.host_of(worker) for worker in workers]


def test_a_new_worker_goes_where_most_slots_are_free_and_first_to_the_first() -> None:
    slots = made((2, [0, 1]), (2, [2]), (3, [3]))
    assert placed(slots, 4) == [2]
    assert placed(slots, 5) == [1]
    assert placed(slots, 6) == [2]
    assert placed(slots, 7) == [0]  # beyond their slots, all carry as many


def test_a_successor_goes_where_its_predecessor_was() -> None:
    slots = made((2, [0, 1]), (2, []))
    slots.lose(1)
    assert placed(slots, 1) == [0]


@pytest.mark.parametrize(("spare", "host"), [(1, 1), (0, 0)])
def test_a_successor_whose_slot_was_given_away_goes_where_one_is_free(spare: int, host: int) -> None:
    slots = made((1, [0]), (spare, []))
    slots.lose(0)
    slots.open(0, 1, [5])
    assert placed(slots, 0) == [host]


def test_who_has_left_for_good_leaves_no_place_behind() -> None:
    slots = made((1, [0]), (3, [1, 2]))
    slots.leave(0)
    slots.leave(2)
    assert slots.host_of(0) is None
    assert placed(slots, 0) == [1]


def test_the_workers_of_a_replica_stay_together_where_there_is_room() -> None:
    slots = made((3, [0, 1]), (2, []))
    assert placed(slots, 2, 3) == [1, 1]
    assert placed(slots, 4, 5) == [0, 0]  # no host has room for both


def test_room_is_counted_in_replicas_that_fit_on_one_host() -> None:
    slots = made((3, [0]), (1, []), (1, [1, 2]))  # the third host carries more than its share
    assert [slots.room(each) for each in (1, 2, 3)] == [3, 1, 0]


def test_nobody_has_a_place_on_a_host_that_is_gone() -> None:
    slots = made((1, [0]), (2, [1, 2]))
    slots.lose(2)
    slots.close(1)
    assert [slots.host_of(worker) for worker in range(3)] == [0, None, None]
    assert slots.room(1) == 0
    assert placed(slots, 2) == [0]


def test_a_host_that_can_start_no_more_keeps_its_workers_and_gets_no_others() -> None:
    slots = made((2, [0, 1]), (3, [2]))
    slots.shut(0)
    assert [slots.host_of(worker) for worker in range(3)] == [0, 0, 1]
    assert slots.room(1) == 2
    slots.lose(1)
    assert slots.host_of(1) is None
    assert placed(slots, 1) == [1]
    slots.shut(1)
    assert placed(slots, 5) == [None]


def test_who_was_lost_before_its_host_was_shut_comes_back_elsewhere() -> None:
    slots = made((2, [0, 1]), (1, [2]))
    slots.lose(2)
    slots.shut(1)
    assert slots.host_of(2) is None
    assert placed(slots, 2) == [0], "beyond its slots"


def test_a_quiet_host_gets_somebody_only_where_no_other_has_a_free_slot() -> None:
    slots = made((3, [0, 1]), (3, [2]))
    slots.lose(2)
    assert placed(slots, 2, quiet=[1]) == [0]
    assert placed(slots, 3, quiet=[1]) == [1], "not beyond the other's slots"
    slots.lose(1)
    assert placed(slots, 1, 4, quiet=[1]) == [0, 1]
    assert placed(slots, 5) == [1], "it is heard of again"


def test_a_replica_that_was_lost_comes_back_together_also_where_it_was_apart() -> None:
    slots = made((3, [0, 1, 2]), (3, [3]))
    slots.lose(2)
    slots.lose(3)
    assert placed(slots, 2, 3) == [1, 1]
    for worker in (2, 3):
        slots.lose(worker)
    slots.open(1, 1)
    assert placed(slots, 2, 3) == [1, 0]  # no host has room for both


def test_room_counts_what_those_leave_who_end_with_the_lost_ones() -> None:
    slots = made((2, [1, 2]), (2, [3]))
    assert slots.room(2) == 0
    assert slots.room(2, without={2, 3}) == 1
    assert slots.room(1, without={2, 3}) == 3


def test_a_host_with_fewer_slots_has_the_last_replicas_too_many_as_wholes() -> None:
    slots = made((4, [0, 1, 2, 3]), (2, [4, 5]))
    assert slots.limit(0, 2, workers_each=1) == {2, 3}
    assert slots.limit(0, 3, workers_each=2) == {2, 3}
    assert slots.limit(1, 2, workers_each=2) == frozenset()
    for worker in (2, 3):
        slots.leave(worker)
    assert slots.limit(0, 3, workers_each=1) == frozenset()
    assert placed(slots, 2) == [0]
    slots.shut(1)
    assert slots.limit(1, 0, workers_each=1) == {4, 5}
    assert slots.open_hosts == (0,)
