"""Admits to a job on several hosts only connections that prove the job's token.

Before that (`paceline.comm.messages.token_handshake`) a connection may use a few bytes and five seconds, and only a few
such connections may be open at a time. Refused strangers are reported to the user and do not affect the job.

`AuthenticatedConnection` is the connecting side: one attempt, which never blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from paceline.comm.messages.token_handshake import HANDSHAKE_TIMEOUT_S, TokenHandshake, TokenRefused
from paceline.launch.io.event_loop import READ, WRITE, EventLoop

__all__ = ["AuthenticatedConnection", "AuthenticatedListener", "TokenExchange"]

MOST_AT_ONCE = 32  # connections that have not proved anything yet
SHOWN = 3  # refusals of one address that are told one by one
PAUSE_S = 1.0  # after an accept that failed (no more files): the listening socket would stay ready


class TokenExchange:
    """One connection during the handshake; then it is handed on, or closed.

    `on_refused(reason, final)`: `final` if the other side answered and is the wrong one, not if it was slow or
    disconnected.
    """

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        loop: EventLoop,
        *,
        is_head: bool,
        on_proved: Callable[[socket.socket], None],
        on_refused: Callable[[str, bool], None],
    ) -> None:
        self._sock, self._loop = sock, loop
        self._handshake = TokenHandshake(token, is_head=is_head)
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
        except TokenRefused as refused:
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


class AuthenticatedListener:
    """A listening socket; `on_proved(sock)` gets each connection that has proved the token."""

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        loop: EventLoop,
        *,
        on_proved: Callable[[socket.socket], None],
        say: Callable[[str], None],
    ) -> None:
        self._sock, self._token, self._loop = sock, token, loop
        self._on_proved, self._say = on_proved, say
        self._waiting: list[TokenExchange] = []
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

    def close(self, *, keep_listening: bool = False) -> socket.socket | None:
        """Close the socket and report how many connections were refused; safe to repeat. With `keep_listening` the
        socket is returned, and connections wait there for the next listener.
        """
        if self._is_closed:
            return None
        self._is_closed = True
        for introduction in self._waiting:
            introduction.close()
        self._loop.forget(self._sock)
        if not keep_listening:
            self._sock.close()
        for address, times in self._refused.items():
            if times > SHOWN:
                self._say(f"refused {times} connections from {address} in all")
        return self._sock if keep_listening else None

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
        introduction = TokenExchange(
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


CONNECT_S = 10.0


class AuthenticatedConnection:
    """Connects and proves the token; then calls `on_proved(sock)`, or `on_failed(reason, final)`.

    `final` means that the other side answered and is the wrong one. Nothing is called before `begin`.
    """

    def __init__(
        self,
        token: bytes,
        loop: EventLoop,
        *,
        on_proved: Callable[[socket.socket], None],
        on_failed: Callable[[str, bool], None],
    ) -> None:
        self._token, self._loop, self._on_proved, self._on_failed = token, loop, on_proved, on_failed
        self._sock: socket.socket | None = None  # while it is connecting
        self._introduction: TokenExchange | None = None
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
        self._introduction = TokenExchange(
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
