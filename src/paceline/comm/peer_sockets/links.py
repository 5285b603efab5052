"""Moves bytes between the members of a group over their connections; one thread serves all of them.

A message has a header of 16 bytes (tag and length), and the bytes follow. Nothing else is ever read from a connection.
A receive names a peer and a tag; messages of one tag arrive in the order in which they were sent. A message that nobody
expects yet waits in memory. A send is begun by its caller, and the thread goes on with what the system did not take.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

__all__ = ["LinkTransfer", "PeerLinks", "PeerLost"]

HEADER = struct.Struct("<qQ")  # tag, number of bytes
MAX_BYTES = 1 << 42  # of a message
READ_BYTES = 8 << 20  # from one connection, before the next one has its turn
BUFFER_BYTES = 4 << 20  # of the system, for each connection
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class PeerLost(RuntimeError):
    """The connection to a peer has ended."""


class LinkTransfer:
    """A message under way. `error`: why it failed."""

    __slots__ = ("error", "is_done", "left")

    def __init__(self, views: Iterable[memoryview]) -> None:
        self.left: deque[memoryview] = deque(view for view in views if view.nbytes)
        self.is_done, self.error = False, ""


class _Link:
    """The connection to one peer, for the thread; `lock` guards everything in it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.lock, self.end = sock, threading.Lock(), ""
        self.outgoing: deque[LinkTransfer] = deque()
        self.expected: defaultdict[int, deque[LinkTransfer]] = defaultdict(deque)
        self.arrived: defaultdict[int, deque[bytearray]] = defaultdict(deque)
        self.header = bytearray(HEADER.size)
        self.to_read = memoryview(self.header)
        self.current: LinkTransfer | bytearray | None = None  # what `to_read` belongs to; None: the header
        self.tag = 0


class PeerLinks:
    """The connections of one member to the others; any thread may use it."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._news = threading.Condition()
        self._links = {peer: _Link(sock) for peer, sock in sockets.items()}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._blocked: set[int] = set()  # peers whose connections have to be watched for writing, too
        self._is_closed = False
        for sock in (self._wake, self._woken, *sockets.values()):
            sock.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for peer, link in self._links.items():
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    link.sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
            self._selector.register(link.sock, selectors.EVENT_READ, peer)
        _open.add(self)
        self._thread = threading.Thread(target=self._serve, name="paceline-peers", daemon=True)
        self._thread.start()

    def send(self, peer: int, data: memoryview, *, tag: int) -> LinkTransfer:
        """Begin to send; the bytes must not change until it is done."""
        transfer, link = LinkTransfer((memoryview(HEADER.pack(tag, data.nbytes)), data)), self._links[peer]
        with link.lock:
            if link.end:
                return self._ended(transfer, link.end)
            link.outgoing.append(transfer)
            if len(link.outgoing) == 1:
                self._write(peer, link)
        return transfer

    def receive(self, peer: int, into: memoryview, *, tag: int) -> LinkTransfer:
        """Begin to receive the next message of this tag into `into`, whose length it must have."""
        transfer, link = LinkTransfer((into,)), self._links[peer]
        with link.lock:
            waiting = link.arrived.get(tag)
            if waiting:
                found = waiting.popleft()
                if not waiting:
                    del link.arrived[tag]
                if len(found) != into.nbytes:
                    return self._ended(transfer, _wrong_length(peer, len(found), into.nbytes))
                if found:
                    into[:] = found
                transfer.is_done = True
            elif link.end:
                return self._ended(transfer, link.end)
            else:
                link.expected[tag].append(transfer)
        return transfer

    def wait(self, transfer: LinkTransfer, limit_s: float | None) -> bool:
        """Return whether a transfer is done, at the latest after `limit_s`. Raises PeerLost."""
        if not transfer.is_done:
            ends = None if limit_s is None else time.monotonic() + limit_s
            with self._news:
                while not transfer.is_done:
                    left_s = None if ends is None else ends - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        return False
                    self._news.wait(left_s)
        if transfer.error:
            raise PeerLost(transfer.error)
        return True

    def close(self) -> None:
        """End all connections. Transfers under way fail, and nothing is written into their memory any more."""
        if not self._is_closed:
            self._is_closed = True
            self._nudge()

    def drop(self) -> None:
        """Close the descriptors in a process that was forked: the connections are its parent's."""
        for sock in (self._wake, self._woken, *(link.sock for link in self._links.values())):
            with contextlib.suppress(OSError):
                os.close(sock.detach())
        self._selector.close()

    def _serve(self) -> None:
        while not self._is_closed:
            for key, events in self._selector.select():
                if key.data is None:
                    self._watch_blocked()
                    continue
                link = self._links[key.data]
                with link.lock:
                    if events & selectors.EVENT_WRITE and not link.end:
                        self._write(key.data, link)
                    if events & selectors.EVENT_READ and not link.end:
                        self._read(key.data, link)
        for peer, link in self._links.items():
            with link.lock:
                self._end(peer, link, "this group of workers was closed")
        self._selector.close()
        for sock in (self._wake, self._woken):
            sock.close()

    def _watch_blocked(self) -> None:
        with contextlib.suppress(*NOT_NOW):
            while self._woken.recv(4096):
                pass
        for peer in list(self._blocked):
            self._blocked.discard(peer)
            link = self._links[peer]
            with link.lock:
                if not link.end:
                    self._selector.modify(link.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _write(self, peer: int, link: _Link) -> None:
        """Send as much as the system takes; called with the lock."""
        done = False
        is_thread = threading.current_thread() is self._thread
        try:
            while link.outgoing:
                transfer = link.outgoing[0]
                while transfer.left:
                    sent = link.sock.send(transfer.left[0])
                    view = transfer.left.popleft()
                    if sent < view.nbytes:
                        transfer.left.appendleft(view[sent:])
                link.outgoing.popleft()
                transfer.is_done = done = True
            if is_thread:
                self._selector.modify(link.sock, selectors.EVENT_READ, peer)
        except NOT_NOW:
            if not is_thread:
                self._blocked.add(peer)
                self._nudge()
        except OSError as error:
            self._end(peer, link, f"connection closed by peer {peer} ({error.strerror or error})")
        if done:
            self._tell()

    def _read(self, peer: int, link: _Link) -> None:
        """Read what has arrived; called with the lock."""
        num_read = 0
        try:
            while num_read < READ_BYTES or _has_decrypted(link.sock):  # a selector does not know of these bytes
                if link.to_read.nbytes:
                    count = link.sock.recv_into(link.to_read)
                    if not count:
                        self._end(peer, link, f"connection closed by peer {peer}")
                        return
                    link.to_read, num_read = link.to_read[count:], num_read + count
                if not link.to_read.nbytes and not self._next_part(peer, link):
                    return
        except NOT_NOW:
            return
        except OSError as error:
            self._end(peer, link, f"connection closed by peer {peer} ({error.strerror or error})")

    def _next_part(self, peer: int, link: _Link) -> bool:
        """Take a header or a message that is complete, and choose where the next bytes go."""
        current = link.current
        if current is None:
            tag, length = HEADER.unpack(link.header)
            if length > MAX_BYTES:
                self._end(peer, link, f"peer {peer} announced a message of {length:,} bytes")
                return False
            expected = link.expected.get(tag)
            if expected:
                transfer = expected.popleft()
                if not expected:
                    del link.expected[tag]
                wanted = sum(view.nbytes for view in transfer.left)
                if wanted != length:
                    self._ended(transfer, _wrong_length(peer, length, wanted))
                    self._end(peer, link, _wrong_length(peer, length, wanted))
                    return False
                link.current = transfer
                link.to_read = transfer.left[0] if transfer.left else memoryview(b"")
            else:
                link.current = waiting = bytearray(length)
                link.to_read = memoryview(waiting)
            link.tag = tag
            return True
        link.current, link.to_read = None, memoryview(link.header)
        if isinstance(current, LinkTransfer):
            current.is_done = True
            current.left.clear()
            self._tell()
        elif expected := link.expected.get(link.tag):  # somebody has asked for it meanwhile
            transfer = expected.popleft()
            if not expected:
                del link.expected[link.tag]
            self._fill(peer, transfer, current)
        else:
            link.arrived[link.tag].append(current)
        return True

    def _fill(self, peer: int, transfer: LinkTransfer, found: bytearray) -> None:
        wanted = sum(view.nbytes for view in transfer.left)
        if wanted != len(found):
            self._ended(transfer, _wrong_length(peer, len(found), wanted))
            return
        for view in transfer.left:
            view[:] = found
        transfer.is_done = True
        self._tell()

    def _end(self, peer: int, link: _Link, reason: str) -> None:
        """End a connection and all that waits for it; called with the lock."""
        if link.end:
            return
        link.end = reason
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.sock)
        link.sock.close()
        waiting = [*link.outgoing, *(one for some in link.expected.values() for one in some)]
        if isinstance(link.current, LinkTransfer):
            waiting.append(link.current)
        link.outgoing.clear()
        link.expected.clear()
        link.current, link.to_read = None, memoryview(b"")
        for transfer in waiting:
            transfer.left.clear()
            transfer.error, transfer.is_done = reason, True
        self._tell()

    def _ended(self, transfer: LinkTransfer, reason: str) -> LinkTransfer:
        transfer.left.clear()
        transfer.error, transfer.is_done = reason, True
        self._tell()
        return transfer

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()


def _has_decrypted(sock: socket.socket) -> bool:
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


def _wrong_length(peer: int, length: int, wanted: int) -> str:
    return (
        f"peer {peer} sent {length:,} bytes where {wanted:,} were expected: the workers are in different calls, or "
        "their tensors differ"
    )


_open: weakref.WeakSet[PeerLinks] = weakref.WeakSet()


def _drop_all() -> None:
    for links in list(_open):
        links.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all)
