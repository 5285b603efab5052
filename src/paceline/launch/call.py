"""A connection to another host that proves the job's token: one attempt, which never blocks."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from paceline.launch.door import Introduction
from paceline.launch.loop import WRITE, Loop

__all__ = ["Call"]

CONNECT_S = 10.0


class Call:
    """Connects and proves the token; then `on_proved(sock)` gets the socket, or `on_failed(reason, final)` is told why
    not: `final` where the other side answered and is the wrong one. Nothing is called before `begin`."""

    def __init__(
        self,
        token: bytes,
        loop: Loop,
        *,
        on_proved: Callable[[socket.socket], None],
        on_failed: Callable[[str, bool], None],
    ) -> None:
        self._token, self._loop, self._on_proved, self._on_failed = token, loop, on_proved, on_failed
        self._sock: socket.socket | None = None  # while it is connecting
        self._introduction: Introduction | None = None
        self._connect_until = 0.0

    def begin(self, family: int, address: Any) -> None:
        """Try to reach a stream socket's address, as `socket.getaddrinfo` gives it."""
        self._connect_until = time.monotonic() + CONNECT_S
        self._sock = sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code in (0, errno.EINPROGRESS):
            self._loop.watch(sock, WRITE, self._connected)
        else:
            self._fail(os.strerror(code))

    def tick(self, now: float) -> None:
        if self._sock is not None and now >= self._connect_until:
            self._fail(f"no answer within {CONNECT_S:.0f} s")
        elif self._introduction is not None:
            self._introduction.tick(now)

    def close(self) -> None:
        """Give up what has not come to its end; nothing is called any more."""
        if self._sock is not None:
            self._loop.forget(self._sock)
            self._sock.close()
            self._sock = None
        if self._introduction is not None:
            self._introduction.close()

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
            sock,
            self._token,
            self._loop,
            is_head=False,
            on_proved=self._on_proved,
            on_refused=self._on_failed,
        )

    def _fail(self, reason: str) -> None:
        self.close()
        self._on_failed(reason, False)
