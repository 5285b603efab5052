"""Silence, broken connections, and starts that fail."""

from __future__ import annotations

import itertools

import pytest

from membership_scenes import form, made, only, quiet, the, ticked
from paceline.elastic.membership import EndWorker, Limits, Membership, StartReplica
from paceline.elastic.membership_messages import FROM_WORKERS, Decision, MembershipView
from paceline.worker.membership.generation_builder import meeting_s


@pytest.mark.parametrize("state", ["member", "leaver", "newcomer on its way", "newcomer that waits"])
def test_who_is_silent_is_fenced_whatever_it_is(state: str) -> None:
    membership = made(3)
    for worker in membership.workers:
        membership.heard(worker, 0.0)
    if state == "leaver":
        membership.leaving(1, 0.0)
    elif state.startswith("newcomer"):
        membership.lost([1], 0.0, reason="killed")
        membership.heard(1, 0.0)
        if state == "newcomer that waits":
            membership.ready(1, 0.0)
        form(membership)
    decisions = ticked(membership, until=30.0, silent={1})
    end = the(decisions, EndWorker)
    assert (end.worker, end.reason, end.silent_s) == (1, "worker 1 said nothing for 10 s", 10.5)
    assert bool(only(decisions, MembershipView)) == (state != "newcomer on its way")


def test_a_worker_that_is_never_heard_of_is_given_up_after_a_long_time() -> None:
    membership = made(2)
    membership.lost([1], 0.0, reason="killed")
    form(membership)
    end = the(ticked(membership, until=400.0, silent={1}), EndWorker)
    assert (end.worker, end.reason) == (1, "worker 1 was not heard of within 300 s of its start")


def test_time_in_which_the_head_was_away_counts_for_nobody() -> None:
    membership = made(3)
    assert ticked(membership, until=5.0, silent=set()) == []
    assert membership.tick(1000.0) == []  # it was stopped; what they said is still to be read
    assert membership.tick(1001.0) == []


def test_workers_that_take_long_to_import_are_not_late_for_a_generation() -> None:
    membership = made(3, formed=False)
    membership.formed(0, 0, 0.0)
    membership.lost([1], 1.0, reason="killed")  # worker 2 still imports, and says nothing
    membership.formed(0, 1, 1.0)
    assert ticked(membership, until=100.0, silent={2}) == []


def test_one_that_does_not_join_in_time_is_fenced() -> None:
    membership = made(4)
    membership.lost([3], 0.0, reason="killed")
    form(membership, besides=1)
    assert ticked(membership, until=59.0, silent=set()) == [], "it is heard, so it has time again"
    decisions = quiet(membership, until=65.0)
    assert the(decisions, EndWorker).worker == 1
    assert the(decisions, MembershipView).members == (0, 2)


def test_a_program_that_joins_in_calls_of_its_own_has_the_time_of_the_job() -> None:
    """A healthy worker may be anywhere in its program, such as in a validation, when another one is lost."""
    membership = Membership(Limits(least=1, most=4, program_s=600.0), replicas=3, now=0.0)
    form(membership)
    membership.lost([2], 0.0, reason="killed")
    form(membership, besides=0)
    assert ticked(membership, until=599.0, silent=set()) == []
    assert the(quiet(membership, until=601.0), EndWorker).worker == 0  # without extensions


def test_when_all_are_late_they_try_again_and_then_one_is_given_up() -> None:
    membership = made(4)
    membership.lost([3], 0.0, reason="killed")
    again = the(ticked(membership, until=65.0, silent=set()), MembershipView)
    assert (again.members, again.planned) == ((0, 1, 2), False)
    decisions = quiet(membership, until=85.0)
    assert the(decisions, EndWorker).worker == 2
    assert the(decisions, MembershipView).members == (0, 1)


def test_many_members_on_a_busy_machine_have_more_time_and_none_that_is_heard_is_ended() -> None:
    membership = made(33, most=40)
    membership.lost([32], 0.0, reason="killed")
    for worker in range(20):
        membership.formed(worker, 1, 30.0)
    decisions, now = [], 30.0
    while now < 300.0:
        now += 1.0
        for worker in membership.workers:
            membership.heard(worker, now)
        decisions += membership.tick(now, load=16.0)
    assert not only(decisions, EndWorker) and not only(decisions, MembershipView)
    for worker in range(20, 32):
        membership.formed(worker, 1, now)
    assert membership.is_formed


@pytest.mark.parametrize(("members", "load"), [(2, 1.0), (31, 1.0), (31, 16.0)])
def test_members_wait_for_each_other_until_the_coordinator_has_decided(members: int, load: float) -> None:
    """A member that gave up before it told of itself alone, and was given up: one each 20 s, all of them healthy."""
    membership = made(members + 1, most=members + 1)
    membership.lost([members], 0.0, reason="killed")
    now, told = 0.0, list[Decision]()
    while not told:
        now += 1.0
        for worker in membership.workers:
            membership.heard(worker, now)
        told.extend(one for one in membership.tick(now, load=load) if not isinstance(one, StartReplica))
    assert the(told, MembershipView).members == tuple(range(members)), "once more, with all of them"
    assert now < meeting_s(members, load)


def test_the_state_may_take_longer_to_hand_over_than_a_generation_to_form() -> None:
    membership = made(2)
    membership.lost([1], 0.0, reason="killed")
    form(membership)
    membership.ready(1, 0.0)
    membership.formed(0, 2, 0.0)
    assert ticked(membership, until=500.0, silent=set()) == []


def test_a_broken_connection_is_made_anew_after_a_second() -> None:
    membership = made(4)
    assert membership.stuck(2, 0, 1.0) == []
    assert membership.tick(1.5) == []
    again = the(membership.tick(2.0), MembershipView)
    assert (again.generation, again.members, again.planned) == (1, (0, 1, 2, 3), False)
    form(membership)
    assert membership.tick(10.0) == []


def test_a_death_behind_a_broken_connection_is_enough() -> None:
    membership = made(4)
    membership.stuck(2, 0, 1.0)
    membership.lost([1], 1.2, reason="killed")
    assert membership.stuck(3, 0, 1.3) == []  # of a generation that is over
    assert membership.tick(2.5) == []


@pytest.mark.parametrize(
    ("reports", "faulty"),
    [
        ({0: 1, 2: 1, 3: 1}, 1),  # most point at it
        ({0: None, 1: None}, 1),  # the highest of those who are stuck
        ({0: 3, 3: 0}, 3),  # at each other
    ],
)
def test_a_connection_that_breaks_again_costs_the_one_that_most_point_at(
    reports: dict[int, int | None], faulty: int
) -> None:
    membership = made(4)
    for generation in (0, 1):
        for worker, peer in reports.items():
            membership.stuck(worker, generation, generation * 1.0, peer=peer)
        decisions = membership.tick(generation + 1.0)
    assert [end.worker for end in only(decisions, EndWorker)] == [faulty]
    assert faulty not in the(decisions, MembershipView).members


def test_a_committed_step_forgives_the_connections() -> None:
    membership = made(4)
    for generation in (0, 1, 2):
        membership.stuck(0, generation, generation * 2.0)
        assert only(membership.tick(generation * 2.0 + 1.0), EndWorker) == []
        form(membership)
        membership.committed(3, generation * 2.0 + 1.5)


def test_a_newcomer_that_cannot_be_reached_is_given_up_before_any_member() -> None:
    membership = made(3)
    membership.lost([0], 0.0, reason="killed")
    form(membership)
    membership.ready(0, 0.0)
    for number in (1, 2):
        membership.stuck(2, membership.generation, number * 2.0, peer=0)
        decisions = membership.tick(number * 2.0 + 1.0)
        if number == 1:
            assert (the(decisions, MembershipView).members, only(decisions, EndWorker)) == ((1, 2), [])
            form(membership)
            membership.committed(1, 3.5)
            membership.ready(0, 3.5, generation=membership.generation)
    assert the(decisions, EndWorker).worker == 0
    assert the(decisions, MembershipView).planned


def test_who_is_stuck_before_a_planned_generation_is_not_forgotten_by_it() -> None:
    membership = made(3)
    membership.stuck(1, 0, 1.0, peer=0)
    membership.leaving(2, 1.1)
    assert not the(membership.tick(2.1), MembershipView).planned


def test_replacements_that_keep_failing_are_started_with_pauses_but_never_given_up() -> None:
    membership = made(2)
    starts: list[float] = []
    now = 1.0
    pending = bool(only(membership.lost([1], now, reason="killed"), StartReplica))
    form(membership)
    while len(starts) < 6:
        now += 0.5
        membership.heard(0, now)
        pending = bool(only(membership.tick(now), StartReplica)) or pending
        if pending:
            starts.append(now)
            pending = bool(only(membership.lost([1], now, reason="killed at its start"), StartReplica))
    gaps = [round(later - earlier, 1) for earlier, later in itertools.pairwise(starts)]
    assert gaps == [0.5, 0.5, 5.0, 10.0, 20.0]


def test_replacements_that_are_lost_with_their_host_are_started_elsewhere_without_a_pause() -> None:
    membership = made(8)
    for now in (1.0, 2.0):
        decisions = membership.lost([5, 6, 7], now, reason="a host is gone", room=3)
        assert [start.replica for start in only(decisions, StartReplica)] == [5, 6, 7]
    decisions = membership.lost([5, 6, 7], 3.0, reason="all at once")
    assert len(only(decisions, StartReplica)) == 3, "one cause is one failure"


def test_workers_of_a_silent_host_are_left_to_the_watch_over_hosts() -> None:
    membership = made(4)
    for worker in membership.workers:
        membership.heard(worker, 0.0)
    assert membership.tick(2.0) == []
    for step in range(5, 23):
        for worker in (0, 1):
            membership.heard(worker, step / 2)
        assert membership.tick(step / 2, unheard={2, 3}) == []
    decisions = membership.tick(11.5, unheard={3})
    assert the(decisions, EndWorker).worker == 2


def test_who_forms_last_is_known_before() -> None:
    membership = made(2, formed=False)
    assert not membership.would_form(0, 0)
    membership.formed(0, 0, 0.0)
    assert membership.would_form(1, 0)
    assert not membership.would_form(1, 1)


def test_a_form_survives_the_wire() -> None:
    planned = MembershipView(
        generation=7, members=(0, 2), planned=True, holds=False, reason="replica 2 to join", after=6
    )
    assert MembershipView.from_json(planned.to_json()) == planned
    assert "stuck" in FROM_WORKERS
