"""How a host whose coordinator is lost finds the one that takes over, or takes over itself.

The register in the run's directory says who leads (`paceline.launch.coordinator.head_register`). A host that has lost
the coordinator reads it again and again, and returns to the one that has taken over. The hosts take over in the order
of their indices: each waits a little longer than the one before it, and first looks whether the coordinator answers
after all. A host that the coordinator had given up before, by what the register says, may not return or take over.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import PlanError
from paceline.launch.coordinator.head_register import HeadRecord, HeadRegister
from paceline.launch.io.authentication import AuthenticatedConnection
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.plan.job import head_address

__all__ = ["HeadSearch"]

LOOK_S = 0.1  # between two looks at the register
FIRST_TURN_S, NEXT_TURN_S = 0.1, 3.0  # until the first host in order takes over, and each one after it
PROBE_S = 1.0  # a coordinator that is there answers sooner


class HeadSearch:
    """Call `tick` often. `found(link, message)` gets the connection to the coordinator that has taken over, and its
    welcome; `failed` says why there is none."""

    def __init__(
        self,
        register: HeadRegister,
        *,
        run: str,
        epoch: int,
        host_index: int,
        token: bytes,
        loop: EventLoop,
        limit_s: float,
        hello: Callable[[str], Mapping[str, Any]],
        found: Callable[[MessageStream, Mapping[str, Any]], None],
        prepare: Callable[[], None],
        take_over: Callable[[HeadRecord], None],
        on_message: Callable[[Mapping[str, Any]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """`run` and `epoch` name what this host knows; `hello(address)` says what it tells the other coordinator.
        `take_over(record)` has this host take over from the one that is in the record, and `prepare()` says that it may
        be about to.
        """
        self._register, self._run, self._epoch, self._host_index = register, run, epoch, host_index
        self._token, self._loop, self._hello, self._found, self._take_over = token, loop, hello, found, take_over
        self._prepare, self._on_message, self._on_lost = prepare, on_message, on_lost
        self.failed = ""
        now = time.monotonic()
        self._give_up_at, self._look_at = now + limit_s, now
        self._turn_at: float | None = None
        self._probe_until: float | None = None
        self._call: AuthenticatedConnection | None = None
        self._link: MessageStream | None = None
        self._is_found = False

    def tick(self, now: float) -> None:
        if self.failed or self._is_found:
            return
        if now >= self._give_up_at:
            self._fail("no other coordinator has taken over")
            return
        if self._call is not None:
            self._call.tick(now)
            if self._probe_until is not None and now >= self._probe_until:
                self._unanswered("")
        if now >= self._look_at and self._call is None and self._link is None:
            self._look_at = now + LOOK_S
            self._look(now)

    def close(self) -> None:
        """Stop looking, unless it has ended."""
        if self._call is not None:
            self._call.close()
        if self._link is not None and not self._is_found:
            self._link.close()

    def _look(self, now: float) -> None:
        record = self._register.read()
        if record is None:
            return
        order = sorted(int(index) for index, _, _ in record.state["hosts"])
        if record.run != self._run or self._host_index not in order:
            self._fail("this host had been given up before")
            return
        if record.epoch > self._epoch:
            self._connect(record, self._proved, self._closed)
            return
        if self._turn_at is None:
            place = order.index(self._host_index)
            self._turn_at = now + FIRST_TURN_S + NEXT_TURN_S * place
            if place == 0:
                self._prepare()
        if now >= self._turn_at:
            self._turn_at = now + NEXT_TURN_S * len(order)
            self._probe_until = now + PROBE_S
            self._connect(record, self._answers, self._unanswered)

    def _connect(
        self, record: HeadRecord, proved: Callable[[socket.socket], None], failed: Callable[[str], None]
    ) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(*head_address(record.address), type=socket.SOCK_STREAM)[0]
        except (OSError, PlanError) as error:
            failed(str(error))
            return
        self._call = AuthenticatedConnection(
            self._token, self._loop, on_proved=proved, on_failed=lambda reason, final: failed(reason)
        )
        self._call.begin(family, address)

    def _answers(self, sock: socket.socket) -> None:
        """The coordinator is there: it has given this host up, or will take a moment to notice the loss."""
        sock.close()
        self._call = self._probe_until = None

    def _unanswered(self, reason: str) -> None:
        if self._call is not None:
            self._call.close()
        self._call = self._probe_until = None
        record = self._register.read()
        if record is not None and (record.run, record.epoch) == (self._run, self._epoch):
            self._take_over(record)

    def _proved(self, sock: socket.socket) -> None:
        self._call = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = str(sock.getsockname()[0])
        self._link = MessageStream(sock, self._loop, on_message=self._receive, on_close=self._lost)
        self._link.send(self._hello(address))

    def _closed(self, reason: str) -> None:
        if self._call is not None:
            self._call.close()
        self._call = None  # it may listen in a moment

    def _receive(self, message: Mapping[str, Any]) -> None:
        if self._is_found:
            self._on_message(message)
        elif message.get("op") == "refused":
            self._fail(str(message.get("reason")))
        elif message.get("op") == "welcome" and self._link is not None:
            self._is_found = True
            self._found(self._link, message)

    def _lost(self, error: Exception) -> None:
        if self._is_found:
            self._on_lost(str(error))
        self._link = None

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self.close()
