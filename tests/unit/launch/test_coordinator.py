"""What the coordinator decides, without a process: fake local workers, a fake remote host, a fake clock."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from fake_hosts import WELL, HeadAndMember, ended, told
from paceline.elastic.membership_messages import TOO_FEW
from paceline.events import WorkerLost
from paceline.launch.coordinator.job_end import FAILURE_REPORTS_S, REPORT_S, STOP_S, TERMINATE_S
from paceline.launch.coordinator.remote_hosts import SILENCE_S
from paceline.launch.job.outcome import JobOutcome


@pytest.fixture
def both() -> Iterator[HeadAndMember]:
    with closing(HeadAndMember()) as made:
        yield made


def test_the_job_has_finished_when_all_workers_of_all_hosts_have(both: HeadAndMember) -> None:
    both.head.exited(ended(0))
    both.say(op="exited", exit=dataclasses.asdict(ended(2, host="b")))
    assert both.state() == "going on"
    both.head.exited(ended(1))
    assert both.state() == "finished"
    message = told(both.member)
    assert message["op"] == "end"
    assert JobOutcome.from_json(message["outcome"]) == both.head.outcome
    assert [one["host"] for one in message["outcome"]["exits"]] == ["a", "a", "b"]
    assert both.local_workers.told == []


def test_after_a_failure_the_others_have_a_moment_and_are_ended(both: HeadAndMember) -> None:
    now = time.monotonic()
    both.head.exited(ended(1, 1))
    both.head.tick(now + FAILURE_REPORTS_S / 2)
    assert both.local_workers.told == []
    both.head.tick(now + FAILURE_REPORTS_S + 0.5)
    both.head.tick(now + FAILURE_REPORTS_S + 0.6)
    assert both.local_workers.told == [("terminate", TERMINATE_S)]
    assert told(both.member) == {"op": "stop", "grace_s": TERMINATE_S}


def test_the_kv_store_serves_members_workers_too(both: HeadAndMember) -> None:
    both.head.request(0, {"id": 1, "op": "add", "key": "n", "amount": 2})
    both.say(op="said", worker=2, request={"id": 7, "op": "add", "key": "n", "amount": 3})
    assert both.local_workers.told == [(0, {"id": 1, "value": 2})]
    assert told(both.member) == {"op": "tell", "worker": 2, "message": {"id": 7, "value": 5}}


def test_a_first_signal_stops_and_a_second_one_kills(both: HeadAndMember) -> None:
    both.head.interrupted(signal.SIGINT)
    assert both.local_workers.told == [("terminate", STOP_S)]
    both.head.interrupted(signal.SIGINT)
    assert both.local_workers.told == [("terminate", STOP_S), "kill"]
    assert both.ops() == ["stop", "kill"]
    for worker in range(3):
        both.head.exited(ended(worker, None, sent_by_us=True))
    assert both.state() == "stopped"
    assert both.head.outcome is not None and both.head.outcome.exit_code == 130


@pytest.mark.parametrize(("signum", "limit_s"), [(signal.SIGTERM, 30.0), (signal.SIGHUP, 30.0), (signal.SIGINT, 600.0)])
def test_only_after_ctrl_c_a_step_may_take_as_long_as_steps_may(signum: signal.Signals, limit_s: float) -> None:
    with closing(HeadAndMember(silence_s=10_000.0, grace_s=30.0, timeout_s=600.0)) as both:
        both.notice(0, "begun")
        now = time.monotonic()
        both.head.interrupted(signum)
        both.local_workers.told.clear()  # that they are to leave
        both.head.tick(now + limit_s - 1)
        assert both.local_workers.told == []
        both.head.tick(now + limit_s + 5)
        assert both.local_workers.told == [("terminate", STOP_S)]


def test_a_signal_to_a_member_stops_the_job_once(both: HeadAndMember) -> None:
    both.say(op="leaving", signal=int(signal.SIGTERM), reason="")
    both.head.interrupted(signal.SIGTERM)  # the cluster tells all hosts at once: this is not impatience
    assert both.local_workers.told == [("terminate", STOP_S)]
    for worker in range(3):
        both.head.exited(ended(worker, None, sent_by_us=True))
    assert both.state() == "stopped"
    assert both.head.outcome is not None
    assert (both.head.outcome.exit_code, both.head.outcome.reason) == (143, "stopped by SIGTERM on host b")


def test_a_signal_that_workers_got_too_is_a_stop_and_no_failure(both: HeadAndMember) -> None:
    both.head.exited(ended(0, None, signal=signal.SIGTERM))
    both.head.exited(ended(1, 128 + signal.SIGTERM))
    both.head.exited(ended(2, None, signal=signal.SIGTERM))
    both.head.interrupted(signal.SIGTERM)
    assert both.state() == "stopped"


@pytest.mark.parametrize("is_ending", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_step_a_signal_to_all_hosts_is_no_loss_of_the_one_that_ended_first(
    both: HeadAndMember, signum: signal.Signals, is_ending: bool
) -> None:
    both.member.close()
    both.loop.turn(1.0)
    if is_ending:  # the workers have been told to end because of the loss
        both.head.tick(time.monotonic() + FAILURE_REPORTS_S + 0.1)
    both.head.exited(ended(0, 1, error={"echo": True, "message": "lost contact with a peer"}))
    both.head.interrupted(signum)
    both.head.exited(ended(1, None, sent_by_us=True))
    assert both.state() == "stopped"
    assert both.head.outcome is not None and both.head.outcome.exit_code == 128 + signum


def test_after_the_first_step_a_lost_host_is_a_reason_to_run_again_though_sigterm_came(both: HeadAndMember) -> None:
    both.notice(0, "begun")
    both.member.close()
    both.loop.turn(1.0)
    both.head.tick(time.monotonic() + FAILURE_REPORTS_S + 0.1)
    both.head.interrupted(signal.SIGTERM)
    for worker in range(2):
        both.head.exited(ended(worker, None, sent_by_us=True))
    assert both.state() == "failed"
    assert both.head.outcome is not None and both.head.outcome.exit_code == TOO_FEW


def test_a_signal_after_a_failure_does_not_hide_it(both: HeadAndMember) -> None:
    both.head.exited(ended(0, 1))
    both.head.interrupted(signal.SIGINT)
    assert both.local_workers.told == [("terminate", STOP_S)]
    both.head.exited(ended(1, None, sent_by_us=True))
    both.head.exited(ended(2, None, sent_by_us=True))
    assert both.state() == "failed"
    assert both.head.outcome is not None and both.head.outcome.exit_code == 1


def test_a_silent_host_is_lost_after_the_jobs_silence_and_its_workers_have_failed() -> None:
    with closing(HeadAndMember(silence_s=4.0)) as both:
        both.say(op="started", worker=2, pid=77)
        now = time.monotonic()
        both.head.tick(now + 3)
        assert both.said == []
        both.head.tick(now + 5)
        assert both.said == ["host b (10.0.0.2) was lost: it sent nothing for 4 s"]
        both.head.exited(ended(0, None, sent_by_us=True))
        both.head.exited(ended(1, None, sent_by_us=True))
        assert both.state() == "failed"
        assert both.head.outcome is not None
        lost = both.head.outcome.failures[2]
        assert (lost.worker, lost.host, lost.pid, lost.exit_code, lost.signal) == (2, "b", 77, None, None)
        assert lost.error is not None and lost.error["message"] == both.said[0]


def test_a_host_that_has_not_spoken_yet_has_longer_for_it_prepares_its_directory() -> None:
    with closing(HeadAndMember(silence_s=4.0)) as both:
        now = time.monotonic()
        both.head.tick(now + SILENCE_S - 1)
        assert both.said == []
        both.head.tick(now + SILENCE_S + 1)
        assert both.said == ["host b (10.0.0.2) was lost: it sent nothing for 15 s"]


def test_a_host_lost_after_its_workers_ended_well_is_no_failure(both: HeadAndMember) -> None:
    both.say(op="exited", exit=dataclasses.asdict(ended(2, host="b")))
    both.member.close()
    both.loop.turn(1.0)
    assert both.said == ["host b (10.0.0.2) was lost: it closed the connection"]
    both.head.exited(ended(0))
    both.head.exited(ended(1))
    assert both.state() == "finished"


def test_a_member_that_does_not_end_its_workers_is_lost(both: HeadAndMember) -> None:
    both.head.interrupted(signal.SIGTERM)
    now = time.monotonic()
    both.head.exited(ended(0, None, sent_by_us=True))
    both.head.exited(ended(1, None, sent_by_us=True))
    both.head.tick(now + STOP_S + REPORT_S - 1)
    assert both.state() == "going on"
    both.head.tick(now + STOP_S + REPORT_S + 1)
    assert both.state() == "stopped"


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"op": "dance"},
        {"op": "exited"},
        {"op": "exited", "exit": {"worker": 2}},
        {"op": "exited", "exit": dataclasses.asdict(WELL)},  # worker 0 is not its own
        {"op": "started", "worker": "two", "pid": 1},
        {"op": "said", "worker": 2, "request": []},
        {"op": "exited", "exit": dataclasses.asdict(WELL) | {"worker": 2, "error": "text"}},
    ],
)
def test_a_member_that_talks_nonsense_is_lost_and_the_head_goes_on(
    both: HeadAndMember, message: dict[str, Any]
) -> None:
    both.say(**message)
    assert len(both.said) == 1
    assert both.said[0].startswith("host b (10.0.0.2) was lost: it sent an invalid message")
    both.head.tick(time.monotonic() + FAILURE_REPORTS_S + 1)
    assert both.local_workers.told == [("terminate", TERMINATE_S)]


def test_workers_that_left_as_too_few_are_known_as_such_where_none_has_spoken_since_it_was_told_to() -> None:
    with closing(HeadAndMember(patience_s=0.1)) as both:
        both.begin(least=3, most=3)
        both.head.exited(ended(1, None, signal=9))
        now = time.monotonic()
        for later_s in (0.0, 0.2, 0.4):
            both.head.tick(now + later_s)
        assert (0, "finish") in [
            (told[0], told[1]["op"]) for told in both.local_workers.told if isinstance(told[1], dict)
        ]
        both.head.exited(ended(0, TOO_FEW))
        both.head.exited(ended(2, TOO_FEW))
        both.head.tick(now + 0.5)
        assert both.head.outcome is not None
        assert (both.head.outcome.state, both.head.outcome.exit_code) == ("stopped", TOO_FEW)


def come_to_the_end(both: HeadAndMember, *workers: int) -> None:
    """The training function is over on these workers, and their processes go on."""
    for worker in workers:
        both.notice(worker, "over", step=12)


def pass_time(both: HeadAndMember, seconds: float) -> None:
    """All hosts are heard of, and no worker."""
    began = time.monotonic()
    for number in range(int(2 * seconds)):
        both.remote_host.link.last_received = began + number / 2
        both.head.tick(began + number / 2)


@pytest.mark.parametrize("behind", [[0, 1, 2], [0]], ids=["all", "one"])
def test_what_workers_do_behind_the_training_is_neither_silence_nor_a_loss(behind: list[int]) -> None:
    with closing(HeadAndMember(silence_s=4.0)) as both:
        both.begin(least=1, most=3)
        come_to_the_end(both, 0, 1, 2)
        for worker in {0, 1, 2} - set(behind):
            both.head.exited(ended(worker))
        pass_time(both, 20.0)
        assert both.head.outcome is None and both.local_workers.told == [] and both.events == []
        for worker in behind:
            both.head.exited(ended(worker))
        assert both.state() == "finished"


@pytest.mark.parametrize("is_host", [False, True], ids=["killed", "its host is lost"])
def test_a_worker_that_is_lost_behind_the_training_has_failed_and_the_others_come_to_their_end(
    both: HeadAndMember, is_host: bool
) -> None:
    both.begin(least=1, most=3)
    both.notice(0, "keeps")
    come_to_the_end(both, 0, 1, 2)
    if is_host:
        both.member.close()
        both.loop.turn(1.0)
    else:
        both.say(op="exited", exit=dataclasses.asdict(ended(2, None, host="b", signal=9)))
    both.head.tick(time.monotonic() + 2 * FAILURE_REPORTS_S)
    assert both.local_workers.told == [] and not [event for event in both.events if isinstance(event, WorkerLost)]
    for worker in (0, 1):
        both.head.exited(ended(worker))
    assert both.state() == "failed"
    assert both.head.outcome is not None
    assert [failure.worker for failure in both.head.outcome.failures] == [2] and not both.head.outcome.may_restart


def test_an_error_behind_the_training_ends_the_others_as_any_error_does(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    come_to_the_end(both, 0, 1, 2)
    both.head.exited(ended(0, 1))
    both.head.tick(time.monotonic() + 2 * FAILURE_REPORTS_S)
    assert both.local_workers.told == [("terminate", TERMINATE_S)]


def test_a_host_that_is_lost_takes_nothing_of_the_run_but_who_is_still_at_work(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    come_to_the_end(both, 0)
    both.member.close()
    both.loop.turn(1.0)
    assert [event.rank for event in both.events if isinstance(event, WorkerLost)] == [2]
    forms = [message["members"] for worker, message in both.local_workers.told if worker == 1]
    assert forms == [(1,)], "nobody waits for worker 0, which is past all that they do together"
    come_to_the_end(both, 1)
    for worker in (0, 1):
        both.head.exited(ended(worker))
    assert both.state() == "finished"


@pytest.mark.parametrize("joins_in_calls", [False, True])
def test_a_program_that_joins_in_calls_of_its_own_has_the_time_of_the_job_also_after_a_takeover(
    joins_in_calls: bool,
) -> None:
    with closing(HeadAndMember(timeout_s=300.0)) as both:
        both.notice(0, "elastic", least=1, most=3, workers_each=1, joins_in_calls=joins_in_calls)
        controller = both.head._controller
        assert controller is not None
        assert controller._membership.limits.program_s == (300.0 if joins_in_calls else None)
        assert controller.to_json()["joins_in_calls"] is joins_in_calls
        both.head._begin_elastic(controller.to_json(), is_taken_over=True)
        assert both.head._controller is not None and both.head._controller is not controller
        assert both.head._controller.to_json()["joins_in_calls"] is joins_in_calls


def test_who_asks_for_another_size_is_told_that_the_run_has_not_begun(both: HeadAndMember) -> None:
    request = {"op": "resize", "replicas": 2}
    assert both.head.answer_command(request)["has_begun"] is False
    both.notice(0, "begun")
    assert both.head.answer_command(request)["has_begun"] is True
    both.begin(least=1, most=3)
    assert both.head.answer_command(request) == {"says": "it will have 2 replicas"}
