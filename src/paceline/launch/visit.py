"""The other hosts' half of the meeting: one attempt to join the head."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.launch.door import Introduction
from paceline.launch.guests import SILENCE_S
from paceline.launch.link import Link
from paceline.launch.loop import WRITE, Loop
from paceline.launch.member import Member
from paceline.launch.terms import Terms

__all__ = ["Visit"]

CONNECT_S = 10.0


class Visit:
    """Connects, proves the token, says hello, and waits for a place: `member` when it has one, `failed` (why) when not.

    Where the head's name has several addresses, `number` chooses one, counted round.
    """

    def __init__(self, terms: Terms, loop: Loop, say: Callable[[str], None], *, number: int) -> None:
        self._terms, self._loop, self._say = terms, loop, say
        self.member: Member | None = None
        self.failed = ""
        self.final = False  # there is no use in trying again
        self._sock: socket.socket | None = None  # while it is connecting
        self._introduction: Introduction | None = None
        self._link: Link | None = None
        self._connect_until = time.monotonic() + CONNECT_S
        self._connect(number)

    @property
    def doing(self) -> str:
        """What is waited for."""
        if self._link is None:
            return f"connecting to the head at {self._terms.point}"
        return f"waiting with the head at {self._terms.point} for the other hosts"

    def tick(self, now: float) -> None:
        if self._sock is not None and now >= self._connect_until:
            self._fail(f"no answer within {CONNECT_S:.0f} s")
        elif self._introduction is not None:
            self._introduction.tick(now)
        if self._link is not None and self.member is None and now - self._link.heard > SILENCE_S:
            self._fail(f"the head said nothing for {SILENCE_S:.0f} s")

    def close(self) -> None:
        """Close what has not become a member's."""
        if self._sock is not None:
            self._loop.forget(self._sock)
            self._sock.close()
            self._sock = None
        if self._introduction is not None:
            self._introduction.close()
        if self._link is not None and self.member is None:
            self._link.close()

    def _connect(self, number: int) -> None:
        try:
            found = socket.getaddrinfo(*self._terms.at, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            self._fail(f"the name {self._terms.at[0]} is not known ({error.strerror})")
            return
        family, kind, protocol, _, address = found[number % len(found)]
        self._sock = socket.socket(family, kind, protocol)
        self._sock.setblocking(False)
        code = self._sock.connect_ex(address)
        if code in (0, errno.EINPROGRESS):
            self._loop.watch(self._sock, WRITE, self._connected)
        else:
            self._fail(os.strerror(code))

    def _connected(self, _: int) -> None:
        sock = self._sock
        if sock is None:
            return
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(os.strerror(code))
            return
        self._sock = None
        self._introduction = Introduction(
            sock, self._terms.token, self._loop, is_head=False, on_proved=self._proved, on_refused=self._fail
        )

    def _proved(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._address = str(sock.getsockname()[0])  # towards the head: so the other hosts reach this one too
        self._link = Link(sock, self._loop, on_message=self._said, on_close=self._closed)
        self._link.send(
            {"op": "hello", "host": self._terms.host, "address": self._address, "job": self._terms.essentials}
        )

    def _said(self, message: Mapping[str, Any]) -> None:
        if self.member is not None:
            self.member.head_said(message)
        elif message.get("op") == "refused":
            self._fail(str(message.get("reason")), final=not message.get("again"))
        elif message.get("op") == "welcome":
            self._become_member(message)
        elif message.get("op") != "ping":
            self._fail(f"the head said {message.get('op')!r} where a welcome was due", final=True)

    def _become_member(self, message: Mapping[str, Any]) -> None:
        if self._link is None:
            return
        try:
            self.member = Member(
                self._link,
                head=str(message["head"]),
                host=self._terms.host,
                address=self._address,
                host_index=int(message["host_index"]),
                ranks=tuple(map(int, message["ranks"])),
                slots=int(message["slots"]),
                attempt=int(message["attempt"]),
                run_dir=str(message["run_dir"]),
                say=self._say,
            )
        except (KeyError, TypeError, ValueError) as error:
            self._fail(f"the head's welcome makes no sense ({type(error).__name__}: {error})", final=True)

    def _closed(self, error: Exception) -> None:
        if self.member is not None:
            self.member.head_lost(str(error))
        else:
            self._fail(f"the head has gone: {error}")

    def _fail(self, reason: str, final: bool = False) -> None:
        if self.failed:
            return
        self.failed, self.final = reason, final
        self.close()
