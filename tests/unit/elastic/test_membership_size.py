"""More and fewer replicas: resized, lost with their host, come with another one."""

from __future__ import annotations

import gc
import time

import pytest

from membership_scenes import form, join, made, only, quiet, the
from paceline.elastic.membership import EndWorker, StartReplica
from paceline.elastic.membership_messages import PREEMPTED, Finish, MembershipView

DECIDED_S = 0.1


def test_a_replica_lost_with_its_host_is_not_replaced_also_not_at_the_next_loss() -> None:
    membership = made()
    assert only(membership.lost([3], 1.0, reason="host gone", room=0), StartReplica) == []
    starts = only(membership.lost([2], 2.0, reason="killed"), StartReplica)
    assert [start.replica for start in starts] == [2]
    assert membership.num_workers == 3


def test_resize_starts_what_is_missing_and_lets_the_highest_go() -> None:
    membership = made(2)
    assert [start.replica for start in only(membership.resize(4, 1.0), StartReplica)] == [2, 3]
    join(membership, 2, 3)
    assert the(membership.resize(2, 2.0), MembershipView).members == (0, 1)
    assert membership.left_out == {2, 3}


def test_resize_ends_newcomers_before_it_sends_members_away() -> None:
    membership = made(3)
    membership.lost([0], 1.0, reason="killed")
    form(membership)
    membership.ready(0, 1.1)  # being taken in
    membership.resize(4, 1.2)  # and another one on its way
    decisions = membership.resize(2, 1.3)
    assert sorted(end.worker for end in only(decisions, EndWorker)) == [0, 3]
    formed = the(decisions, MembershipView)
    assert (formed.members, formed.planned) == ((1, 2), True)
    assert only(decisions, StartReplica) == []


def test_resize_up_while_some_leave_starts_others() -> None:
    membership = made(4)
    membership.resize(2, 1.0)
    starts = only(membership.resize(4, 1.1), StartReplica)
    assert [start.replica for start in starts] == [4, 5]  # 2 and 3 may have gone any moment


@pytest.mark.parametrize("replicas", [1, 9])
def test_resize_outside_of_the_plan_is_refused_with_what_it_allows(replicas: int) -> None:
    with pytest.raises(ValueError, match=f"allows 2 to 8 replicas, so the run cannot be resized to {replicas}"):
        made(4, least=2).resize(replicas, 1.0)


@pytest.mark.thorough
def test_a_thousand_workers_are_decided_about_within_the_limit_for_ten_thousand() -> None:
    """In time of this thread's own, so that a busy machine does not count."""
    membership, took = made(1000, most=1000), list[float]()
    gc.collect()  # what other tests have left behind is not its doing
    for number in range(10):
        began = time.thread_time()
        membership.lost([number, 500 + number], 2.0 * number, reason="killed")
        took.append(time.thread_time() - began)
        form(membership, now=2.0 * number)
        began = time.thread_time()
        membership.tick(2.0 * number + 1.0)
        took.append(time.thread_time() - began)
    assert membership.num_members == 980
    assert max(took) < DECIDED_S


def test_a_run_that_ends_cannot_be_resized() -> None:
    membership = made(4)
    membership.finish(PREEMPTED, "asked")
    with pytest.raises(ValueError, match="about to end"):
        membership.resize(2, 1.0)


def test_replicas_lost_with_their_host_are_replaced_as_far_as_other_hosts_have_room() -> None:
    membership = made()
    starts = only(membership.lost([1, 2, 3], 1.0, reason="host gone", room=2), StartReplica)
    assert [start.replica for start in starts] == [1, 2]
    assert membership.target == 3


def test_a_vacancy_needs_room_too_when_a_host_is_lost() -> None:
    membership = made()
    for _ in range(4):  # and its replacements at their start: the next one is started after a pause
        membership.lost([1], 1.0, reason="killed")
    assert only(membership.lost([3], 1.1, reason="host gone", room=1), StartReplica) == []
    assert membership.target == 3  # 0, 2, and one of the two that are missing


def test_who_was_to_leave_anyway_needs_no_room_elsewhere() -> None:
    membership = made()
    membership.leaving(3, 1.0)
    assert only(membership.lost([3], 1.1, reason="host gone", room=0), StartReplica) == []
    assert membership.target == 3


def test_a_host_that_comes_brings_more_replicas_up_to_the_most() -> None:
    membership = made(4, most=6)
    assert [start.replica for start in only(membership.grow(1, 1.0), StartReplica)] == [4]
    assert [start.replica for start in only(membership.grow(3, 2.0), StartReplica)] == [5]
    assert membership.grow(3, 3.0) == []
    assert membership.target == 6


def test_a_host_that_comes_back_is_given_what_was_lost_with_it() -> None:
    membership = made()
    membership.lost([2, 3], 1.0, reason="host gone", room=0)
    form(membership)
    assert [start.replica for start in only(membership.grow(2, 9.0), StartReplica)] == [2, 3]
    assert join(membership, 2, 3).members == (0, 1, 2, 3)


def test_a_host_that_comes_ends_the_wait_for_the_least() -> None:
    membership = made(2, least=2)
    assert the(membership.lost([1], 1.0, reason="host gone", room=0), MembershipView).holds
    form(membership, now=1.0)
    quiet(membership, until=30.0)
    membership.grow(1, 30.0)
    assert not join(membership, 1).holds
    assert only(quiet(membership, until=100.0), Finish) == []


def test_nobody_is_started_on_a_host_that_comes_when_the_run_ends() -> None:
    membership = made()
    membership.finish(PREEMPTED, "asked")
    assert membership.grow(2, 1.0) == []
    assert membership.target == 4
