"""The other hosts' half of the meeting: one attempt to join the head."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from paceline.launch.call import Call
from paceline.launch.carrying import Carrying
from paceline.launch.guests import SILENCE_S
from paceline.launch.link import Link
from paceline.launch.loop import Loop
from paceline.launch.member import Member
from paceline.launch.terms import Terms

__all__ = ["Visit"]


class Visit:
    """Connects, proves the token, says hello, and waits for a place: `member` when it has one, `failed` (why) when not.

    Where the head's name has several addresses, `number` chooses one, counted round. `host_index`: this host had it,
    and all begin again.
    """

    def __init__(
        self,
        terms: Terms,
        loop: Loop,
        say: Callable[[str], None],
        *,
        number: int,
        carrying: Carrying | None,
        host_index: int | None,
    ) -> None:
        self._terms, self._loop, self._say = terms, loop, say
        self._carrying, self._host_index = carrying, host_index
        self.member: Member | None = None
        self.failed = ""
        self.final = False  # there is no use in trying again
        self._call = Call(terms.token, loop, on_proved=self._proved, on_failed=self._fail)
        self._link: Link | None = None
        self._connect(number)

    @property
    def doing(self) -> str:
        """What is waited for."""
        if self._link is None:
            return f"connecting to the head at {self._terms.point}"
        return f"waiting with the head at {self._terms.point} for the other hosts"

    def tick(self, now: float) -> None:
        self._call.tick(now)
        if self._link is not None and self.member is None and now - self._link.heard > SILENCE_S:
            self._fail(f"the head said nothing for {SILENCE_S:.0f} s")

    def close(self) -> None:
        """Close what has not become a member's."""
        self._call.close()
        if self._link is not None and self.member is None:
            self._link.close()

    def _connect(self, number: int) -> None:
        try:
            found = socket.getaddrinfo(*self._terms.at, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            self._fail(f"the name {self._terms.at[0]} is not known ({error.strerror})")
            return
        family, _, _, _, address = found[number % len(found)]
        self._call.begin(family, address)

    def _proved(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._address = str(sock.getsockname()[0])  # towards the head: so the other hosts reach this one too
        self._link = Link(sock, self._loop, on_message=self._said, on_close=self._closed)
        port = 0
        if self._carrying is not None:
            self._carrying.open(self._address)
            port = self._carrying.port
        who = {"host": self._terms.host, "address": self._address, "port": port, "host_index": self._host_index}
        self._link.send({"op": "hello", **who, "job": self._terms.essentials})

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
                silence_s=self._terms.job.silence_s,
                say=self._say,
                doors={int(index): (str(host), int(port)) for index, host, port in message["doors"]},
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
