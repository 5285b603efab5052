"""The door of a job on several hosts: lets in who proves the job's token, and nobody else.

A connection is worth nothing until it has proved the token (`paceline.comm.token`): until then it may hold a few
bytes and five seconds, and never more than a few such connections at a time. Strangers are told to the user and
change nothing for the job.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable

from paceline.comm.token import HANDSHAKE_TIMEOUT_S, Handshake, Refused
from paceline.launch.loop import READ, Loop

__all__ = ["Door", "Introduction"]

MOST_AT_ONCE = 32  # connections that have not proved anything yet
SHOWN = 3  # refusals of one address that are told one by one
PAUSE_S = 1.0  # after an accept that failed (no more files): the listening socket would stay ready


class Introduction:
    """One connection on its way through the handshake; then it is handed on, or closed.

    `on_refused(reason, final)`: `final` when the other side answered and is the wrong one, not when it was slow or
    went away.
    """

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        loop: Loop,
        *,
        is_head: bool,
        on_proved: Callable[[socket.socket], None],
        on_refused: Callable[[str, bool], None],
    ) -> None:
        self._sock, self._loop = sock, loop
        self._handshake = Handshake(token, is_head=is_head)
        self._on_proved, self._on_refused = on_proved, on_refused
        self._deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self.over = False
        sock.setblocking(False)
        loop.watch(sock, READ, self._read)
        self._send(self._handshake.greeting)

    def tick(self, now: float) -> None:
        if not self.over and now >= self._deadline:
            self._refuse(f"it did not prove the job's token within {HANDSHAKE_TIMEOUT_S:.0f} s")

    def close(self) -> None:
        """Drop the connection; nothing is called any more."""
        if not self.over:
            self.over = True
            self._loop.forget(self._sock)
            self._sock.close()

    def _read(self, _: int) -> None:
        try:
            data = self._sock.recv(self._handshake.wanted)
            if not data:
                self._refuse("it closed the connection before it proved the job's token")
                return
            self._send(self._handshake.feed(data))
        except (BlockingIOError, InterruptedError):
            return
        except Refused as refused:
            with contextlib.suppress(OSError):
                self._sock.send(refused.farewell)
            self._refuse(str(refused), final=True)
            return
        except OSError as error:
            self._refuse(error.strerror or str(error))
            return
        if not self.over and self._handshake.wanted == 0:
            self.over = True
            self._loop.forget(self._sock)
            self._on_proved(self._sock)

    def _send(self, data: bytes) -> None:
        """A fresh connection takes these few bytes at once, or it is not worth waiting for."""
        try:
            sent = self._sock.send(data)
        except OSError as error:
            self._refuse(error.strerror or str(error))
            return
        if sent < len(data):
            self._refuse("it does not read")

    def _refuse(self, reason: str, *, final: bool = False) -> None:
        if not self.over:
            self.close()
            self._on_refused(reason, final)


class Door:
    """A listening socket; `on_proved(sock)` gets each connection that has proved the token."""

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        loop: Loop,
        *,
        on_proved: Callable[[socket.socket], None],
        say: Callable[[str], None],
    ) -> None:
        self._sock, self._token, self._loop = sock, token, loop
        self._on_proved, self._say = on_proved, say
        self._waiting: list[Introduction] = []
        self._refused: Counter[str] = Counter()  # by address
        self._open_again_at: float | None = None
        self._is_closed = False
        sock.setblocking(False)
        loop.watch(sock, READ, self._accept)

    def tick(self, now: float) -> None:
        for introduction in self._waiting:
            introduction.tick(now)
        self._waiting = [introduction for introduction in self._waiting if not introduction.over]
        if self._open_again_at is not None and now >= self._open_again_at:
            self._open_again_at = None
            self._loop.watch(self._sock, READ, self._accept)

    def close(self, *, stays_open: bool = False) -> socket.socket | None:
        """Close it, and say how many were refused; safe to repeat. `stays_open`: the listening socket is returned, and
        whoever comes waits there for the next door."""
        if self._is_closed:
            return None
        self._is_closed = True
        for introduction in self._waiting:
            introduction.close()
        self._loop.forget(self._sock)
        if not stays_open:
            self._sock.close()
        for address, times in self._refused.items():
            if times > SHOWN:
                self._say(f"refused {times} connections from {address} in all")
        return self._sock if stays_open else None

    def _accept(self, _: int) -> None:
        try:
            sock, peer = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            self._say(f"cannot accept a connection: {error.strerror}")
            self._loop.forget(self._sock)
            self._open_again_at = time.monotonic() + PAUSE_S
            return
        address = str(peer[0])
        if sum(not introduction.over for introduction in self._waiting) >= MOST_AT_ONCE:
            sock.close()
            self._refuse(address, f"{MOST_AT_ONCE} others are being asked for the token")
            return
        introduction = Introduction(
            sock,
            self._token,
            self._loop,
            is_head=True,
            on_proved=self._on_proved,
            on_refused=lambda reason, _: self._refuse(address, reason),
        )
        self._waiting.append(introduction)

    def _refuse(self, address: str, reason: str) -> None:
        self._refused[address] += 1
        if self._refused[address] <= SHOWN:
            self._say(f"refused a connection from {address}: {reason}")
