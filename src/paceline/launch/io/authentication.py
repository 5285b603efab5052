"""Authenticates connections between the hosts of a job by the job's token, before any message is read.

Until a connection has proved the token (`paceline.comm.messages.token_handshake`), it may use a few bytes and five
seconds. Only so many such connections may be open at a time. When there are more, the address that has most of them
loses its oldest: a flood drives out itself, and a host of the job needs only a moment. Refused connections are reported
to the user and do not affect the job.

After the proof, the connection is encrypted, and both sides check that no relay sits between them
(`paceline.comm.messages.secure_socket`). So what is read from it afterwards is what the other side has sent.

`AuthenticatedListener` accepts connections; `AuthenticatedConnection` is the connecting side: one attempt, which never
blocks.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from paceline.comm.messages.secure_socket import PROOF_BYTES, channel_proof, tls_context
from paceline.comm.messages.token_handshake import HANDSHAKE_TIMEOUT_S, TokenHandshake, TokenRefused
from paceline.comm.messages.unproved_connections import MAX_UNPROVED, ByAddress
from paceline.launch.io.event_loop import NOT_NOW, READ, WRITE, EventLoop

__all__ = ["AuthenticatedConnection", "AuthenticatedListener", "TokenExchange"]

ACCEPTS_AT_ONCE = 64  # before other sockets have their turn
BACKLOG = 4096  # connections that the system keeps until they are accepted
MAX_REPORTED = 3  # refusals of one address that are reported one by one
MAX_ADDRESSES = 256  # whose refusals are counted one by one
ACCEPT_RETRY_S = 1.0  # after a failed accept (no more files), because the listening socket would stay ready


class TokenExchange:
    """One connection during the handshake; afterwards it is encrypted and passed on, or closed.

    In `on_refused(reason, final)`, `final` means that the other side answered with a wrong proof. If it was slow or
    disconnected, `final` is False.
    """

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        loop: EventLoop,
        *,
        is_coordinator: bool,
        on_proved: Callable[[socket.socket], None],
        on_refused: Callable[[str, bool], None],
        on_encrypting: Callable[[], None] = lambda: None,
    ) -> None:
        self._sock, self._loop = sock, loop
        self._token, self._is_coordinator = token, is_coordinator
        self._handshake = TokenHandshake(token, is_head=is_coordinator)
        self._received = b""  # over TLS: the other side's proof that it sees the same connection
        self._on_proved, self._on_refused, self._on_encrypting = on_proved, on_refused, on_encrypting
        self._deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self.is_over = False
        sock.setblocking(False)
        loop.watch(sock, READ, self._read)
        self._send(self._handshake.greeting)

    def tick(self, now: float) -> None:
        if not self.is_over and now >= self._deadline:
            self._refuse(f"it did not prove the job's token within {HANDSHAKE_TIMEOUT_S:.0f} s")

    def close(self) -> None:
        """Drop the connection; no callback is called any more."""
        if not self.is_over:
            self.is_over = True
            self._loop.forget(self._sock)
            self._sock.close()

    def _read(self, _: int) -> None:
        """Handle a part of the token handshake."""
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
        if not self.is_over and self._handshake.wanted == 0:
            self._encrypt()

    def _encrypt(self) -> None:
        """The token is proved: begin TLS."""
        self._on_encrypting()
        self._loop.forget(self._sock)
        try:
            context = tls_context(is_head=self._is_coordinator)
            self._sock = context.wrap_socket(
                self._sock, server_side=self._is_coordinator, do_handshake_on_connect=False
            )
        except (OSError, ValueError, TokenRefused) as error:
            self._refuse(str(error))
            return
        self._loop.watch(self._sock, READ | WRITE, self._shake_hands)

    def _shake_hands(self, _: int) -> None:
        """Go on with TLS's handshake; at its end tell the other side what this one sees of the connection."""
        sock = self._sock
        if not isinstance(sock, ssl.SSLSocket):
            return
        try:
            sock.do_handshake()
            sock.send(channel_proof(self._token, sock, is_head=self._is_coordinator))
        except ssl.SSLWantReadError:
            self._loop.watch(sock, READ, self._shake_hands)
        except ssl.SSLWantWriteError:
            self._loop.watch(sock, READ | WRITE, self._shake_hands)
        except (OSError, ValueError, TokenRefused) as error:
            self._refuse(f"it does not encrypt as this host does ({getattr(error, 'strerror', None) or error})")
        else:
            self._loop.watch(sock, READ, self._compare)
            self._compare(READ)

    def _compare(self, _: int) -> None:
        """Read the other side's proof: with a relay between the two, it is another one."""
        sock = self._sock
        if not isinstance(sock, ssl.SSLSocket):
            return
        try:
            data = sock.recv(PROOF_BYTES - len(self._received))
        except NOT_NOW:
            return
        except OSError as error:
            self._refuse(error.strerror or str(error))
            return
        self._received += data
        if not data:
            self._refuse("it closed the connection before it was encrypted")
        elif len(self._received) == PROOF_BYTES:
            expected = channel_proof(self._token, sock, is_head=not self._is_coordinator)
            if hmac.compare_digest(self._received, expected):
                self.is_over = True
                self._loop.forget(sock)
                self._on_proved(sock)
            else:
                self._refuse("another program relays the connection", final=True)

    def _send(self, data: bytes) -> None:
        """Send without waiting: a new connection takes these few bytes at once unless something is wrong."""
        try:
            sent = self._sock.send(data)
        except OSError as error:
            self._refuse(error.strerror or str(error))
            return
        if sent < len(data):
            self._refuse("it does not read")

    def _refuse(self, reason: str, *, final: bool = False) -> None:
        if not self.is_over:
            self.close()
            self._on_refused(reason, final)


class AuthenticatedListener:
    """A listening socket; `on_proved(sock)` is called with each connection that has proved the token."""

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
        self._unproved = ByAddress[TokenExchange]()
        self._encrypting = dict[int, TokenExchange]()  # that have proved the token: they are not driven out
        self._num_accepted = 0
        self._num_refused: Counter[str] = Counter()  # by address
        self._accept_again_at: float | None = None
        self._is_closed = False
        sock.setblocking(False)
        sock.listen(BACKLOG)
        loop.watch(sock, READ, self._accept)

    def tick(self, now: float) -> None:
        for exchange in (*self._unproved.all(), *self._encrypting.values()):
            exchange.tick(now)
        if self._accept_again_at is not None and now >= self._accept_again_at:
            self._accept_again_at = None
            self._loop.watch(self._sock, READ, self._accept)

    def close(self, *, keep_listening: bool = False) -> socket.socket | None:
        """Close the socket and report how many connections were refused; safe to repeat. With `keep_listening` the
        socket is returned, and connections wait there for the next listener.
        """
        if self._is_closed:
            return None
        self._is_closed = True
        for exchange in (*self._unproved.all(), *self._encrypting.values()):
            exchange.close()
        self._loop.forget(self._sock)
        if not keep_listening:
            self._sock.close()
        for address, times in self._num_refused.items():
            if times > MAX_REPORTED:
                self._say(f"refused {times} connections from {address} in all")
        return self._sock if keep_listening else None

    def _accept(self, _: int) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, peer = self._sock.accept()
            except ConnectionError:
                continue  # it went away before it was let in
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._say(f"cannot accept a connection: {error.strerror}")
                self._loop.forget(self._sock)
                self._accept_again_at = time.monotonic() + ACCEPT_RETRY_S
                return
            self._examine(sock, str(peer[0]))
            if self._is_closed:
                return

    def _examine(self, sock: socket.socket, address: str) -> None:
        """Have a connection prove the token, and make room for it."""
        if len(self._unproved) >= MAX_UNPROVED:
            self._drive_out()
        self._num_accepted = number = self._num_accepted + 1

        def end(reason: str) -> None:
            self._forget(number)
            self._refuse(address, reason)

        def proved(encrypted: socket.socket) -> None:
            self._forget(number)
            self._on_proved(encrypted)

        exchange = TokenExchange(
            sock,
            self._token,
            self._loop,
            is_coordinator=True,
            on_proved=proved,
            on_refused=lambda reason, _: end(reason),
            on_encrypting=lambda: self._keep(number),
        )
        if not exchange.is_over:
            self._unproved.add(number, address, exchange)

    def _keep(self, number: int) -> None:
        """A connection has proved the token, and only encrypts yet."""
        exchange = self._unproved.pop(number)
        if exchange is not None:
            self._encrypting[number] = exchange

    def _forget(self, number: int) -> None:
        self._unproved.pop(number)
        self._encrypting.pop(number, None)

    def _drive_out(self) -> None:
        """Close the oldest connection of the address that has most of them."""
        address, exchange = self._unproved.pop_oldest()
        exchange.close()
        self._refuse(address, f"{MAX_UNPROVED} other connections have not proved the job's token yet")

    def _refuse(self, address: str, reason: str) -> None:
        if address not in self._num_refused and len(self._num_refused) >= MAX_ADDRESSES:
            address = "other addresses"
        self._num_refused[address] += 1
        if self._num_refused[address] <= MAX_REPORTED:
            self._say(f"refused a connection from {address}: {reason}")


CONNECT_S = 10.0


class AuthenticatedConnection:
    """Connects and proves the token; then calls `on_proved(sock)`, or `on_failed(reason, final)`.

    `final` means that the other side answered with a wrong proof. No callback is called before `begin`.
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
        self._exchange: TokenExchange | None = None
        self._connect_until = 0.0

    def begin(self, family: int, address: Any) -> None:
        """Start to connect to an address, as `socket.getaddrinfo` returns it."""
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
        elif self._exchange is not None:
            self._exchange.tick(now)

    def close(self) -> None:
        """Abandon an unfinished attempt; no callback is called any more."""
        if self._sock is not None:
            self._loop.forget(self._sock)
            self._sock.close()
            self._sock = None
        if self._exchange is not None:
            self._exchange.close()

    def _connected(self, _: int) -> None:
        sock = self._sock
        if sock is None:
            return
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(os.strerror(code))
            return
        self._sock = None
        self._exchange = TokenExchange(
            sock,
            self._token,
            self._loop,
            is_coordinator=False,
            on_proved=self._on_proved,
            on_refused=self._on_failed,
        )

    def _fail(self, reason: str) -> None:
        self.close()
        self._on_failed(reason, False)
