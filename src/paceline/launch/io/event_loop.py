"""The supervisor's event loop (as asyncio's, but minimal), and non-blocking JSON message streams over sockets."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from paceline.comm.messages.json_channel import LineBuffer, encode

__all__ = ["NOT_NOW", "READ", "WRITE", "WRONG_FORM", "EventLoop", "MessageStream", "invalid_text"]

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class EventLoop:
    """Calls callbacks of sockets that are ready, in one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Call `ready(events)` when the socket can be read or written; this replaces its earlier callback."""
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, ready)
        else:
            self._selector.register(sock, events, ready)

    def forget(self, sock: socket.socket) -> None:
        """Stop watching this socket; must be called before it is closed. One that is closed is not watched."""
        if sock.fileno() >= 0 and sock in self._selector.get_map():
            self._selector.unregister(sock)

    def turn(self, timeout_s: float) -> None:
        """Wait at most this long for sockets to become ready, then call their callbacks."""
        for key, events in self._selector.select(timeout_s):
            # A callback may forget or close a socket that was ready in the same turn; a new one may have its number.
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.fileobj is key.fileobj:
                now.data(events & now.events)

    def close(self) -> None:
        self._selector.close()


CHUNK_BYTES = 1 << 16  # more than a record of TLS, so none is left half read
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# What reading a message of the wrong form raises: a field that is absent, or of another type or size.
WRONG_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


class PassedDescriptor(Protocol):
    """A socket or file that is passed with a message."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class MessageStream:
    """Sends and receives messages over a socket that it owns.

    `on_close(error)` is called at most once: with a ConnectionError if the other end closed the connection or is lost,
    with a ValueError if it sent something invalid and the connection was closed here. A message that `on_message`
    cannot read (`WRONG_FORM`) is invalid, too: it ends this connection, and nothing else.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: EventLoop,
        *,
        on_message: Callable[[dict[str, Any]], None],
        on_close: Callable[[Exception], None],
    ) -> None:
        self._sock, self._loop = sock, loop
        self._on_message, self._on_close = on_message, on_close
        self._lines = LineBuffer()
        self._outgoing: deque[tuple[bytes, Sequence[PassedDescriptor]]] = deque()
        self._is_blocked = False  # the system takes no more: wait until the socket can be written to
        self.closed = False
        self.last_received = time.monotonic()
        sock.setblocking(False)
        loop.watch(sock, READ, self._ready)

    def send(self, message: Mapping[str, Any], *, passing: Sequence[PassedDescriptor] = ()) -> None:
        """Send a message as soon as the other end takes it; the files `passing` go with it, and are closed here."""
        if self.closed:
            _close_all(passing)
            return
        self._outgoing.append((encode(message), passing))
        self._write()

    def flush(self, timeout_s: float) -> None:
        """Wait until the system has taken everything, the other end has closed, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while self._outgoing and not self.closed and (left := deadline - time.monotonic()) > 0:
            self._loop.turn(left)

    def release(self) -> socket.socket:
        """Stop using the socket and return it, still open: another stream may receive what comes from now on."""
        self.closed = True
        self._loop.forget(self._sock)
        self._drop()
        return self._sock

    def close(self) -> None:
        """Close this end; no callback is called any more."""
        if self.closed:
            return
        self.closed = True
        self._loop.forget(self._sock)
        self._sock.close()
        self._drop()

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._write()
        if events & READ and not self.closed:
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(CHUNK_BYTES)
        except NOT_NOW:
            return
        except OSError as error:
            self._lost(ConnectionError(error.strerror or str(error)))
            return
        if not data:
            self._lost(ConnectionError("it closed the connection"))
            return
        self.last_received = time.monotonic()
        messages = self._lines.feed(data)
        while not self.closed:
            try:
                message = next(messages, None)
            except ValueError as error:
                self._lost(error)
                return
            if message is None:
                return
            try:
                self._on_message(message)
            except WRONG_FORM as error:
                self._lost(ValueError(f"it sent an invalid message ({invalid_text(error)})"))
                return

    def _write(self) -> None:
        try:
            while self._outgoing:
                data, passing = self._outgoing[0]
                if passing:  # the files travel with the first byte of the message
                    sent = socket.send_fds(self._sock, [data], [one.fileno() for one in passing])
                    _close_all(passing)
                else:
                    sent = self._sock.send(data)
                self._outgoing.popleft()
                if sent < len(data):
                    self._outgoing.appendleft((data[sent:], ()))
        except NOT_NOW:
            pass
        except OSError:
            # The other end has closed, so drop what is unsent. Messages that it sent before are still to be read, and
            # reading reports the end.
            self._drop()
        if self._is_blocked != bool(self._outgoing):
            self._is_blocked = not self._is_blocked
            self._loop.watch(self._sock, READ | WRITE if self._is_blocked else READ, self._ready)

    def _drop(self) -> None:
        for _, passing in self._outgoing:
            _close_all(passing)
        self._outgoing.clear()

    def _lost(self, error: Exception) -> None:
        if not self.closed:
            self.close()
            self._on_close(error)


def invalid_text(error: BaseException) -> str:
    """Return what was wrong with a message, and where in our code that was found."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", at {frames[-1].name} line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error)[:200]}{where}"


def _close_all(passed: Sequence[PassedDescriptor]) -> None:
    for one in passed:
        with contextlib.suppress(OSError):
            one.close()
