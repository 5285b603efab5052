"""What the other hosts do, without a process: fake local workers, a fake coordinator."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from fake_hosts import MemberAndHead, ended, heard, told
from paceline.elastic.lease import seconds_since_boot
from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW
from paceline.launch.coordinator.job_end import TERMINATE_S
from paceline.launch.coordinator.remote_hosts import SILENCE_S
from paceline.launch.job.outcome import JobOutcome


@pytest.fixture
def pair() -> Iterator[MemberAndHead]:
    with closing(MemberAndHead()) as made:
        yield made


def test_what_the_head_says_before_there_are_workers_is_done_later(pair: MemberAndHead) -> None:
    pair.head.send({"op": "kill_worker", "worker": 2})
    pair.head.send({"op": "stop", "grace_s": 3.0})
    pair.loop.turn(1.0)
    assert pair.local_workers.told == []
    pair.lead()
    assert pair.local_workers.told == [("kill_worker", 2), ("terminate", 3.0)]


def test_a_silent_head_is_lost_and_the_workers_are_ended(pair: MemberAndHead) -> None:
    pair.lead()
    now = time.monotonic()
    pair.member.tick(now + SILENCE_S - 1)
    assert pair.local_workers.told == []
    pair.member.tick(now + SILENCE_S + 1)
    assert pair.local_workers.told == [("terminate", TERMINATE_S)]
    assert pair.said == ["the coordinator a (10.0.0.1) was lost: it sent nothing for 15 s"]
    pair.local_workers.alive.clear()
    pair.member.exited(ended(2, None, sent_by_us=True))
    pair.member.tick(now + SILENCE_S + 2)
    assert pair.member.outcome is not None
    assert (pair.member.outcome.state, pair.member.outcome.reason) == ("failed", pair.said[0])
    assert pair.member.outcome.exit_code == TOO_FEW, "the same command may come to its end"


def test_after_its_first_answer_a_silent_head_is_lost_half_as_late_again_as_it_would_lose_this_host() -> None:
    with closing(MemberAndHead(silence_s=4.0)) as pair:
        pair.lead()
        pair.member.tick(time.monotonic() + SILENCE_S - 1)  # it prepares its directory first
        pair.head.send({"op": "ping", "asked": seconds_since_boot(), "for_s": 48.0})
        pair.loop.turn(1.0)
        now = time.monotonic()
        pair.member.tick(now + 5)
        assert pair.said == []
        pair.member.tick(now + 7)
        assert pair.said == ["the coordinator a (10.0.0.1) was lost: it sent nothing for 6 s"]


def test_workers_are_told_how_long_they_may_go_on_counted_from_the_word_that_the_head_has_answered(
    pair: MemberAndHead,
) -> None:
    pair.lead()
    pair.member.started(2, 11)
    assert pair.local_workers.told == [], "the first answer is still to come, and nobody takes steps before it"
    before = seconds_since_boot()
    pair.member.tick(time.monotonic())
    asked = next(message["asked"] for message in heard(pair.head) if message["op"] == "ping")
    assert before <= asked <= seconds_since_boot()
    pair.head.send({"op": "ping", "asked": asked, "for_s": 48.0})
    pair.loop.turn(1.0)
    pair.member.started(2, 12)  # it has begun since
    until = (2, {"op": "until", "until": asked + 48.0})
    assert pair.local_workers.told == [until, until]


def test_a_call_that_the_lost_head_has_not_answered_ends_and_is_not_waited_for(pair: MemberAndHead) -> None:
    pair.lead()
    pair.member.request(2, {"op": "begun", "step": 0})
    for number in (5, 6):
        pair.member.request(2, {"op": "check", "id": number, "keys": ["a"]})
    pair.head.send({"op": "tell", "worker": 2, "message": {"id": 5, "value": True}})
    pair.loop.turn(1.0)
    pair.local_workers.told.clear()
    pair.head.close()
    pair.loop.turn(1.0)
    pair.member.request(2, {"op": "check", "id": 7, "keys": ["a"]})
    answers = [message for _, message in pair.local_workers.told if "id" in message]
    assert [message["id"] for message in answers] == [6, 7]
    assert all("was lost" in message["closed"] for message in answers)
    assert {"op": "finish"}.items() <= pair.local_workers.told[1][1].items(), "and they are asked to save and leave"


def test_a_signal_to_a_member_is_told_to_the_head(pair: MemberAndHead) -> None:
    pair.lead()
    pair.member.interrupted(signal.SIGHUP)
    assert told(pair.head) == {"op": "leaving", "signal": int(signal.SIGHUP), "reason": ""}
    pair.member.interrupted(signal.SIGHUP)
    assert pair.local_workers.told == ["kill"], "the first one is for the coordinator to decide on"


LEFT: dict[str, Any] = {"op": "end", "outcome": JobOutcome(state="stopped", exit_code=PREEMPTED).to_json()}


@pytest.mark.parametrize(("again", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_kills_the_workers_that_are_leaving_and_the_exit_status_says_so(
    pair: MemberAndHead, again: signal.Signals, exit_code: int
) -> None:
    pair.lead()
    pair.member.interrupted(signal.SIGTERM)
    pair.member.interrupted(again)
    assert pair.local_workers.told == ["kill"]
    assert told(pair.head)["op"] == "leaving"
    assert told(pair.head) == {"op": "leaving", "signal": int(again), "reason": "", "at_once": True}
    pair.head.send(LEFT)
    pair.loop.turn(1.0)
    assert pair.member.outcome is not None
    assert (pair.member.outcome.state, pair.member.outcome.exit_code) == ("stopped", exit_code)


def test_a_second_signal_when_the_workers_have_left_already_changes_nothing(pair: MemberAndHead) -> None:
    pair.lead()
    pair.member.interrupted(signal.SIGTERM)
    pair.local_workers.alive.clear()
    pair.member.interrupted(signal.SIGTERM)
    pair.head.send(LEFT)
    pair.loop.turn(1.0)
    assert pair.member.outcome is not None and pair.member.outcome.exit_code == PREEMPTED


def test_a_signal_while_workers_save_because_the_head_was_lost_ends_them_at_once(pair: MemberAndHead) -> None:
    pair.lead()
    pair.member.request(2, {"op": "begun"})
    pair.head.close()
    pair.loop.turn(1.0)
    pair.member.interrupted(signal.SIGTERM)
    assert pair.local_workers.told[-1] == "kill"
    pair.member.exited(ended(2, None, signal=9, sent_by_us=True))
    pair.local_workers.alive.clear()
    pair.member.tick(time.monotonic())
    assert pair.member.outcome is not None
    assert (pair.member.outcome.state, pair.member.outcome.exit_code) == ("stopped", 143)


def test_a_host_that_came_later_and_has_no_workers_ends_when_the_head_is_lost(pair: MemberAndHead) -> None:
    pair.local_workers.alive.clear()
    pair.lead()
    pair.head.close()
    pair.loop.turn(1.0)
    pair.member.tick(time.monotonic())
    assert pair.member.outcome is not None
    assert (pair.member.outcome.state, pair.member.outcome.exit_code) == ("failed", TOO_FEW)


def test_workers_that_were_lost_and_replaced_before_the_head_was_lost_do_not_spoil_a_good_end(
    pair: MemberAndHead,
) -> None:
    pair.lead()
    pair.member.request(2, {"op": "begun"})
    pair.member.exited(ended(2, None, signal=9))
    pair.head.close()
    pair.loop.turn(1.0)
    pair.member.exited(ended(2, PREEMPTED))
    pair.local_workers.alive.clear()
    pair.member.tick(time.monotonic())
    assert pair.member.outcome is not None
    assert (pair.member.outcome.state, pair.member.outcome.exit_code) == ("stopped", PREEMPTED)


def test_an_error_of_the_program_counts_also_when_the_head_is_lost_after_it(pair: MemberAndHead) -> None:
    pair.lead()
    pair.member.request(2, {"op": "begun"})
    pair.member.exited(ended(2, 1))
    pair.head.close()
    pair.loop.turn(1.0)
    pair.local_workers.alive.clear()
    pair.member.tick(time.monotonic())
    assert pair.member.outcome is not None
    assert (pair.member.outcome.state, pair.member.outcome.exit_code) == ("failed", 1)


def test_a_host_looks_out_for_workers_that_it_is_given_later(pair: MemberAndHead) -> None:
    pair.lead()
    pair.head.send({"op": "start", "worker": 7, "workers": 8, "incarnation": 1})
    pair.loop.turn(1.0)
    assert pair.member.here == {2, 7}
    assert pair.local_workers.told == [("add", 7, 8)]
