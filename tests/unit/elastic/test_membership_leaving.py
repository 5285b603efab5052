"""Who is asked to leave, and how a run ends."""

from __future__ import annotations

import dataclasses

from membership_scenes import form, join, made, only, the, ticked
from paceline.elastic.membership import EndWorker, GiveUp, StartReplica
from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW, Finish, MembershipView


def test_who_is_asked_to_leave_goes_between_two_steps_and_is_not_replaced() -> None:
    membership = made(3)
    decisions = membership.leaving(1, 1.0)
    formed = the(decisions, MembershipView)
    assert (formed.members, formed.planned) == ((0, 2), True)
    assert membership.left_out == {1}
    assert membership.ended(1, 1.1) == [dataclasses.replace(formed, after=-1)]  # all have agreed: nobody waits for it
    form(membership)
    assert only(membership.tick(1.2), StartReplica) == []
    assert membership.num_workers == 2


def test_asking_a_second_time_changes_nothing() -> None:
    membership = made(3, each=2)
    membership.leaving(2, 1.0)
    form(membership)
    assert membership.leaving(3, 1.1) == []


def test_who_leaves_while_a_generation_forms_leaves_with_the_next() -> None:
    membership = made(4)
    membership.lost([3], 1.0, reason="killed")
    assert membership.leaving(1, 1.0) == []
    assert membership.view.members == (0, 1, 2)
    assert the(form(membership), MembershipView).members == (0, 2)


def test_a_leaver_that_is_lost_within_a_step_interrupts_the_others() -> None:
    membership = made(3)
    membership.leaving(1, 1.0)
    formed = the(membership.lost([1], 1.1, reason="killed"), MembershipView)
    assert (formed.members, formed.planned) == ((0, 2), False)


def test_the_run_does_not_go_on_with_a_leaver_that_others_may_have_left() -> None:
    membership = made(3)
    membership.leaving(1, 1.0)
    assert the(membership.lost([2], 1.1, reason="killed"), MembershipView).members == (0,)
    assert 1 in membership.left_out


def test_when_too_few_would_stay_everything_is_saved() -> None:
    finish = the(made(2, least=2).leaving(0, 1.0), Finish)
    assert finish.exit_code == PREEMPTED


def test_when_only_those_are_left_who_were_asked_to_go_everything_is_saved() -> None:
    membership = made(2, formed=False)
    membership.leaving(1, 1.0)
    decisions = membership.lost([0], 1.1, reason="killed")
    assert the(decisions, MembershipView).members == (1,)
    assert the(decisions, Finish).exit_code == PREEMPTED


def test_half_a_replica_has_not_the_state() -> None:
    membership = made(2, each=2)
    membership.leaving(2, 1.0)
    membership.ended(2, 1.1)  # worker 3 is still there, but can do nothing alone
    assert only(membership.lost([0], 1.2, reason="killed"), GiveUp)


def test_a_newcomer_that_is_asked_to_leave_is_ended() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    assert the(membership.leaving(1, 1.1), EndWorker).worker == 1
    assert membership.num_workers == 1


def test_a_leaver_that_does_not_hear_of_it_is_told_again_once_the_others_stand() -> None:
    membership = made(3)
    planned = the(membership.leaving(1, 1.0), MembershipView)
    again = the(form(membership), MembershipView)
    assert (again.generation, again.members) == (planned.generation, planned.members)
    assert again.interrupts(0)
    assert membership.left_out == {1}


def test_who_has_come_to_its_end_is_not_counted_on_when_those_who_leave_are_told_again() -> None:
    membership = made(3)
    planned = the(membership.leaving(1, 1.0), MembershipView)
    assert planned.members == (0, 2)
    membership.formed(2, planned.generation, 1.1)
    assert membership.ended(2, 1.2) == []
    again = the(membership.formed(0, planned.generation, 1.3), MembershipView)
    assert (again.members, again.generation) == ((0,), planned.generation + 1)
    assert membership.left_out == {1}


def test_workers_that_are_asked_to_leave_together_go_with_one_generation() -> None:
    membership = made(4)
    decisions = membership.leave([1, 3], 1.0, reason="SIGTERM came on host b", room=0)
    formed = the(decisions, MembershipView)
    assert (formed.members, formed.planned, formed.holds) == ((0, 2), True, False)
    assert membership.left_out == {1, 3}
    form(membership)
    assert [membership.ended(worker, 1.2) for worker in (1, 3)] == [[], []]
    assert only(membership.tick(1.3), StartReplica) == []
    assert membership.target == 2


def test_the_least_is_judged_for_all_who_leave_together() -> None:
    finish = the(made(4, least=3).leave([2, 3], 1.0, reason="SIGTERM came on host b", room=0), Finish)
    assert (finish.exit_code, finish.reason) == (PREEMPTED, "SIGTERM came on host b")
    assert only(made(4, least=3).leave([3], 1.0, reason="SIGTERM came on host b", room=0), Finish) == []


def test_slots_elsewhere_keep_the_least_and_replace_those_who_leave() -> None:
    membership = made(3, least=3)
    decisions = membership.leave([1, 2], 1.0, reason="SIGTERM came on host b", room=2)
    formed = the(decisions, MembershipView)
    assert (formed.members, formed.holds) == ((0,), True)  # it waits for the others
    assert [start.workers for start in only(decisions, StartReplica)] == [(3,), (4,)]
    form(membership)
    for worker in (1, 2):
        membership.ended(worker, 1.1)
    assert join(membership, 3, 4).members == (0, 3, 4)
    assert not membership.view.holds


def test_replicas_with_one_worker_on_a_host_that_leaves_go_whole() -> None:
    membership = made(3, each=2)
    formed = the(membership.leave([1, 2], 1.0, reason="SIGTERM came on host b", room=0), MembershipView)
    assert formed.members == (4, 5)


def test_newcomers_on_a_host_that_leaves_are_ended_and_started_elsewhere() -> None:
    membership = made(3)
    membership.lost([2], 1.0, reason="killed")
    form(membership)
    decisions = membership.leave([1, 2], 1.1, reason="SIGTERM came on host b", room=1)
    assert the(decisions, EndWorker).worker == 2
    assert the(decisions, MembershipView).members == (0,)
    assert the(decisions, StartReplica).workers == (2,)
    assert membership.target == 2


def test_where_all_who_have_the_state_leave_it_is_saved_however_many_slots_are_free() -> None:
    membership = made(2)
    membership.grow(1, 1.0)
    decisions = membership.leave([0, 1], 1.1, reason="SIGTERM came on host b", room=5)
    assert the(decisions, Finish).exit_code == PREEMPTED


def test_finish_is_said_once_and_ends_who_is_not_in_yet() -> None:
    membership = made(3)
    membership.lost([1, 2], 1.0, reason="killed")
    form(membership)
    membership.ready(1, 1.1)
    decisions = membership.finish(PREEMPTED, "SIGTERM came")
    assert sorted(end.worker for end in only(decisions, EndWorker)) == [1, 2]
    assert the(decisions, MembershipView).members == (0,)
    assert the(decisions, Finish).exit_code == PREEMPTED
    assert membership.finish(TOO_FEW, "again") == []
    assert membership.workers == (0,)


def test_a_loss_while_the_run_ends_is_not_replaced_and_the_others_go_on_to_save() -> None:
    membership = made(3)
    membership.finish(PREEMPTED, "SIGTERM came")
    decisions = membership.lost([1], 1.0, reason="killed")
    assert the(decisions, MembershipView).members == (0, 2)
    assert only(decisions, StartReplica) == []


def test_when_the_first_program_is_at_its_end_nobody_is_replaced_or_missed() -> None:
    membership = made(2)
    assert membership.ended(0, 1.0) == []
    for now in range(2, 100):
        membership.heard(1, float(now))
        assert membership.tick(float(now)) == []
    decisions = membership.lost([1], 100.0, reason="killed")
    assert only(decisions, StartReplica) == []
    assert only(decisions, GiveUp)  # it had not come to its end


def test_what_a_program_does_behind_the_training_takes_as_long_as_it_takes() -> None:
    membership = made(3)
    assert membership.over(0, 1.0) == []
    assert ticked(membership, until=40.0, silent={0}) == []
    for worker in (1, 2):
        assert membership.over(worker, 40.0) == []
    assert ticked(membership, until=100.0, silent={0, 1, 2}) == []
    assert all(membership.is_over(worker) for worker in range(3))


def test_a_worker_whose_program_is_at_its_end_is_not_ended_with_the_rest_of_its_replica() -> None:
    membership = made(2, each=2)
    membership.over(0, 1.0)
    decisions = membership.lost([1], 1.1, reason="killed")
    assert only(decisions, EndWorker) == []
    assert the(decisions, MembershipView).members == (2, 3)


def test_who_is_over_is_missed_by_nobody_before_its_process_ends() -> None:
    membership = made(3)
    membership.leaving(2, 1.0)
    form(membership)
    assert membership.over(2, 1.1) == []
    assert membership.left_out == frozenset()
    assert membership.ended(2, 60.0) == []
    membership.lost([1], 61.0, reason="killed")
    membership.ready(1, 62.0)
    assert membership.over(1, 62.1) == [], "it has not the state: how its process ends tells more"
    assert not membership.is_over(1)


def test_who_has_ended_is_not_waited_for_by_those_who_regroup() -> None:
    membership = made(3)
    membership.lost([2], 1.0, reason="killed")
    assert the(membership.ended(0, 1.1), MembershipView).members == (1,)


def test_a_newcomer_that_comes_when_the_program_is_at_its_end_is_ended() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    form(membership)
    membership.ready(1, 1.1)
    assert [end.worker for end in only(membership.ended(0, 1.2), EndWorker)] == [1]
