"""All workers restart on several hosts: what the coordinator waits for and requests, and what the hosts answer."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from fake_hosts import HeadAndMember, MemberAndHead, ended, heard, told
from paceline.elastic.lease import lease_s, lost_s
from paceline.elastic.membership_messages import TOO_FEW
from paceline.events import Restarted
from paceline.launch.job.outcome import JobOutcome, RecoverableLoss
from paceline.launch.job.restart_plan import RemainingHost, RestartPlan, StoredSnapshot

SILENCE_S, GRACE_S = 60.0, 20.0
STOCK = (StoredSnapshot(worker=2, step=10), StoredSnapshot(worker=0, step=10, is_copy=True))


@pytest.fixture
def both() -> Iterator[HeadAndMember]:
    """Workers 0 and 1 on the coordinator's host, worker 2 on another host, running, with snapshots in memory."""
    with closing(HeadAndMember(patience_s=60.0)) as made:
        for worker in range(3):
            made.notice(worker, "begun")
            made.notice(worker, "keeps")
        yield made


def lose_host(both: HeadAndMember) -> None:
    """The other host is lost, and the coordinator's own workers have been ended."""
    both.member.close()
    both.loop.turn(1.0)
    assert both.local_workers.told[-1] == "kill"
    for worker in (0, 1):
        both.head.exited(ended(worker, None, signal=9, sent_by_us=True))
    both.local_workers.have_all_ended = True


def gone(both: HeadAndMember, index: int, *workers: int, snapshots: tuple[StoredSnapshot, ...] = ()) -> dict[str, Any]:
    left = RemainingHost(index=index, slots=1, workers=workers, snapshots=snapshots)
    return {"op": "gone", "left": left.to_json()}


def outcome_of(both: HeadAndMember) -> JobOutcome:
    both.head.tick(time.monotonic())
    assert both.head.outcome is not None
    return both.head.outcome


def test_a_lost_worker_has_all_hosts_end_theirs_and_say_what_they_have(both: HeadAndMember) -> None:
    both.head.exited(ended(1, None, signal=9, pid=11))
    assert both.local_workers.told[-1] == "kill" and both.ops() == ["again"]
    both.head.exited(ended(0, None, signal=9, sent_by_us=True))
    both.local_workers.have_all_ended = True
    both.say(op="exited", exit=dataclasses.asdict(ended(2, None, host="b", signal=9, sent_by_us=True)))
    assert both.state() == "going on"  # a process of the other host may still be there
    both.member._sock.setblocking(True)
    both.say(**gone(both, 1, 2, snapshots=STOCK))
    recoverable_loss = outcome_of(both).recoverable_loss
    left = (
        RemainingHost(index=0, slots=2, workers=(0, 1)),
        RemainingHost(index=1, slots=1, workers=(2,), snapshots=STOCK),
    )
    causes = ("worker 1 (pid 11) killed by signal 9",)
    assert recoverable_loss == RecoverableLoss(causes=causes, lost=(1,), workers=3, hosts=left)


def test_a_lost_hosts_place_is_taken_by_one_that_comes(both: HeadAndMember) -> None:
    lose_host(both)
    assert both.state() == "going on"
    assert both.said[-1].startswith("the hosts that are left have room for 2 of the 3 workers: waiting up to 60 s")
    assert both.head.refusal() is None
    remote_host, other = both.come("c", index=2)
    both.head.join(remote_host)
    assert both.said[-1] == "host c (10.0.0.3) has come" and told(other) == {"op": "again"}
    assert both.state() == "going on" and len(both.said) == 3
    other.send(gone(both, 2))
    both.loop.turn(1.0)
    recoverable_loss = outcome_of(both).recoverable_loss
    assert (
        recoverable_loss is not None
        and [host.index for host in recoverable_loss.hosts] == [0, 2]
        and recoverable_loss.workers == 3
    )


def test_where_no_host_comes_the_job_ends_as_it_would_have(both: HeadAndMember) -> None:
    lose_host(both)
    assert both.state() == "going on"
    both.head.tick(time.monotonic() + 61)
    assert both.head.outcome is not None
    assert (both.head.outcome.exit_code, both.head.outcome.may_restart) == (TOO_FEW, False)
    assert both.said[-2] == "no host has joined within 60 s in place of the lost one: the run ends"
    assert both.said[-1].startswith("host b (10.0.0.2) was lost: ") and "nothing was saved" in both.said[-1]


def test_ctrl_c_while_a_host_is_waited_for_ends_the_job(both: HeadAndMember) -> None:
    lose_host(both)
    assert both.state() == "going on"
    both.head.interrupted(signal.SIGINT)
    outcome = outcome_of(both)
    assert (outcome.exit_code, outcome.may_restart) == (130, False)


def test_without_snapshots_a_lost_host_ends_the_job_at_once() -> None:
    with closing(HeadAndMember()) as both:
        for worker in range(3):
            both.notice(worker, "begun")
        both.member.close()
        both.loop.turn(1.0)
        assert "kill" not in both.local_workers.told
        for worker in (0, 1):
            both.head.exited(ended(worker, None, sent_by_us=True))
        assert both.state() == "failed"


def test_a_host_that_does_not_end_its_workers_is_lost_too(both: HeadAndMember) -> None:
    both.head.exited(ended(1, None, signal=9))
    both.head.exited(ended(0, None, signal=9, sent_by_us=True))
    both.local_workers.have_all_ended = True
    both.head.tick(time.monotonic() + 5)
    assert "host b (10.0.0.2) was lost: it was told to end its workers and did not report their ends" in both.said
    assert both.said[-1].startswith("the hosts that are left have room for 2 of the 3 workers")


def lose_own_workers(both: HeadAndMember) -> None:
    for worker in (0, 1):
        both.head.exited(ended(worker, None, signal=9))


def lose_connection(both: HeadAndMember) -> None:
    both.member.close()
    both.loop.turn(1.0)


def end_successors(both: HeadAndMember) -> None:
    """Those that were on their way."""
    both.local_workers.have_all_ended = True
    for worker in (0, 1):
        both.head.exited(ended(worker, None, signal=9, sent_by_us=True))


def test_an_elastic_run_begins_again_with_as_many_replicas_as_there_is_room_for() -> None:
    """At once: what the lost host's worker could go on with, needs the votes of those that have ended here."""
    with closing(HeadAndMember(silence_s=SILENCE_S)) as both:
        both.begin(least=1, most=3)
        both.notice(0, "keeps")
        lose_connection(both)
        lose_own_workers(both)
        end_successors(both)
        recoverable_loss = outcome_of(both).recoverable_loss
        assert recoverable_loss is not None and (
            recoverable_loss.workers,
            recoverable_loss.workers_each,
            recoverable_loss.least,
        ) == (2, 1, 1)


@pytest.mark.parametrize("keeps", [False, True])
def test_while_a_lost_host_may_go_on_by_itself_nobody_begins_again(keeps: bool) -> None:
    """Worker 2 was told that it is alone before its host was lost. Without snapshots it is waited for as well: the
    command may be started again as soon as it has ended."""
    with closing(HeadAndMember(silence_s=SILENCE_S, grace_s=GRACE_S)) as both:
        both.begin(least=1, most=3)
        if keeps:
            both.notice(0, "keeps")
        lose_own_workers(both)
        lose_connection(both)
        began = time.monotonic()
        end_successors(both)
        limit_s = lost_s(SILENCE_S, GRACE_S)
        both.head.tick(began + limit_s - 1)
        assert both.head.outcome is None
        assert both.said[-1].startswith("workers on unreachable hosts may still be taking steps: waiting ")
        assert both.head.refusal() == ("the run is about to end", True)
        both.head.tick(began + limit_s + 1)
        assert both.head.outcome is not None and both.head.outcome.exit_code == TOO_FEW
        assert (both.head.outcome.recoverable_loss is not None) == keeps


def test_a_host_that_says_nothing_is_waited_for_from_its_last_word_on() -> None:
    with closing(HeadAndMember(silence_s=SILENCE_S, grace_s=GRACE_S)) as both:
        both.begin(least=1, most=3)
        both.notice(0, "keeps")
        both.say(op="ping", asked=1234.5)
        assert heard(both.member) == [{"op": "ping", "asked": 1234.5, "for_s": lease_s(SILENCE_S, GRACE_S)}]
        lose_own_workers(both)
        word = both.remote_host.link.last_received
        both.remote_host.link.last_received -= SILENCE_S + 1
        both.head.tick(time.monotonic())
        assert both.said == ["host b (10.0.0.2) was lost: it sent nothing for 60 s"]
        end_successors(both)
        both.head.tick(word - SILENCE_S - 1 + lost_s(SILENCE_S, GRACE_S) + 0.5)
        assert both.head.outcome is not None and both.head.outcome.recoverable_loss is not None


def test_ctrl_c_while_a_lost_host_is_waited_for_ends_the_job() -> None:
    with closing(HeadAndMember(silence_s=SILENCE_S)) as both:
        both.begin(least=1, most=3)
        lose_own_workers(both)
        lose_connection(both)
        end_successors(both)
        assert both.state() == "going on"
        both.head.interrupted(signal.SIGINT)
        assert outcome_of(both).exit_code == 130


@pytest.mark.parametrize("comes", [False, True])
def test_an_elastic_run_with_too_little_room_ends_unless_the_lost_host_comes_back_within_the_patience(
    comes: bool,
) -> None:
    with closing(HeadAndMember(silence_s=SILENCE_S, patience_s=30.0)) as both:
        both.begin(least=3, most=3)
        both.notice(0, "keeps")
        lose_connection(both)
        lose_own_workers(both)
        end_successors(both)
        assert both.state() == "going on"
        assert both.said[-1].startswith("the hosts that are left have room for 2 of the 3 workers: waiting up to 30 s")
        if comes:
            remote_host, other = both.come("b", index=2)
            both.head.join(remote_host)
            other.send(gone(both, 2))
            both.loop.turn(1.0)
            recoverable_loss = outcome_of(both).recoverable_loss
            assert recoverable_loss is not None and (
                recoverable_loss.workers,
                recoverable_loss.workers_each,
                recoverable_loss.least,
            ) == (3, 1, 3)
            return
        both.head.tick(time.monotonic() + 29)
        assert both.head.outcome is None
        both.head.tick(time.monotonic() + 31)
        assert both.head.outcome is not None
        assert (both.head.outcome.exit_code, both.head.outcome.may_restart) == (TOO_FEW, False)
        assert "no host has joined within 30 s in place of the lost one: the run ends" in both.said


def test_a_member_ends_its_workers_and_says_what_it_has() -> None:
    with closing(MemberAndHead()) as pair:
        pair.lead()
        pair.head.send({"op": "again"})
        pair.loop.turn(1.0)
        assert pair.local_workers.told == ["kill"]
        pair.member.tick(time.monotonic())
        assert [message["op"] for message in heard(pair.head)] == ["ping"]  # not before all processes are gone
        pair.local_workers.have_all_ended, pair.local_workers.snapshots = True, STOCK
        pair.member.tick(time.monotonic())
        pair.member.tick(time.monotonic())
        (only,) = heard(pair.head)
        assert RemainingHost.from_json(only["left"]) == RemainingHost(index=1, slots=1, workers=(2,), snapshots=STOCK)


def test_a_member_is_told_how_all_begin_again() -> None:
    restarted = Restarted(
        causes=["it broke"], lost=[1], workers=3, at_step=12, step=10, source="memory", lost_at=0.0, hosts=2, lent=[]
    )
    again = RestartPlan(restarted=restarted, ranks={0: (0, 1), 1: (2,)}, slots={0: 2, 1: 1}, most=3)
    with closing(MemberAndHead()) as pair:
        pair.lead()
        outcome = JobOutcome(state="failed", exit_code=1, restart_plan=again)
        pair.head.send({"op": "end", "outcome": outcome.to_json()})
        pair.loop.turn(1.0)
        assert pair.member.outcome is not None and pair.member.outcome.restart_plan == again
        assert pair.member.outcome.may_restart
