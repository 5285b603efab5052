"""Moves bytes between the members of a group over their connections; one thread serves all of them.

A message has a header of 16 bytes (tag and length), and the bytes follow. Nothing else is ever read from a connection.
A receive names a peer and a tag; messages of one tag arrive in the order in which they were sent. A send is begun by
its caller, and the thread goes on with what the system did not take.

A message that nobody expects yet waits in memory, which grows as its bytes arrive, whatever its header announced.
Beyond `UNASKED_BYTES` of one peer its connection is not read until this worker asks for something of it: the peer
waits. If this worker asks for another message meanwhile, more is read, up to `MOST_OF_MEMORY` of the host's memory.
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

from paceline.host_memory import memory_limit_bytes
from paceline.units import bytes_text

__all__ = ["LinkTransfer", "PeerLinks", "PeerLost"]

HEADER = struct.Struct("<qQ")  # tag, number of bytes
MAX_BYTES = 1 << 42  # of a message
READ_BYTES = 8 << 20  # from one connection, before the next one has its turn
BUFFER_BYTES = 4 << 20  # of the system, for each connection
UNASKED_BYTES = 1 << 30  # of messages of one peer that no call has asked for; beyond them its connection is not read
MOST_OF_MEMORY = 0.25  # that such messages of one peer may take while this worker asks for another one
PIECE_BYTES = 4 << 20  # by which the memory of such a message grows
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class PeerLost(RuntimeError):
    """The connection to a peer has ended."""


class LinkTransfer:
    """A message under way. `error`: why it failed."""

    __slots__ = ("error", "is_done", "left")

    def __init__(self, views: Iterable[memoryview]) -> None:
        self.left: deque[memoryview] = deque(view for view in views if view.nbytes)
        self.is_done, self.error = False, ""


class _Unasked:
    """A message that nobody has asked for yet."""

    __slots__ = ("length", "num_bytes", "pieces")

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_bytes = 0  # of all pieces; the last one need not be full
        self.pieces: list[bytearray] = []

    def grow(self) -> memoryview:
        """Return room for the bytes that come next; empty when all are there."""
        self.pieces.append(piece := bytearray(min(PIECE_BYTES, self.length - self.num_bytes)))
        self.num_bytes += len(piece)
        return memoryview(piece)

    def copy_to(self, into: memoryview) -> None:
        at = 0
        for piece in self.pieces:
            into[at : at + len(piece)] = piece
            at += len(piece)


class _Link:
    """The connection to one peer, for the thread; `lock` guards everything in it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.lock, self.end = sock, threading.Lock(), ""
        self.outgoing: deque[LinkTransfer] = deque()
        self.expected: defaultdict[int, deque[LinkTransfer]] = defaultdict(deque)
        self.arrived: defaultdict[int, deque[_Unasked]] = defaultdict(deque)
        self.num_unasked_bytes = 0  # of `arrived`, and of `current`
        self.is_left_alone = False  # it is not read: more has come than anybody asks for
        self.header = bytearray(HEADER.size)
        self.to_read = memoryview(self.header)
        self.current: LinkTransfer | _Unasked | None = None  # what `to_read` belongs to; None: the header
        self.tag = 0


class PeerLinks:
    """The connections of one member to the others; any thread may use it."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._news = threading.Condition()
        self._links = {peer: _Link(sock) for peer, sock in sockets.items()}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._changed: set[int] = set()  # peers whose connections have to be watched for something else
        self._most_unasked_bytes = max(UNASKED_BYTES, int(MOST_OF_MEMORY * (memory_limit_bytes() or 0)))
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
                link.num_unasked_bytes -= found.num_bytes
                if found.length != into.nbytes:
                    self._ended(transfer, _wrong_length(peer, found.length, into.nbytes))
                else:
                    found.copy_to(into)
                    transfer.is_done = True
            elif link.end:
                return self._ended(transfer, link.end)
            elif isinstance(link.current, _Unasked) and link.tag == tag:
                self._go_on_into(peer, link, link.current, transfer, into)
            else:
                link.expected[tag].append(transfer)
            if link.is_left_alone and not _has_enough(link):
                link.is_left_alone = False
                self._changed.add(peer)
                self._nudge()
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
                    self._watch_changed()
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

    def _watch_changed(self) -> None:
        with contextlib.suppress(*NOT_NOW):
            while self._woken.recv(4096):
                pass
        for peer in list(self._changed):
            self._changed.discard(peer)
            link = self._links[peer]
            with link.lock:
                if not link.end:
                    self._watch(peer, link)
                    self._read(peer, link)  # bytes that TLS holds

    def _watch(self, peer: int, link: _Link) -> None:
        """Watch a connection for what it waits for; called by the thread, with the lock."""
        events = 0 if link.is_left_alone else selectors.EVENT_READ
        events |= selectors.EVENT_WRITE if link.outgoing else 0
        is_watched = link.sock in self._selector.get_map()
        if events and is_watched:
            self._selector.modify(link.sock, events, peer)
        elif events:
            self._selector.register(link.sock, events, peer)
        elif is_watched:
            self._selector.unregister(link.sock)

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
                self._watch(peer, link)
        except NOT_NOW:
            if not is_thread:
                self._changed.add(peer)
                self._nudge()
        except OSError as error:
            self._end(peer, link, f"connection closed by peer {peer} ({error.strerror or error})")
        if done:
            self._tell()

    def _read(self, peer: int, link: _Link) -> None:
        """Read what has arrived; called with the lock."""
        num_read = 0
        try:
            # A selector does not know of bytes that TLS holds, nor of a message without any.
            while num_read < READ_BYTES or _has_decrypted(link.sock) or not link.to_read.nbytes:
                if _has_enough(link):
                    link.is_left_alone = True
                    self._watch(peer, link)
                    return
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
                link.current, link.to_read = _Unasked(length), memoryview(b"")
            link.tag = tag
            return True
        if isinstance(current, _Unasked) and current.num_bytes < current.length:
            if link.num_unasked_bytes >= self._most_unasked_bytes:
                self._end(peer, link, _too_far_ahead(peer, link.num_unasked_bytes))
                return False
            link.to_read = current.grow()
            link.num_unasked_bytes += link.to_read.nbytes
            return True
        link.current, link.to_read = None, memoryview(link.header)
        if isinstance(current, LinkTransfer):
            current.is_done = True
            current.left.clear()
            self._tell()
        else:
            link.arrived[link.tag].append(current)
        return True

    def _go_on_into(self, peer: int, link: _Link, found: _Unasked, transfer: LinkTransfer, into: memoryview) -> None:
        """A call asks for the message that is just arriving: the rest of it goes to its place; called with the
        lock."""
        if found.length != into.nbytes:
            self._ended(transfer, _wrong_length(peer, found.length, into.nbytes))
            self._end(peer, link, transfer.error)
            return
        found.copy_to(into)
        link.num_unasked_bytes -= found.num_bytes
        link.current, link.to_read = transfer, into[found.num_bytes - link.to_read.nbytes :]
        if not link.to_read.nbytes:
            self._next_part(peer, link)

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


def _has_enough(link: _Link) -> bool:
    """Whether more has come from a peer than may wait, and nobody asks for anything of it."""
    is_asked_for = bool(link.expected) or isinstance(link.current, LinkTransfer)
    return link.num_unasked_bytes > UNASKED_BYTES and not is_asked_for


def _too_far_ahead(peer: int, num_bytes: int) -> str:
    return (
        f"peer {peer} has sent {bytes_text(num_bytes)} that this worker has not asked for, while it waits for another "
        "message of that peer: the workers are in different calls, or one is too far ahead"
    )


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
