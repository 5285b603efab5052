"""What the head decides, without a process: a pretended crew, a pretended member, a pretended clock."""

from __future__ import annotations

import dataclasses
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from paceline.comm.channel import Channel
from paceline.events import Event
from paceline.launch.head import GATHER_S, REPORT_S, SILENCE_S, STOP_S, TERMINATE_S, Guest, Head
from paceline.launch.link import Link
from paceline.launch.loop import Loop
from paceline.launch.member import Member
from paceline.launch.outcome import Outcome, WorkerExit
from paceline.plan.job import Job

WELL = WorkerExit(
    worker=0, host="a", pid=10, exit_code=0, signal=None, peak_memory_bytes=1, error=None, sent_by_us=False
)


class PretendedCrew:
    """Notes what it is told."""

    def __init__(self, *workers: int) -> None:
        self.alive: dict[int, Any] = dict.fromkeys(workers)
        self.told: list[Any] = []

    def terminate(self, grace_s: float) -> None:
        self.told.append(("terminate", grace_s))

    def kill(self) -> None:
        self.told.append("kill")

    def tell(self, worker: int, message: Mapping[str, Any]) -> None:
        self.told.append((worker, message))


class HeadAndMember:
    """A head with workers 0 and 1, and the other end of its link to a member with worker 2."""

    def __init__(self) -> None:
        self.loop, self.crew, self.said = Loop(), PretendedCrew(0, 1), list[str]()
        ours, theirs = socket.socketpair()
        link = Link(
            ours,
            self.loop,
            on_message=lambda message: self.head.guest_said(self.guest, message),
            on_close=lambda error: self.head.guest_lost(self.guest, str(error)),
        )
        self.guest = Guest(link=link, host="b", address="10.0.0.2", workers={2})
        fields: dict[str, Any] = {"host": "a", "address": "10.0.0.1", "attempt": 1, "run_dir": "runs/r"}
        job = Job(workers=3, hosts=2, head="a:29500")
        self.head = Head(job=job, guests=[self.guest], door=None, say=self.said.append, **fields)
        self.head.lead(self.crew, list[Event]().append)  # type: ignore[arg-type]
        self.member = Channel(theirs)

    def say(self, **message: Any) -> None:
        """Let the member say something, and the head hear it."""
        self.member.send(message)
        self.loop.turn(1.0)

    def state(self) -> str:
        """What the head decides now."""
        self.head.tick(time.monotonic())
        return "going on" if self.head.outcome is None else self.head.outcome.state

    def ops(self) -> list[str]:
        """What the member has heard."""
        self.member._sock.setblocking(False)
        found = []
        try:
            while True:
                found.append(self.member.receive()["op"])
        except (ConnectionError, OSError):
            return found

    def close(self) -> None:
        self.head.close()
        self.member.close()
        self.loop.close()


@pytest.fixture
def both() -> Iterator[HeadAndMember]:
    with closing(HeadAndMember()) as made:
        yield made


def ended(worker: int, exit_code: int | None = 0, **fields: Any) -> WorkerExit:
    return dataclasses.replace(WELL, worker=worker, exit_code=exit_code, **fields)


def told(member: Channel) -> Mapping[str, Any]:
    """The member's next message that is no ping."""
    while (message := member.receive())["op"] == "ping":
        pass
    return message


def test_the_job_has_finished_when_all_workers_of_all_hosts_have(both: HeadAndMember) -> None:
    both.head.exited(ended(0))
    both.say(op="exited", exit=dataclasses.asdict(ended(2, host="b")))
    assert both.state() == "going on"
    both.head.exited(ended(1))
    assert both.state() == "finished"
    message = told(both.member)
    assert message["op"] == "end"
    assert Outcome.from_json(message["outcome"]) == both.head.outcome
    assert [one["host"] for one in message["outcome"]["exits"]] == ["a", "a", "b"]
    assert both.crew.told == []


def test_after_a_failure_the_others_have_a_moment_and_are_ended(both: HeadAndMember) -> None:
    now = time.monotonic()
    both.head.exited(ended(1, 1))
    both.head.tick(now + GATHER_S / 2)
    assert both.crew.told == []
    both.head.tick(now + GATHER_S + 0.5)
    both.head.tick(now + GATHER_S + 0.6)
    assert both.crew.told == [("terminate", TERMINATE_S)]
    assert told(both.member) == {"op": "stop", "grace_s": TERMINATE_S}


def test_the_board_serves_members_workers_too(both: HeadAndMember) -> None:
    both.head.request(0, {"id": 1, "op": "add", "key": "n", "amount": 2})
    both.say(op="said", worker=2, request={"id": 7, "op": "add", "key": "n", "amount": 3})
    assert both.crew.told == [(0, {"id": 1, "value": 2})]
    assert told(both.member) == {"op": "tell", "worker": 2, "message": {"id": 7, "value": 5}}


def test_a_first_signal_stops_and_a_second_one_kills(both: HeadAndMember) -> None:
    both.head.interrupted(signal.SIGINT)
    assert both.crew.told == [("terminate", STOP_S)]
    both.head.interrupted(signal.SIGINT)
    assert both.crew.told == [("terminate", STOP_S), "kill"]
    assert both.ops() == ["stop", "kill"]
    for worker in range(3):
        both.head.exited(ended(worker, None, sent_by_us=True))
    assert both.state() == "stopped"
    assert both.head.outcome is not None and both.head.outcome.exit_code == 130


def test_a_signal_to_a_member_stops_the_job_once(both: HeadAndMember) -> None:
    both.say(op="leaving", signal=int(signal.SIGTERM), reason="")
    both.head.interrupted(signal.SIGTERM)  # the cluster tells all hosts at once: this is not impatience
    assert both.crew.told == [("terminate", STOP_S)]
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


def test_a_signal_after_a_failure_does_not_hide_it(both: HeadAndMember) -> None:
    both.head.exited(ended(0, 1))
    both.head.interrupted(signal.SIGINT)
    assert both.crew.told == [("terminate", STOP_S)]
    both.head.exited(ended(1, None, sent_by_us=True))
    both.head.exited(ended(2, None, sent_by_us=True))
    assert both.state() == "failed"
    assert both.head.outcome is not None and both.head.outcome.exit_code == 1


def test_a_silent_host_is_lost_and_its_workers_have_failed(both: HeadAndMember) -> None:
    both.say(op="started", worker=2, pid=77)
    now = time.monotonic()
    both.head.tick(now + SILENCE_S - 1)
    assert both.said == []
    both.head.tick(now + SILENCE_S + 1)
    assert both.said == ["host b (10.0.0.2) was lost: it said nothing for 15 s"]
    both.head.exited(ended(0, None, sent_by_us=True))
    both.head.exited(ended(1, None, sent_by_us=True))
    assert both.state() == "failed"
    assert both.head.outcome is not None
    lost = both.head.outcome.failures[2]
    assert (lost.worker, lost.host, lost.pid, lost.exit_code, lost.signal) == (2, "b", 77, None, None)
    assert lost.error is not None and lost.error["message"] == both.said[0]


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
    assert both.said[0].startswith("host b (10.0.0.2) was lost: it said something that makes no sense")
    both.head.tick(time.monotonic() + GATHER_S + 1)
    assert both.crew.told == [("terminate", TERMINATE_S)]


class MemberAndHead:
    """A member with worker 2, and the other end of its link to the head."""

    def __init__(self) -> None:
        self.loop, self.crew, self.said = Loop(), PretendedCrew(2), list[str]()
        ours, theirs = socket.socketpair()
        link = Link(
            ours,
            self.loop,
            on_message=lambda message: self.member.head_said(message),
            on_close=lambda error: self.member.head_lost(str(error)),
        )
        fields: dict[str, Any] = {"host": "b", "address": "10.0.0.2", "host_index": 1, "attempt": 1, "run_dir": "r"}
        self.member = Member(link, head="a (10.0.0.1)", say=self.said.append, **fields)
        self.head = Channel(theirs)

    def close(self) -> None:
        self.member.close()
        self.head.close()
        self.loop.close()


@pytest.fixture
def pair() -> Iterator[MemberAndHead]:
    with closing(MemberAndHead()) as made:
        yield made


def test_what_the_head_says_before_there_are_workers_is_done_later(pair: MemberAndHead) -> None:
    pair.head.send({"op": "ping"})
    pair.head.send({"op": "stop", "grace_s": 3.0})
    pair.loop.turn(1.0)
    assert pair.crew.told == []
    pair.member.lead(pair.crew, list[Event]().append)  # type: ignore[arg-type]
    assert pair.crew.told == [("terminate", 3.0)]


def test_a_silent_head_is_lost_and_the_workers_are_ended(pair: MemberAndHead) -> None:
    pair.member.lead(pair.crew, list[Event]().append)  # type: ignore[arg-type]
    now = time.monotonic()
    pair.member.tick(now + SILENCE_S - 1)
    assert pair.crew.told == []
    pair.member.tick(now + SILENCE_S + 1)
    assert pair.crew.told == [("terminate", TERMINATE_S)]
    assert pair.said == ["the head a (10.0.0.1) was lost: it said nothing for 15 s"]
    pair.crew.alive.clear()
    pair.member.exited(ended(2, None, sent_by_us=True))
    pair.member.tick(now + SILENCE_S + 2)
    assert pair.member.outcome is not None
    assert (pair.member.outcome.state, pair.member.outcome.reason) == ("failed", pair.said[0])


def test_a_signal_to_a_member_is_told_to_the_head(pair: MemberAndHead) -> None:
    pair.member.lead(pair.crew, list[Event]().append)  # type: ignore[arg-type]
    pair.member.interrupted(signal.SIGHUP)
    assert told(pair.head) == {"op": "leaving", "signal": int(signal.SIGHUP), "reason": ""}
    pair.member.interrupted(signal.SIGHUP)
    assert pair.crew.told == [("terminate", STOP_S), "kill"]
