"""A coordinator and another host without processes: each with the other end of its links, and fake local workers."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Mapping
from typing import Any

from paceline.comm.messages.json_channel import Channel
from paceline.events import Event
from paceline.launch.coordinator.coordinator import Coordinator
from paceline.launch.coordinator.host_agent import HostAgent
from paceline.launch.coordinator.remote_hosts import RemoteHost
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.launch.job.outcome import WorkerExit
from paceline.launch.job.restart_plan import StoredSnapshot
from paceline.plan.job import Job

__all__ = ["WELL", "FakeLocalWorkers", "HeadAndMember", "MemberAndHead", "ended", "heard", "told"]

WELL = WorkerExit(
    worker=0, host="a", pid=10, exit_code=0, signal=None, peak_memory_bytes=1, error=None, sent_by_us=False
)


class FakeLocalWorkers:
    """Notes what it is told."""

    def __init__(self, *workers: int) -> None:
        self.alive: dict[int, Any] = dict.fromkeys(workers)
        self.told: list[Any] = []
        self.grace_s = 30.0
        self.have_all_ended = False
        self.snapshots: tuple[StoredSnapshot, ...] = ()

    def terminate(self, grace_s: float) -> None:
        self.told.append(("terminate", grace_s))

    def kill(self) -> None:
        self.told.append("kill")

    def kill_worker(self, worker: int) -> None:
        self.told.append(("kill_worker", worker))

    def send(self, worker: int, message: Mapping[str, Any]) -> None:
        self.told.append((worker, message))

    def add(self, worker: int, *, workers: int, incarnation: int) -> None:
        self.told.append(("add", worker, workers))

    def drop_state(self, worker: int) -> None:
        self.told.append(("drop_state", worker))


class HeadAndMember:
    """A head with workers 0 and 1, and the other end of its link to a member with worker 2. `more`: of the Job."""

    def __init__(self, **more: Any) -> None:
        self.loop, self.local_workers, self.said, self.events = (
            EventLoop(),
            FakeLocalWorkers(0, 1),
            list[str](),
            list[Event](),
        )
        self.others: list[Channel] = []
        self.remote_host, self.member = self.come("b", workers={2})
        fields: dict[str, Any] = {"host": "a", "address": "10.0.0.1", "attempt": 1, "run_dir": "runs/r"}
        job = Job(workers=3, hosts=2, head="a:29500", **more)
        self.head = Coordinator(
            job=job, remote_hosts=[self.remote_host], admission=None, say=self.said.append, **fields
        )
        self.head.lead(self.local_workers, self.events.append)  # type: ignore[arg-type]  # pretended local workers

    def come(self, host: str, *, index: int = 1, workers: set[int] | None = None) -> tuple[RemoteHost, Channel]:
        """A host with room for one worker, and the other end of its link."""
        ours, theirs = socket.socketpair()
        link = MessageStream(
            ours,
            self.loop,
            on_message=lambda message: self.head.remote_hosts.on_message(remote_host, message),
            on_close=lambda error: self.head.remote_hosts.lose(remote_host, str(error)),
        )
        fields: dict[str, Any] = {"host": host, "address": f"10.0.0.{index + 1}", "index": index}
        remote_host = RemoteHost(link=link, slots=1, workers=workers or set(), **fields)
        self.others.append(Channel(theirs))
        return remote_host, self.others[-1]

    def begin(self, *, least: int, most: int) -> None:
        """The workers say that their plan is elastic, join the first generation, and are at work."""
        for worker in range(3):
            self.notice(worker, "elastic", least=least, most=most, workers_each=1)
        for worker in range(3):
            self.notice(worker, "begun")
            self.notice(worker, "formed", generation=0, noticed=time.time())

    def notice(self, worker: int, op: str, *, step: int = 0, **fields: Any) -> None:
        self.head.request(worker, {"op": op, "step": step, **fields})

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
        return [message["op"] for message in heard(self.member)]

    def close(self) -> None:
        self.head.close()
        for other in self.others:
            other.close()
        self.loop.close()


def ended(worker: int, exit_code: int | None = 0, **fields: Any) -> WorkerExit:
    return dataclasses.replace(WELL, worker=worker, exit_code=exit_code, **fields)


def heard(member: Channel) -> list[Mapping[str, Any]]:
    """All that has been said to a member by now."""
    member._sock.setblocking(False)
    found: list[Mapping[str, Any]] = []
    try:
        while True:
            found.append(member.receive())
    except (ConnectionError, OSError):
        return found


def told(member: Channel) -> Mapping[str, Any]:
    """The member's next message that is no ping."""
    while (message := member.receive())["op"] == "ping":
        pass
    return message


class MemberAndHead:
    """A member with worker 2, and the other end of its link to the head."""

    def __init__(self, *, silence_s: float = 10.0) -> None:
        self.loop, self.local_workers, self.said = EventLoop(), FakeLocalWorkers(2), list[str]()
        ours, theirs = socket.socketpair()
        link = MessageStream(
            ours,
            self.loop,
            on_message=lambda message: self.member.on_message(message),
            on_close=lambda error: self.member.coordinator_lost(str(error)),
        )
        fields: dict[str, Any] = {"host": "b", "address": "10.0.0.2", "host_index": 1, "attempt": 1, "run_dir": "r"}
        fields["silence_s"] = silence_s
        joined = {"token": b"t" * 16, "loop": self.loop, "hello": lambda address: {"op": "hello", "address": address}}
        self.member = HostAgent(
            link, coordinator="a (10.0.0.1)", ranks=[2], slots=1, say=self.said.append, **joined, **fields
        )
        self.head = Channel(theirs)

    def lead(self) -> None:
        """The member has its workers now."""
        self.member.lead(self.local_workers, list[Event]().append)  # type: ignore[arg-type]  # pretended local workers

    def close(self) -> None:
        self.member.close()
        self.head.close()
        self.loop.close()
