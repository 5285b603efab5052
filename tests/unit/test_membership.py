from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from membership_world import World
from paceline.elastic.membership import Decision, EndWorker, GiveUp, Limits, Membership, StartReplica
from paceline.elastic.notices import FROM_WORKERS, PREEMPTED, TOO_FEW, Finish, Form

D = TypeVar("D", Form, StartReplica, EndWorker, Finish, GiveUp)

# ------------------------------------------------------------------------------------------------ scenarios, one by one


def made(replicas: int = 4, *, least: int = 1, most: int = 8, each: int = 1, formed: bool = True) -> Membership:
    """A membership whose generation 0 has formed, and has committed a step."""
    membership = Membership(Limits(least=least, most=most, workers_each=each), replicas=replicas, now=0.0)
    if formed:
        form(membership)
    return membership


def form(membership: Membership, *, besides: int | None = None, now: float = 0.0) -> list[Decision]:
    """All members of the newest generation join it; returns what the last one led to."""
    decisions: list[Decision] = []
    for worker in membership.form.members:
        if worker != besides:
            decisions += membership.formed(worker, membership.form.generation, now)
    return decisions


def only(decisions: list[Decision], kind: type[D]) -> list[D]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def the(decisions: list[Decision], kind: type[D]) -> D:
    found = only(decisions, kind)
    assert len(found) == 1, decisions
    return found[0]


def join(membership: Membership, *numbers: int) -> Form:
    """Replacements come to their first step, and are taken in; returns the generation with all of them, formed."""
    for number in numbers:
        membership.ready(number, 0.0)
    while not membership.is_formed:
        form(membership)
    assert set(numbers) <= set(membership.form.members)
    return membership.form


def test_a_loss_forms_a_generation_of_the_others_at_once_and_starts_a_replacement() -> None:
    decisions = made().lost([2], 1.0, reason="killed")
    formed = the(decisions, Form)
    assert (formed.generation, formed.members, formed.planned, formed.holds) == (1, (0, 1, 3), False, False)
    assert the(decisions, StartReplica) == StartReplica(replica=2, workers=(2,))
    assert decisions.index(formed) < decisions.index(the(decisions, StartReplica))  # those who stand still come first


def test_two_lost_together_make_one_generation() -> None:
    decisions = made().lost([1, 2], 1.0, reason="a host is gone")
    assert the(decisions, Form).members == (0, 3)
    assert [start.replica for start in only(decisions, StartReplica)] == [1, 2]


def test_a_loss_while_a_generation_forms_replaces_that_one() -> None:
    membership = made()
    membership.lost([1], 1.0, reason="killed")
    membership.formed(0, 1, 1.0)
    newer = the(membership.lost([3], 1.0, reason="killed"), Form)
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


def test_a_replica_lost_with_its_host_is_not_replaced_also_not_at_the_next_loss() -> None:
    membership = made()
    assert only(membership.lost([3], 1.0, reason="host gone", replace=False), StartReplica) == []
    starts = only(membership.lost([2], 2.0, reason="killed"), StartReplica)
    assert [start.replica for start in starts] == [2]
    assert membership.num_workers == 3


def test_the_other_workers_of_a_lost_replica_are_ended_each_once() -> None:
    decisions = made(2, each=3).lost([1, 2], 1.0, reason="killed")
    assert [end.worker for end in only(decisions, EndWorker)] == [0]
    assert the(decisions, Form).members == (3, 4, 5)


def test_a_newcomer_is_taken_in_between_two_steps() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    form(membership)
    planned = the(membership.ready(1, 2.0), Form)
    assert (planned.members, planned.planned, planned.after) == ((0, 1), True, 1)
    assert not planned.interrupts(1)
    assert planned.interrupts(0)  # who has got no further goes over at once


def test_a_newcomer_waits_until_the_others_have_formed() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    assert membership.ready(1, 2.0) == []
    assert the(form(membership), Form).members == (0, 1)


def test_newcomers_that_come_meanwhile_are_taken_in_by_the_next_generation() -> None:
    membership = made(4)
    membership.lost([1, 2], 1.0, reason="killed")
    form(membership)
    assert the(membership.ready(1, 2.0), Form).members == (0, 1, 3)
    assert membership.ready(2, 2.0) == []
    assert the(form(membership), Form).members == (0, 1, 2, 3)


def test_a_newcomer_lost_before_it_is_taken_in_interrupts_nobody() -> None:
    membership = made(3)
    membership.lost([2], 1.0, reason="killed")
    form(membership)
    membership.ready(2, 2.0)
    formed = the(membership.lost([2], 2.1, reason="killed"), Form)
    assert (formed.members, formed.planned) == ((0, 1), True)
    assert not formed.interrupts(1)
    assert formed.interrupts(2)  # but whoever waits for it, or steps with it already, does so no longer


def test_a_newcomer_is_not_counted_on_when_a_member_is_lost_before_it_has_said_that_it_has_the_state() -> None:
    membership = made(3)
    membership.lost([2], 1.0, reason="killed")
    form(membership)
    membership.ready(2, 2.0)
    membership.formed(0, 2, 2.1)
    formed = the(membership.lost([1], 2.2, reason="killed"), Form)
    assert (formed.members, formed.planned) == ((0,), False)
    assert 2 in membership.left_out  # it has to hear of it
    form(membership)
    assert membership.generation == 3  # and to say that it has no state, before it is taken in again
    assert membership.ready(2, 2.3, generation=2) == []  # said before it knew
    assert the(membership.ready(2, 2.4, generation=3), Form).members == (0, 2)


def test_a_newcomer_that_has_said_that_it_has_the_state_is_counted_on() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    form(membership)
    membership.ready(1, 2.0)
    membership.formed(1, 2, 2.1)
    formed = the(membership.lost([0], 2.2, reason="killed"), Form)
    assert (formed.members, formed.planned) == ((1,), False)


def test_where_nobody_is_known_to_have_the_state_those_are_asked_who_may() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    form(membership)
    membership.ready(1, 2.0)
    formed = the(membership.lost([0], 2.2, reason="killed"), Form)
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
    assert the(membership.lost([1], 1.0, reason="killed"), Form).holds
    form(membership, now=1.0)
    assert quiet(membership, until=60.9) == []
    finish = the(quiet(membership, until=61.5), Finish)
    assert finish.exit_code == TOO_FEW
    assert "1 of at least 2 replicas" in finish.reason


def test_patience_does_not_begin_anew_with_each_newcomer_that_dies() -> None:
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


def quiet(membership: Membership, *, until: float) -> list[Decision]:
    """Time passes in small steps, and all workers say that they are alive; returns all decisions."""
    decisions: list[Decision] = []
    now = membership._now  # pyright: ignore[reportPrivateUsage]
    while now < until:
        now = min(until, now + 0.5)
        for worker in membership.workers:
            membership.heard(worker, now)
        decisions += membership.tick(now)
    return decisions


def test_who_is_asked_to_leave_goes_between_two_steps_and_is_not_replaced() -> None:
    membership = made(3)
    decisions = membership.leaving(1, 1.0)
    formed = the(decisions, Form)
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
    assert membership.form.members == (0, 1, 2)
    assert the(form(membership), Form).members == (0, 2)


def test_a_leaver_that_dies_within_a_step_interrupts_the_others() -> None:
    membership = made(3)
    membership.leaving(1, 1.0)
    formed = the(membership.lost([1], 1.1, reason="killed"), Form)
    assert (formed.members, formed.planned) == ((0, 2), False)


def test_a_leaver_whom_the_others_may_have_left_behind_is_not_gone_on_with() -> None:
    membership = made(3)
    membership.leaving(1, 1.0)
    assert the(membership.lost([2], 1.1, reason="killed"), Form).members == (0,)
    assert 1 in membership.left_out


def test_when_too_few_would_stay_everything_is_saved() -> None:
    finish = the(made(2, least=2).leaving(0, 1.0), Finish)
    assert finish.exit_code == PREEMPTED


def test_when_only_those_are_left_who_were_asked_to_go_everything_is_saved() -> None:
    membership = made(2, formed=False)
    membership.leaving(1, 1.0)
    decisions = membership.lost([0], 1.1, reason="killed")
    assert the(decisions, Form).members == (1,)
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
    planned = the(membership.leaving(1, 1.0), Form)
    again = the(form(membership), Form)
    assert (again.generation, again.members) == (planned.generation, planned.members)
    assert again.interrupts(0)
    assert membership.left_out == {1}


def test_resize_starts_what_is_missing_and_lets_the_highest_go() -> None:
    membership = made(2)
    assert [start.replica for start in only(membership.resize(4, 1.0), StartReplica)] == [2, 3]
    join(membership, 2, 3)
    assert the(membership.resize(2, 2.0), Form).members == (0, 1)
    assert membership.left_out == {2, 3}


def test_resize_ends_newcomers_before_it_sends_members_away() -> None:
    membership = made(3)
    membership.lost([0], 1.0, reason="killed")
    form(membership)
    membership.ready(0, 1.1)  # being taken in
    membership.resize(4, 1.2)  # and another one on its way
    decisions = membership.resize(2, 1.3)
    assert sorted(end.worker for end in only(decisions, EndWorker)) == [0, 3]
    formed = the(decisions, Form)
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


def test_a_run_that_ends_cannot_be_resized() -> None:
    membership = made(4)
    membership.finish(PREEMPTED, "asked")
    with pytest.raises(ValueError, match="about to end"):
        membership.resize(2, 1.0)


def test_finish_is_said_once_and_ends_who_is_not_in_yet() -> None:
    membership = made(3)
    membership.lost([1, 2], 1.0, reason="killed")
    form(membership)
    membership.ready(1, 1.1)
    decisions = membership.finish(PREEMPTED, "SIGTERM came")
    assert sorted(end.worker for end in only(decisions, EndWorker)) == [1, 2]
    assert the(decisions, Form).members == (0,)
    assert the(decisions, Finish).exit_code == PREEMPTED
    assert membership.finish(TOO_FEW, "again") == []
    assert membership.workers == (0,)


def test_a_loss_while_the_run_ends_is_not_replaced_and_the_others_go_on_to_save() -> None:
    membership = made(3)
    membership.finish(PREEMPTED, "SIGTERM came")
    decisions = membership.lost([1], 1.0, reason="killed")
    assert the(decisions, Form).members == (0, 2)
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


def test_who_has_ended_is_not_waited_for_by_those_who_regroup() -> None:
    membership = made(3)
    membership.lost([2], 1.0, reason="killed")
    assert the(membership.ended(0, 1.1), Form).members == (1,)


def test_a_newcomer_that_comes_when_the_program_is_at_its_end_is_ended() -> None:
    membership = made(2)
    membership.lost([1], 1.0, reason="killed")
    form(membership)
    membership.ready(1, 1.1)
    assert [end.worker for end in only(membership.ended(0, 1.2), EndWorker)] == [1]


def ticked(membership: Membership, *, until: float, silent: set[int]) -> list[Decision]:
    decisions: list[Decision] = []
    now = 0.0
    while now < until and not decisions:
        now += 0.5
        for worker in set(membership.workers) - silent:
            membership.heard(worker, now)
        decisions = membership.tick(now)
    return decisions


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
    assert bool(only(decisions, Form)) == (state != "newcomer on its way")


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
    decisions = ticked(membership, until=30.0, silent=set())
    assert the(decisions, EndWorker).worker == 1
    assert the(decisions, Form).members == (0, 2)


def test_when_all_are_late_they_try_again_and_then_one_is_given_up() -> None:
    membership = made(4)
    membership.lost([3], 0.0, reason="killed")
    again = the(ticked(membership, until=30.0, silent=set()), Form)
    assert (again.members, again.planned) == ((0, 1, 2), False)
    decisions = quiet(membership, until=45.0)
    assert the(decisions, EndWorker).worker == 2
    assert the(decisions, Form).members == (0, 1)


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
    again = the(membership.tick(2.0), Form)
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
    ("reports", "guilty"),
    [
        ({0: 1, 2: 1, 3: 1}, 1),  # most point at it
        ({0: None, 1: None}, 1),  # the highest of those who are stuck
        ({0: 3, 3: 0}, 3),  # at each other
    ],
)
def test_a_connection_that_breaks_again_costs_the_one_that_most_point_at(
    reports: dict[int, int | None], guilty: int
) -> None:
    membership = made(4)
    for generation in (0, 1):
        for worker, peer in reports.items():
            membership.stuck(worker, generation, generation * 1.0, peer=peer)
        decisions = membership.tick(generation + 1.0)
    assert [end.worker for end in only(decisions, EndWorker)] == [guilty]
    assert guilty not in the(decisions, Form).members


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
            assert (the(decisions, Form).members, only(decisions, EndWorker)) == ((1, 2), [])
            form(membership)
            membership.committed(1, 3.5)
            membership.ready(0, 3.5, generation=membership.generation)
    assert the(decisions, EndWorker).worker == 0
    assert the(decisions, Form).planned


def test_who_is_stuck_before_a_planned_generation_is_not_forgotten_by_it() -> None:
    membership = made(3)
    membership.stuck(1, 0, 1.0, peer=0)
    membership.leaving(2, 1.1)
    assert not the(membership.tick(2.1), Form).planned


def test_replacements_that_keep_dying_are_started_with_pauses_but_never_given_up() -> None:
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


def test_three_members_lost_at_once_are_all_replaced() -> None:
    assert len(only(made(8).lost([1, 2, 3], 1.0, reason="killed"), StartReplica)) == 3


def test_who_forms_last_is_known_before() -> None:
    membership = made(2, formed=False)
    assert not membership.would_form(0, 0)
    membership.formed(0, 0, 0.0)
    assert membership.would_form(1, 0)
    assert not membership.would_form(1, 1)


def test_a_form_survives_the_wire() -> None:
    planned = Form(generation=7, members=(0, 2), planned=True, holds=False, reason="replica 2 to join", after=6)
    assert Form.from_json(planned.to_json()) == planned
    assert "stuck" in FROM_WORKERS


# ------------------------------------------------------------------------------------- a world with faults in any order

FAULTS: dict[str, Callable[[World, int, int], None]] = {
    "kill": lambda world, one, other: world.kill(one),
    "kill, and what it said last is lost": lambda world, one, other: world.kill(one, loses_words=True),
    "kill two": lambda world, one, other: world.kill(one, other),
    "stop": lambda world, one, other: world.stop(one),
    "wake all": lambda world, one, other: world.wake_all(),
    "cut off from the head": lambda world, one, other: world.cut_off(one),
    "cut a link": lambda world, one, other: world.cut_link(one, other, for_good=False),
    "cut a link for good": lambda world, one, other: world.cut_link(one, other, for_good=True),
    "ask to leave": lambda world, one, other: world.ask_to_leave(one),
    "resize": lambda world, one, other: world.resize(1 + other % world.limits.most),
    "finish": lambda world, one, other: world.finish(),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    after: int  # so many things have happened since the last one
    name: str
    one: int
    other: int

    def happen(self, world: World) -> None:
        world.run(self.after)
        ranks = sorted(world.workers)
        if ranks and not world.is_ended:
            FAULTS[self.name](world, ranks[self.one % len(ranks)], ranks[self.other % len(ranks)])


faults = st.builds(
    Fault,
    after=st.integers(0, 120),
    name=st.sampled_from(sorted(FAULTS)),
    one=st.integers(0, 9),
    other=st.integers(0, 9),
)


@settings(max_examples=600)
@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 5),
    least=st.integers(1, 3),
    each=st.sampled_from([1, 1, 2]),
    walks=st.integers(1, 2),
    notices_gone=st.booleans(),
    last_step=st.sampled_from([1_000_000, 1_000_000, 15, 30]),
    programme=st.lists(faults, max_size=8),
)
def test_whatever_happens_every_step_is_committed_once_by_one_generation_and_steps_go_on(
    seed: int,
    replicas: int,
    least: int,
    each: int,
    walks: int,
    notices_gone: bool,
    last_step: int,
    programme: list[Fault],
) -> None:
    limits = Limits(least=min(least, replicas), most=5, workers_each=each)
    world = World(
        limits, replicas=replicas, seed=seed, walks=walks, notices_gone=notices_gone, last_step=last_step
    )  # `World` itself refuses a step that is committed twice, or left out, and a run that is given up without need
    for fault in programme:
        fault.happen(world)
    world.wake_all()
    world.mend_links()
    goal = len(world.steps) + 3
    world.go_on_until(lambda: len(world.steps) >= goal or world.is_ended)
    event("given up" if world.given_up else "ended" if world.is_ended else "goes on")
    if world.is_ended and not world.given_up and world.membership.ending is not None and world.num_killed == 0:
        assert world.saved == len(world.steps) or len(world.steps) == last_step


@pytest.mark.parametrize("seed", range(20))
def test_after_many_losses_the_run_is_back_to_all_its_replicas(seed: int) -> None:
    world = World(Limits(least=1, most=4), replicas=4, seed=seed)
    for _ in range(10):
        world.run(150)
        members = [rank for rank, worker in world.workers.items() if worker.position is not None and worker.is_alive]
        if len(members) > 1:
            world.kill(world.random.choice(members))
    goal = len(world.steps) + 5
    world.go_on_until(lambda: len(world.steps) >= goal and len(world.membership.form.members) == 4)
    assert not world.given_up
    assert world.membership.form.members == (0, 1, 2, 3)


@pytest.mark.parametrize("seed", range(20))
def test_a_host_that_was_cut_off_and_comes_back_to_life_commits_nothing_of_its_own(seed: int) -> None:
    world = World(Limits(least=1, most=4), replicas=4, seed=seed)
    world.run(100)
    for rank in (2, 3):
        world.cut_off(rank)
        world.stop(rank)
    cut = [world.workers[2], world.workers[3]]
    world.go_on_until(lambda: world.membership.num_members == 4 and len(world.past) == 2)
    steps = len(world.steps)
    world.wake_all()
    world.go_on_until(lambda: len(world.steps) >= steps + 5)
    assert all(len(worker.committed) <= steps for worker in cut)
    assert all(worker.is_alive for worker in cut)  # nothing reached them: it is the vote that keeps them from it


@pytest.mark.parametrize("seed", range(20))
def test_everybody_who_is_asked_to_leave_has_saved_the_last_step(seed: int) -> None:
    world = World(Limits(least=2, most=4), replicas=4, seed=seed)
    world.run(100)
    for rank in (3, 1, 0, 2):
        world.ask_to_leave(rank)
    world.go_on_until(lambda: world.is_ended)
    assert not world.given_up
    assert world.saved == len(world.steps) > 0
