"""Losses: the others go on at once, and replacements are taken in between two steps."""

from __future__ import annotations

from membership_scenes import form, join, made, only, quiet, the
from paceline.elastic.membership import EndWorker, GiveUp, StartReplica
from paceline.elastic.membership_messages import TOO_FEW, Finish, MembershipView


def test_a_loss_forms_a_generation_of_the_others_at_once_and_starts_a_replacement() -> None:
    decisions = made().lost([2], 1.0, reason="killed")
    formed = the(decisions, MembershipView)
    assert (formed.generation, formed.members, formed.planned, formed.holds) == (1, (0, 1, 3), False, False)
    assert the(decisions, StartReplica) == StartReplica(replica=2, workers=(2,))
    assert decisions.index(formed) < decisions.index(the(decisions, StartReplica))  # those who stand still come first


def test_two_lost_together_make_one_generation() -> None:
    decisions = made().lost([1, 2], 1.0, reason="a host is gone")
    assert the(decisions, MembershipView).members == (0, 3)
    assert [start.replica for start in only(decisions, StartReplica)] == [1, 2]


def test_a_loss_while_a_generation_forms_replaces_that_one() -> None:
    membership = made()
    membership.lost([1], 1.0, reason="killed")
    membership.formed(0, 1, 1.0)
    newer = the(membership.lost([3], 1.0, reason="killed"), MembershipView)
    assert (newer.generation, newer.members, newer.planned) == (2, (0, 2), False)
    assert membership.formed(2, 1, 1.0) == []  # of the old one: too late
    assert membership.formed(0, 1, 1.0) == []
    assert not membership.is_formed


def test_a_replica_is_replaced_once_however_often_its_loss_is_told() -> None:
    membership = made()
    assert len(only(membership.lost([1], 1.0, reason="killed"), StartReplica)) == 1
    membership.lost([2], 1.0, reason="killed")
    assert only(membership.tick(1.1), StartReplica) == []
    assert only(membership.lost([7], 1.2, reason="of nobody"), StartReplica) == []


def test_the_other_workers_of_a_lost_replica_are_ended_each_once() -> None:
    decisions = made(2, each=3).lost([1, 2], 1.0, reason="killed")
    assert [end.worker for end in only(decisions, EndWorker)] == [0]
    assert the(decisions, MembershipView).members == (3, 4, 5)


def test_three_members_lost_at_once_are_all_replaced() -> None:
    assert len(only(made(8).lost([1, 2, 3], 1.0, reason="killed"), StartReplica)) == 3


def test_a_newcomer_is_taken_in_between_two_steps() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    form(membership)
    planned = the(membership.ready(1, 2.0), MembershipView)
    assert (planned.members, planned.planned, planned.after) == ((0, 1), True, 1)
    assert not planned.interrupts(1)
    assert planned.interrupts(0)  # who has got no further goes over at once


def test_a_newcomer_waits_until_the_others_have_formed() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    assert membership.ready(1, 2.0) == []
    assert the(form(membership), MembershipView).members == (0, 1)


def test_newcomers_that_come_meanwhile_are_taken_in_by_the_next_generation() -> None:
    membership = made(4)
    membership.lost([1, 2], 1.0, reason="killed")
    form(membership)
    assert the(membership.ready(1, 2.0), MembershipView).members == (0, 1, 3)
    assert membership.ready(2, 2.0) == []
    assert the(form(membership), MembershipView).members == (0, 1, 2, 3)


def test_a_newcomer_lost_before_it_is_taken_in_interrupts_nobody() -> None:
    membership = made(3)
    membership.lost([2], 1.0, reason="killed")
    form(membership)
    membership.ready(2, 2.0)
    formed = the(membership.lost([2], 2.1, reason="killed"), MembershipView)
    assert (formed.members, formed.planned) == ((0, 1), True)
    assert not formed.interrupts(1)
    assert formed.interrupts(2)  # but workers that wait for it, or step with it already, stop


def test_a_newcomer_is_not_counted_on_when_a_member_is_lost_before_it_has_said_that_it_has_the_state() -> None:
    membership = made(3)
    membership.lost([2], 1.0, reason="killed")
    form(membership)
    membership.ready(2, 2.0)
    membership.formed(0, 2, 2.1)
    formed = the(membership.lost([1], 2.2, reason="killed"), MembershipView)
    assert (formed.members, formed.planned) == ((0,), False)
    assert 2 in membership.left_out  # it has to hear of it
    form(membership)
    assert membership.generation == 3  # and to say that it has no state, before it is taken in again
    assert membership.ready(2, 2.3, generation=2) == []  # said before it knew
    assert the(membership.ready(2, 2.4, generation=3), MembershipView).members == (0, 2)


def test_a_newcomer_that_has_said_that_it_has_the_state_is_counted_on() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    form(membership)
    membership.ready(1, 2.0)
    membership.formed(1, 2, 2.1)
    formed = the(membership.lost([0], 2.2, reason="killed"), MembershipView)
    assert (formed.members, formed.planned) == ((1,), False)


def test_where_nobody_is_known_to_have_the_state_those_are_asked_who_may() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    form(membership)
    membership.ready(1, 2.0)
    formed = the(membership.lost([0], 2.2, reason="killed"), MembershipView)
    assert (formed.members, formed.planned) == ((1,), False)
    assert only(membership.ready(1, 2.3, generation=formed.generation), GiveUp)


def test_a_newcomer_with_a_state_that_the_others_went_on_without_is_replaced_when_it_has_left() -> None:
    membership = made(3)
    membership.lost([2], 1.0, reason="killed")
    form(membership)
    membership.ready(2, 2.0)
    membership.lost([1], 2.2, reason="killed")
    assert the(membership.ended(2, 2.3), StartReplica).replica == 2


def test_when_nobody_is_left_the_run_is_given_up() -> None:
    assert only(made(2).lost([0, 1], 1.0, reason="the host is gone"), GiveUp)


def test_newcomers_alone_cannot_go_on() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    membership.ready(1, 1.5)
    assert only(membership.lost([0], 2.0, reason="killed"), GiveUp)


def test_below_the_least_the_others_wait_and_end_after_their_patience() -> None:
    membership = made(2, least=2)
    assert the(membership.lost([1], 1.0, reason="killed"), MembershipView).holds
    form(membership, now=1.0)
    assert quiet(membership, until=60.9) == []
    finish = the(quiet(membership, until=61.5), Finish)
    assert finish.exit_code == TOO_FEW
    assert "1 of at least 2 replicas" in finish.reason


def test_patience_does_not_begin_anew_with_each_newcomer_that_is_lost() -> None:
    membership = made(2, least=2)
    membership.lost([1], 0.0, reason="killed")
    form(membership, now=0.0)
    for now in (10, 20, 30, 40, 50):
        membership.ready(1, now)
        membership.lost([1], now + 1, reason="killed")
        form(membership, now=now + 1)
        quiet(membership, until=now + 9)
    assert the(quiet(membership, until=62), Finish).exit_code == TOO_FEW


def test_enough_replicas_again_end_the_wait() -> None:
    membership = made(2, least=2)
    membership.lost([1], 1.0, reason="killed")
    form(membership)
    assert not join(membership, 1).holds
    assert only(quiet(membership, until=200.0), Finish) == []
