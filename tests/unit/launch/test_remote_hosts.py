"""What the coordinator does with hosts that join or leave while the run goes on."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from fake_hosts import HeadAndMember, ended, heard
from paceline.elastic.membership_messages import PREEMPTED
from paceline.events import Regrouped, WorkerJoined, WorkerLost
from paceline.launch.coordinator import elastic_controller
from paceline.launch.coordinator.job_end import STOP_S
from paceline.launch.coordinator.remote_hosts import RemoteHost
from paceline.launch.job.outcome import lost_worker


@pytest.fixture
def both() -> Iterator[HeadAndMember]:
    with closing(HeadAndMember()) as made:
        yield made


class Clock:
    """The clock of the elastic controller."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(elastic_controller, "time", clock)
    return clock


def test_who_comes_before_it_is_known_that_the_run_is_elastic_may_try_again(both: HeadAndMember) -> None:
    assert both.head.refusal() == ("it has not begun yet", True)
    both.notice(0, "elastic", least=1, most=4, workers_each=1)
    assert both.head.refusal() is None


def test_a_run_with_a_fixed_number_of_replicas_takes_nobody_in(both: HeadAndMember) -> None:
    both.notice(0, "begun")
    reason = "its plan has a fixed number of replicas: Layout(replicas=(least, most)) lets hosts come later"
    assert both.head.refusal() == (reason, False)


def test_a_second_signal_on_a_host_of_a_run_with_a_fixed_number_of_replicas_ends_the_run_at_once(
    both: HeadAndMember,
) -> None:
    both.notice(0, "begun")
    both.say(op="leaving", signal=int(signal.SIGTERM), reason="")
    assert not [told for told in both.local_workers.told if told[0] == "terminate"], "it saves first"
    both.say(op="leaving", signal=int(signal.SIGTERM), reason="", at_once=True)
    assert both.local_workers.told[-1] == ("terminate", STOP_S)
    for worker in range(3):
        both.head.exited(ended(worker, None, signal=9))
    assert both.state() == "stopped"
    assert both.head.outcome is not None and both.head.outcome.exit_code == 143


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_on_a_host_of_an_elastic_run_is_the_loss_of_its_workers(
    both: HeadAndMember, again: signal.Signals
) -> None:
    both.begin(least=1, most=3)
    both.say(op="leaving", signal=int(signal.SIGTERM), reason="")
    both.say(op="leaving", signal=int(again), reason="", at_once=True)
    both.say(op="exited", exit=dataclasses.asdict(ended(2, None, host="b", signal=9, sent_by_us=True)))
    assert both.state() == "going on"
    assert not [told for told in both.local_workers.told if told[0] == "terminate"]
    assert [event.rank for event in both.events if isinstance(event, WorkerLost)] == [2]
    (last,) = [message for message in heard(both.member) if message["op"] == "end"]
    assert last["outcome"]["exit_code"] == PREEMPTED, "the host itself knows better"


def test_who_comes_when_the_run_is_about_to_end_may_try_again(both: HeadAndMember) -> None:
    both.begin(least=1, most=4)
    both.head.interrupted(signal.SIGTERM)
    assert both.head.refusal() == ("the run is about to end", True)


def test_a_host_that_comes_gets_the_replicas_that_fit_on_it_and_what_the_plan_does_not_allow_is_spare(
    both: HeadAndMember,
) -> None:
    both.begin(least=1, most=4)
    (c, to_c), (d, to_d) = both.come("c", index=2), both.come("d", index=3)
    both.head.join(c)
    both.head.join(d)
    assert both.said == [
        "host c (10.0.0.3) has joined: 1 more replica",
        "host d (10.0.0.4) has joined: its slots are spare",
    ]
    assert heard(to_c) == [{"op": "start", "worker": 3, "workers": 4, "incarnation": 1}]
    assert heard(to_d) == []


def test_a_worker_that_came_later_has_joined_with_its_first_step_and_once(both: HeadAndMember) -> None:
    both.begin(least=1, most=4)
    c, _ = both.come("c", index=2)
    both.head.join(c)
    for step in (5, 6):
        for worker in (0, 3):
            both.notice(worker, "committed", step=step, pid=40 + worker)
    assert both.events == [WorkerJoined(rank=3, step=5, after_s=None, pid=43)]


def test_who_is_lost_with_its_host_is_started_where_slots_are_spare(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    c, to_c = both.come("c", index=2)
    both.head.join(c)
    both.member.close()
    both.loop.turn(1.0)
    assert heard(to_c) == [{"op": "start", "worker": 2, "workers": 3, "incarnation": 1}]
    lost = next(event for event in both.events if isinstance(event, WorkerLost))
    assert (lost.rank, lost.host, lost.reason) == (2, "b", "host b (10.0.0.2) was lost: it closed the connection")
    both.notice(2, "committed", step=9, pid=42)
    joined = both.events[-1]
    assert isinstance(joined, WorkerJoined) and joined.after_s is not None


def silence(both: HeadAndMember, clock: Clock, *heard_of: RemoteHost, until: float) -> None:
    """Time passes, and nothing is received but from these hosts and the coordinator's own workers."""
    while clock.now < until:
        clock.now += 0.5
        for remote_host in heard_of:
            remote_host.link.last_received = clock.now
        for worker in (0, 1):
            both.notice(worker, "alive")
        both.head.tick(clock.now)


def test_who_is_silent_with_its_host_is_lost_with_it_and_started_elsewhere_once(
    both: HeadAndMember, clock: Clock
) -> None:
    both.begin(least=1, most=3)
    both.say(op="ping", asked=0.0)
    c, to_c = both.come("c", index=2)
    both.head.join(c)
    both.remote_host.link.last_received = clock.now + 0.9  # later than any word of its worker
    silence(both, clock, c, until=clock.now + 14.0)
    assert "start" not in both.ops(), "nobody is started on a host that is lost"
    assert [message["worker"] for message in heard(to_c) if message["op"] == "start"] == [2]
    assert "host b (10.0.0.2) was lost: it sent nothing for 10 s" in both.said
    (lost,) = [event for event in both.events if isinstance(event, WorkerLost)]
    assert lost.rank == 2 and lost.reason in both.said


def test_a_worker_that_alone_is_silent_is_lost_alone(both: HeadAndMember, clock: Clock) -> None:
    both.begin(least=1, most=3)
    silence(both, clock, both.remote_host, until=clock.now + 14.0)
    assert [message["worker"] for message in heard(both.member) if message["op"] == "start"] == [2]
    (lost,) = [event for event in both.events if isinstance(event, WorkerLost)]
    assert lost.reason == "worker 2 said nothing for 10 s"


def test_of_two_hosts_that_are_lost_neither_gets_the_others_workers(both: HeadAndMember, clock: Clock) -> None:
    both.begin(least=1, most=3)
    both.say(op="ping", asked=0.0)
    (c, to_c), (d, to_d) = both.come("c", index=2), both.come("d", index=3)
    for remote_host in (c, d):
        both.head.join(remote_host)
        remote_host.has_spoken = True
    both.remote_host.link.last_received, c.link.last_received = clock.now + 0.2, clock.now + 3.0
    silence(both, clock, d, until=clock.now + 14.0)
    assert [message["op"] for message in heard(to_c)].count("start") == 0
    assert [message["worker"] for message in heard(to_d) if message["op"] == "start"] == [2]


def test_where_no_slot_is_free_who_is_lost_with_its_host_is_not_replaced_until_a_host_comes(
    both: HeadAndMember,
) -> None:
    both.begin(least=1, most=3)
    both.member.close()
    both.loop.turn(1.0)
    both.head.tick(time.monotonic())
    assert not any(said[0] == "add" for said in both.local_workers.told)
    c, to_c = both.come("c", index=2)
    both.head.join(c)
    assert [message["worker"] for message in heard(to_c)] == [2]


def test_a_host_that_can_fork_no_more_workers_is_given_none_and_its_lost_ones_come_back_elsewhere(
    both: HeadAndMember,
) -> None:
    both.begin(least=1, most=3)
    both.head.cannot_fork()
    both.say(op="barren")
    both.head.exited(ended(1, None, signal=signal.SIGKILL))
    both.say(op="exited", exit=dataclasses.asdict(ended(2, None, host="b", signal=int(signal.SIGKILL))))
    assert not any(said[0] == "add" for said in both.local_workers.told)
    assert "start" not in both.ops()
    c, to_c = both.come("c", index=2)
    both.head.join(c)
    assert heard(to_c) == [{"op": "start", "worker": 1, "workers": 2, "incarnation": 1}]


def test_the_generation_that_takes_a_worker_of_another_host_in_knows_that_it_is_spread(both: HeadAndMember) -> None:
    both.begin(least=1, most=4)
    both.member.close()
    both.loop.turn(1.0)
    forms = [said[1] for said in both.local_workers.told if said[0] == 0 and said[1].get("op") == "form"]
    assert [(form["members"], form["is_spread"]) for form in forms] == [((0, 1), False)]
    for worker in (0, 1):
        both.notice(worker, "formed", generation=1, noticed=time.time())
    c, _ = both.come("c", index=2)
    both.head.join(c)
    both.notice(2, "ready", generation=-1)
    newest = [said[1] for said in both.local_workers.told if said[0] == 0 and said[1].get("op") == "form"][-1]
    assert (newest["members"], newest["is_spread"]) == ((0, 1, 2), True)


def sigterm(both: HeadAndMember) -> list[Mapping[str, Any]]:
    """SIGTERM comes on the member's host; returns what its worker is told."""
    both.say(op="leaving", signal=int(signal.SIGTERM), reason="")
    return [message["message"] for message in heard(both.member) if message["op"] == "tell"]


def leave(both: HeadAndMember) -> None:
    """The others go on without the member's worker, and it ends in good order."""
    for worker in (0, 1):
        both.notice(worker, "formed", generation=1, noticed=time.time())
    both.say(op="exited", exit=dataclasses.asdict(ended(2, host="b")))
    both.head.tick(time.monotonic())


def test_a_host_that_is_asked_to_leave_leaves_alone_and_may_come_again(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    (form,) = sigterm(both)
    assert (form["op"], form["members"], form["planned"]) == ("form", [0, 1], True)
    both.head.tick(time.monotonic())
    assert "end" not in both.ops()
    leave(both)
    (end,) = [message["outcome"] for message in heard(both.member) if message["op"] == "end"]
    assert (end["state"], end["exit_code"]) == ("stopped", 75)
    assert end["reason"] == "host b was asked to leave, and the run goes on without it"
    assert both.said == [
        "SIGTERM came on host b (10.0.0.2): worker 2 leaves between two steps, the run goes on without this host"
    ]
    both.member.close()
    both.loop.turn(1.0)
    assert len(both.said) == 1 and both.state() == "going on"  # it is not lost, and nobody is replaced
    assert not any(said[0] == "add" for said in both.local_workers.told)
    again, to_again = both.come("b", index=2)
    both.head.join(again)
    assert [message["worker"] for message in heard(to_again)] == [2]


def test_who_leaves_with_its_host_is_replaced_where_slots_are_spare_and_not_there(both: HeadAndMember) -> None:
    both.begin(least=3, most=3)
    c, to_c = both.come("c", index=2)
    both.head.join(c)
    sigterm(both)
    assert heard(to_c) == [{"op": "start", "worker": 3, "workers": 3, "incarnation": 1}]
    assert "start" not in both.ops()


def test_where_too_few_would_be_left_without_a_host_everybody_saves_and_leaves(both: HeadAndMember) -> None:
    both.begin(least=3, most=4)
    (finish,) = sigterm(both)
    assert (finish["op"], finish["exit_code"]) == ("finish", 75)
    assert both.said == ["SIGTERM came on host b: finishing the step in hand, then saving"]
    for worker in range(3):
        both.head.exited(ended(worker, 75))
    assert both.state() == "stopped"


def test_workers_that_do_not_leave_with_their_host_in_time_are_killed_and_lost(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    sigterm(both)
    both.head.tick(time.monotonic())
    assert "kill" not in both.ops()
    assert both.remote_host.leave_by is not None and 10 < both.remote_host.leave_by - time.monotonic() <= 30
    both.remote_host.leave_by = time.monotonic()
    both.head.tick(time.monotonic())
    assert "kill" in both.ops()
    both.say(op="exited", exit=dataclasses.asdict(ended(2, None, host="b", signal=int(signal.SIGKILL))))
    (lost,) = [event for event in both.events if isinstance(event, WorkerLost)]
    assert (lost.rank, lost.host) == (2, "b")
    both.head.tick(time.monotonic())
    assert "end" in both.ops()
    assert not any(said[0] == "add" for said in both.local_workers.told)


def test_a_host_without_workers_leaves_at_once_and_takes_its_spare_slots_with_it(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    c, to_c = both.come("c", index=2)
    both.head.join(c)
    to_c.send({"op": "leaving", "signal": int(signal.SIGTERM), "reason": ""})
    both.loop.turn(1.0)
    both.head.tick(time.monotonic())
    assert heard(to_c)[-1]["outcome"]["exit_code"] == 75
    assert both.said[-1] == "SIGTERM came on host c (10.0.0.3): the run goes on without this host"
    both.member.close()
    both.loop.turn(1.0)
    assert not any(said[0] == "add" for said in both.local_workers.told)  # no slot is free


def test_the_free_slots_of_a_host_that_leaves_replace_nobody(both: HeadAndMember) -> None:
    both.begin(least=4, most=4)
    c, to_c = both.come("c", index=2)
    c.slots = 2
    both.head.join(c)
    both.notice(3, "ready", generation=-1)
    for worker in range(4):
        both.notice(worker, "formed", generation=1, noticed=time.time())
    heard(to_c)
    to_c.send({"op": "leaving", "signal": int(signal.SIGTERM), "reason": ""})
    both.loop.turn(1.0)
    assert [message["message"]["op"] for message in heard(to_c)] == ["finish"]


def test_a_host_that_leaves_when_the_program_is_at_its_end_has_finished_with_the_others(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    sigterm(both)
    both.head.exited(ended(0))
    both.say(op="exited", exit=dataclasses.asdict(ended(2, host="b")))
    both.head.tick(time.monotonic())
    assert "end" not in both.ops()
    both.head.exited(ended(1))
    assert both.state() == "finished"
    assert "end" in both.ops()


def test_a_host_that_leaves_when_the_run_ends_is_told_how_it_ended(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    sigterm(both)
    both.head.interrupted(signal.SIGTERM)
    both.say(op="exited", exit=dataclasses.asdict(ended(2, host="b")))
    assert "end" not in both.ops()
    for worker in (0, 1):
        both.head.exited(ended(worker, 75))
    assert both.state() == "stopped"
    (end,) = [message["outcome"] for message in heard(both.member) if message["op"] == "end"]
    assert end["reason"] == "SIGTERM came"


def test_the_last_words_of_a_worker_that_has_moved_do_not_count(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    both.say(op="barren")
    both.notice(2, "leaving")
    both.say(op="exited", exit=dataclasses.asdict(ended(2, host="b")))
    c, to_c = both.come("c", index=2)
    both.head.join(c)
    assert [message["worker"] for message in heard(to_c)] == [2]
    both.say(op="exited", exit=dataclasses.asdict(ended(2, None, host="b", signal=int(signal.SIGKILL))))
    assert not any(isinstance(event, WorkerLost) for event in both.events)
    assert both.head.remote_hosts.host_of(2) == "c"


def test_the_last_words_of_a_worker_do_not_count_for_its_successor_on_the_same_host(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    both.say(op="started", worker=2, pid=11)
    killed = dataclasses.asdict(ended(2, None, host="b", pid=11, signal=int(signal.SIGKILL)))
    both.say(op="exited", exit=killed)
    assert [message["op"] for message in heard(both.member)].count("start") == 1
    both.say(op="exited", exit=killed)
    both.say(op="started", worker=2, pid=12)
    assert [message["op"] for message in heard(both.member)].count("start") == 0
    assert sum(isinstance(event, WorkerLost) for event in both.events) == 1
    both.say(op="exited", exit=dataclasses.asdict(ended(2, None, host="b", pid=12, signal=int(signal.SIGKILL))))
    assert [message["op"] for message in heard(both.member)].count("start") == 1


def test_a_replacement_that_cannot_be_started_is_lost_before_it_had_joined_and_tried_again(both: HeadAndMember) -> None:
    both.begin(least=1, most=3)
    both.head.exited(ended(1, None, signal=9))
    why = "worker 1 could not be forked: Resource temporarily unavailable"
    both.head.exited(lost_worker(1, host="a", pid=0, kind="NotStarted", message=why))
    assert both.state() == "going on"
    assert [event.reason for event in both.events if isinstance(event, WorkerLost)][1:] == [why]
    assert both.local_workers.told.count(("add", 1, 3)) == 2


@pytest.mark.parametrize("jump_s", [-86_400.0, 3600.0])
def test_a_host_whose_clock_is_wrong_does_not_make_a_recovery_take_as_long(both: HeadAndMember, jump_s: float) -> None:
    both.begin(least=1, most=4)
    both.member.close()
    both.loop.turn(1.0)
    for worker in (0, 1):
        both.notice(worker, "formed", generation=1, noticed=time.time() + jump_s, since_s=0.25)
    (regrouped,) = [event for event in both.events if isinstance(event, Regrouped)]
    assert 0.0 <= regrouped.detected_s < 600 and 0.0 <= regrouped.regrouped_s < 600


def share(both: HeadAndMember, **hosts: int) -> Mapping[str, Any]:
    return both.head.answer_command({"op": "resize", "replicas": sum(hosts.values()), "hosts": hosts})


def test_the_replicas_of_a_run_are_shared_out_among_its_hosts_by_name(both: HeadAndMember) -> None:
    both.begin(least=1, most=4)
    assert share(both, a=1, b=2) == {"says": "it has 3 replicas"}
    assert [message["worker"] for message in heard(both.member) if message["op"] == "start"] == [3]
    both.local_workers.told.clear()
    assert share(both, a=1, b=2) == {"says": "it has 3 replicas"}
    assert both.local_workers.told == [] and both.ops() == [], "the same once more changes nothing"
    assert [event for event in both.events if isinstance(event, WorkerLost)] == []


def test_a_host_that_gets_no_share_gives_its_workers_to_none(both: HeadAndMember) -> None:
    both.begin(least=1, most=4)
    assert share(both, a=2) == {"says": "it has 2 replicas"}
    (form,) = [message["message"] for message in heard(both.member) if message["op"] == "tell"]
    assert (form["op"], form["members"], form["planned"]) == ("form", [0, 1], True)
    assert not any(said[0] == "add" for said in both.local_workers.told)
    both.say(op="exited", exit=dataclasses.asdict(ended(2, host="b")))
    assert share(both, a=3) == {"says": "it will have 3 replicas"}
    assert [said for said in both.local_workers.told if said[0] == "add"] == [("add", 2, 3)]


def test_a_host_that_is_still_to_join_has_no_share_yet(both: HeadAndMember) -> None:
    both.begin(least=1, most=4)
    assert share(both, a=2, b=1, c=1) == {"says": "it has 3 replicas"}
    c, to_c = both.come("c", index=2)
    both.head.join(c)
    assert [message["worker"] for message in heard(to_c)] == [3]
    assert share(both, a=2, b=1, c=1) == {"says": "it has 4 replicas"}


def test_shares_that_cannot_be_are_refused_and_change_nothing(both: HeadAndMember) -> None:
    assert share(both, a=1) == {"says": "it has not begun"}
    both.begin(least=2, most=3)
    heard(both.member)
    assert "allows 2 to 3 replicas; the hosts that are here would have 1" in share(both, a=1, c=1)["error"]
    assert "and not ['a']" in both.head.answer_command({"op": "resize", "replicas": 1, "hosts": ["a"]})["error"]
    assert both.ops() == []
    assert both.head.answer_command({"op": "resize", "replicas": 2}) == {"says": "it will have 2 replicas"}
    both.say(op="exited", exit=dataclasses.asdict(ended(2, host="b")))
    assert both.head.remote_hosts.room(1) == 1, "the slots are as they were"
