"""Connections that have proved nothing yet: their number is limited, and a flood drives out itself.

When there are more than `MAX_UNPROVED`, the address that has most of them loses its oldest. So silent connections lock
nobody out: a process that holds the secret needs a moment, and the oldest connection of a flood has had far longer.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable

__all__ = ["MAX_UNPROVED", "UnprovedConnections", "to_drive_out"]

MAX_UNPROVED = 512


def to_drive_out(connections: Iterable[tuple[int, str]]) -> int | None:
    """Return which connection, of (number, address) with the oldest first, makes room; None where there are none."""
    known = list(connections)
    if not known:
        return None
    most = Counter(address for _, address in known).most_common(1)[0][0]
    return next(number for number, address in known if address == most)


class UnprovedConnections:
    """The connections that threads are examining; for any thread."""

    def __init__(self, limit: int = MAX_UNPROVED) -> None:
        self._limit, self._lock, self._count = limit, threading.Lock(), 0
        self._open: OrderedDict[int, tuple[str, socket.socket]] = OrderedDict()

    def add(self, sock: socket.socket, address: str) -> int:
        """Count a connection in, and return its number; ends another one where there are too many."""
        driven_out: socket.socket | None = None
        with self._lock:
            if len(self._open) >= self._limit:
                number = to_drive_out((number, whose) for number, (whose, _) in self._open.items())
                driven_out = None if number is None else self._open.pop(number)[1]
            self._count += 1
            self._open[self._count] = address, sock
            number = self._count
        _end(driven_out)
        return number

    def remove(self, number: int) -> None:
        """A connection has proved itself, or is closed; safe to repeat."""
        with self._lock:
            self._open.pop(number, None)

    def close(self) -> None:
        """End all that are there: nobody is waited for any more."""
        with self._lock:
            ended = [sock for _, sock in self._open.values()]
            self._open.clear()
        for sock in ended:
            _end(sock)


def _end(sock: socket.socket | None) -> None:
    """Wake the thread that reads from a connection, which closes it."""
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
