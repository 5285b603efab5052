"""Connections that have proved nothing yet: their number is limited, and a flood drives out itself.

When there are more than `MAX_UNPROVED`, the address that has most of them loses its oldest. So silent connections lock
nobody out: a process that holds the secret needs a moment, and the oldest connection of a flood has had far longer.

A stranger must cost less than it costs itself to come. So no connection is looked for among all others, and none gets
a thread before it has proved the secret: `TokenGate` examines them all in one.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.comm.messages.token_handshake import HANDSHAKE_TIMEOUT_S, TokenHandshake, TokenRefused

__all__ = ["MAX_UNPROVED", "ByAddress", "TokenGate"]

MAX_UNPROVED = 512
ACCEPTS_AT_ONCE = 64  # before other sockets have their turn
TURN_S = 0.05  # between two looks at the clock
NOT_NOW = (BlockingIOError, InterruptedError)

T = TypeVar("T")


class ByAddress(Generic[T]):
    """Connections by number, and by address with the oldest first."""

    def __init__(self) -> None:
        self._by_address: dict[str, OrderedDict[int, T]] = {}
        self._addresses: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, number: int, address: str, connection: T) -> None:
        self._addresses[number] = address
        self._by_address.setdefault(address, OrderedDict())[number] = connection

    def pop(self, number: int) -> T | None:
        """Take a connection out; None where it is not there."""
        address = self._addresses.pop(number, None)
        if address is None:
            return None
        same = self._by_address[address]
        found = same.pop(number)
        if not same:
            del self._by_address[address]
        return found

    def pop_oldest(self) -> tuple[str, T]:
        """Take out the oldest connection of the address that has most of them; KeyError where there is none."""
        if not self._by_address:
            raise KeyError("there is no connection")
        address = max(self._by_address, key=lambda one: len(self._by_address[one]))
        number = next(iter(self._by_address[address]))
        found = self._by_address[address][number]
        self.pop(number)
        return address, found

    def all(self) -> list[T]:
        """Return the connections, in no order."""
        return [one for same in self._by_address.values() for one in same.values()]


class _Unproved:
    """A connection on its way through the gate."""

    __slots__ = ("address", "handshake", "number", "sock")

    def __init__(self, sock: socket.socket, address: str, number: int, secret: bytes) -> None:
        self.sock, self.address, self.number = sock, address, number
        self.handshake = TokenHandshake(secret, is_head=True)


class TokenGate:
    """Accepts connections at a listening socket, which it owns, in a thread. Each one that has proved the secret goes
    to `admit(sock)`, in a thread of its own; `refused(address, reason)` hears of the others."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        *,
        admit: Callable[[socket.socket], None],
        refused: Callable[[str, str], None] = lambda _address, _reason: None,
    ) -> None:
        self._listener, self._secret, self._admit, self._say_refused = listener, secret, admit, refused
        self._unproved = ByAddress[_Unproved]()
        self._deadlines = deque[tuple[float, int]]()
        self._num_accepted = 0
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        threading.Thread(target=self._serve, name="paceline-gate", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more, and end what has not proved the secret."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(TURN_S):
                if key.data is None:
                    self._accept()
                elif key.data.sock.fileno() >= 0:  # it may have been driven out in this turn
                    self._read(key.data)
            now = time.monotonic()
            while self._deadlines and self._deadlines[0][0] <= now:
                late = self._unproved.pop(self._deadlines.popleft()[1])
                if late is not None:
                    self._end(late, f"it did not prove the secret within {HANDSHAKE_TIMEOUT_S:.0f} s")
        for one in self._unproved.all():
            one.sock.close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, peer = self._listener.accept()
            except NOT_NOW:
                return
            except ConnectionError:
                continue  # it went away before it was let in
            except OSError:  # no more files, or the listener was closed
                if len(self._unproved):
                    self._drive_out()
                elif not self._is_closed:
                    time.sleep(TURN_S)
                return
            self._examine(sock, str(peer[0]) if peer else "")

    def _examine(self, sock: socket.socket, address: str) -> None:
        if len(self._unproved) >= MAX_UNPROVED:
            self._drive_out()
        self._num_accepted += 1
        one = _Unproved(sock, address, self._num_accepted, self._secret)
        sock.setblocking(False)
        try:
            sock.send(one.handshake.greeting)
        except OSError as error:
            sock.close()
            self._refused(address, error.strerror or str(error))
            return
        self._unproved.add(one.number, address, one)
        self._deadlines.append((time.monotonic() + HANDSHAKE_TIMEOUT_S, one.number))
        self._selector.register(sock, selectors.EVENT_READ, one)

    def _read(self, one: _Unproved) -> None:
        try:
            data = one.sock.recv(one.handshake.wanted)
            if not data:
                raise ConnectionResetError("it closed the connection")
            one.sock.send(one.handshake.feed(data))
        except NOT_NOW:
            return
        except TokenRefused as refused:
            with contextlib.suppress(OSError):
                one.sock.send(refused.farewell)
            self._end(one, str(refused))
        except OSError as error:
            self._end(one, error.strerror or str(error))
        else:
            if one.handshake.wanted == 0:
                self._let_in(one)

    def _let_in(self, one: _Unproved) -> None:
        self._unproved.pop(one.number)
        self._selector.unregister(one.sock)
        one.sock.setblocking(True)
        try:
            threading.Thread(target=self._admit, args=(one.sock,), daemon=True).start()
        except RuntimeError:  # no more threads
            one.sock.close()

    def _drive_out(self) -> None:
        self._end(self._unproved.pop_oldest()[1], f"{MAX_UNPROVED} other connections have not proved the secret yet")

    def _refused(self, address: str, reason: str) -> None:
        with contextlib.suppress(Exception):  # stderr is gone, or a disk is full: the gate has to stay open
            self._say_refused(address, reason)

    def _end(self, one: _Unproved, reason: str) -> None:
        self._unproved.pop(one.number)
        self._selector.unregister(one.sock)
        one.sock.close()
        self._refused(one.address, reason)
