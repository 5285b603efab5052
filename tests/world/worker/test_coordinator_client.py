"""What a worker does with SIGTERM, in a process of its own: a request to leave, and the end where nobody is asked."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.comm.messages.json_channel import Channel
from paceline.elastic.lease import seconds_since_boot
from paceline.worker.membership import coordinator_client
from paceline.worker.membership.coordinator_client import CoordinatorClient

pytestmark = pytest.mark.timeout(30)

LIMIT_S = 20.0


class Worker:
    """A process that hears orders and does nothing else; `told` are its words to the head."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._said, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(0)
            ours.close()
            _be_a_worker(theirs, said)
        theirs.close()
        os.close(said)
        self.head = Channel(ours)

    def told(self, op: str) -> dict[str, Any]:
        while (message := self.head.receive())["op"] != op:
            pass
        return message

    def says_that_it_is_orphaned(self) -> None:
        ready, _, _ = select.select([self._said], [], [], LIMIT_S)
        assert ready and os.read(self._said, 1) == b"o"

    def ended_by(self) -> int:
        """The signal that has ended it."""
        pid, self.pid = self.pid, 0
        return os.WTERMSIG(os.waitpid(pid, 0)[1])

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.head.close()
        os.close(self._said)


def _be_a_worker(channel: socket.socket, said: int) -> None:
    try:
        coordinator_client = CoordinatorClient(Channel(channel), 0, silence_s=4.0)
        coordinator_client.begin(hears_sigterm=True)
        coordinator_client.tell("begun")
        coordinator_client.wait_for_change(0)  # nobody forms anything: it returns when the supervisor has gone
        os.write(said, b"o")
        signal.pause()  # as if it were in the middle of a long save
    finally:
        os._exit(0)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def test_sigterm_is_a_request_to_leave_and_after_the_head_has_said_end_it_is_the_end(worker: Worker) -> None:
    worker.told("begun")
    os.kill(worker.pid, signal.SIGTERM)
    worker.told("leaving")
    worker.head.send({"op": "end"})
    for _ in range(2):  # the first may have been on its way; before the second it has heard us
        worker.told("alive")
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.ended_by() == signal.SIGTERM


def test_sigterm_ends_a_worker_whose_supervisor_has_gone_at_once(worker: Worker) -> None:
    worker.told("begun")
    worker.head.close()
    worker.says_that_it_is_orphaned()
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.ended_by() == signal.SIGTERM


def test_a_worker_goes_on_as_long_as_it_may_and_then_ends_itself(worker: Worker) -> None:
    worker.told("begun")
    worker.head.send({"op": "until", "until": seconds_since_boot() + 3600.0})
    worker.told("alive")
    worker.head.send({"op": "until", "until": seconds_since_boot()})
    assert worker.ended_by() == signal.SIGKILL


def test_who_has_done_with_the_run_goes_on_as_long_as_its_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(coordinator_client.os, "kill", lambda pid, signum: killed.append(signum))
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours):
        one = CoordinatorClient(Channel(theirs), 0, silence_s=4.0)
        one._take({"op": "until", "until": seconds_since_boot() - 1.0})
        one.end_if_overdue()
        assert killed == [signal.SIGKILL]
        one.close()
        one.end_if_overdue()
        assert killed == [signal.SIGKILL]


class Clock:
    """Time passes only while somebody waits for a message; then the training thread says something, at `words`."""

    def __init__(self, *words: float) -> None:
        self.now, self.words, self.told = 100.0, [100.0 + at for at in words], list[float]()
        self.orders: Any = None

    def monotonic(self) -> float:
        return self.now

    def select(self, timeout: float) -> list[Any]:
        until = self.now + timeout + 1e-4  # a wait is never too short
        while self.words and self.words[0] <= until:
            self.now = self.words.pop(0)
            self.orders.tell("formed")
        self.now = until
        return []

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(self.now)
        if len(self.told) > 12:
            raise OSError("that is enough")

    def take(self) -> list[Any]:
        return []


@pytest.mark.parametrize("silence_s", [0.4, 2.0, 10.0])
def test_a_live_worker_is_heard_of_several_times_within_the_silence_that_ends_it(
    silence_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its training thread has spoken right after its last sign of life."""
    clock = Clock(0.01, 1.37)
    selector = SimpleNamespace(register=lambda *_: None, select=clock.select)
    monkeypatch.setattr(coordinator_client, "time", clock)
    monkeypatch.setattr(coordinator_client.selectors, "DefaultSelector", lambda: contextlib.nullcontext(selector))
    clock.orders = one = CoordinatorClient(clock, 0, silence_s=silence_s)  # type: ignore[arg-type]  # the clock is its channel
    one._listen(0)
    assert len(clock.told) > 12
    assert max(later - told for told, later in itertools.pairwise(clock.told)) <= silence_s / 4 + 1e-3
