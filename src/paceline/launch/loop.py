"""The one place where a supervisor waits: sockets that have something to say, each with the function to call."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

__all__ = ["READ", "WRITE", "Loop"]

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Loop:
    """Sockets and their callbacks. One thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Call `ready(events)` when the socket can be read or written; replaces what was asked for it before."""
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, ready)
        else:
            self._selector.register(sock, events, ready)

    def forget(self, sock: socket.socket) -> None:
        """Watch this socket no longer; to be called before it is closed."""
        if sock in self._selector.get_map():
            self._selector.unregister(sock)

    def turn(self, timeout_s: float) -> None:
        """Wait at most this long, then call what is ready."""
        for key, events in self._selector.select(timeout_s):
            # A callback may forget, close and even replace (same number) a socket that was ready in the same turn.
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.fileobj is key.fileobj:
                now.data(events & now.events)

    def close(self) -> None:
        self._selector.close()
