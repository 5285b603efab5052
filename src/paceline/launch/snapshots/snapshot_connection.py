"""A connection between two supervisors that carries snapshots: lines of JSON, some of them followed by raw bytes.

    load    one snapshot: whose, of which step, how many bytes; the bytes follow
    whole   the bytes just sent are complete, with a signature; or torn: overwritten meanwhile, so discarded
    taken   the receiver has stored it; or refused: the receiver has no memory for it
    give    asks for a snapshot, which comes as above; or lacks: it is not there

Nothing blocks: the system copies between memory and socket as much as fits, at most `TURN_BYTES` in one turn of the
loop, so other sockets are served in between.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from paceline.comm.memory_checkpoint import FIRST_BYTE, SnapshotSlot
from paceline.comm.messages.json_channel import decode, encode
from paceline.launch.io.event_loop import NOT_NOW, READ, WRITE, WRONG_FORM, EventLoop, invalid_text

__all__ = ["SnapshotConnection"]

PIECE_BYTES = 1 << 20
TURN_BYTES = 8 << 20
LINE_BYTES = 1 << 16  # longest line


@dataclasses.dataclass
class _Bytes:
    """Bytes of a snapshot slot still to be transferred; without a slot they are discarded."""

    slot: SnapshotSlot | None
    offset: int
    left: int


class SnapshotConnection:
    """Sends and receives over a socket that it owns.

    `on_message(message)` is called with each line. If bytes follow (`message["bytes"]`), it returns the slot that takes
    them, or None to discard them. `on_close(reason)` is called if the peer is gone or sent something invalid.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: EventLoop,
        *,
        on_message: Callable[[Mapping[str, Any]], SnapshotSlot | None],
        on_close: Callable[[str], None],
    ) -> None:
        self._sock, self._loop = sock, loop
        self._on_message, self._on_close = on_message, on_close
        self._outgoing: deque[bytes | _Bytes | Callable[[], Mapping[str, Any]]] = deque()
        self._lines = bytearray()
        self._incoming = _Bytes(None, 0, 0)
        self._piece = memoryview(bytearray(PIECE_BYTES))
        self.closed = False
        self.work_s = 0.0  # CPU time of this host that it has used
        sock.setblocking(False)
        loop.watch(sock, READ, self._ready)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a line after everything already queued."""
        self._put(encode(message))

    def send_slot(
        self, message: Mapping[str, Any], slot: SnapshotSlot, num_bytes: int, *, then: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Send a line, then `num_bytes` bytes of a slot after its header, then the line that `then()` returns."""
        self._put(encode({**message, "bytes": num_bytes}), _Bytes(slot, FIRST_BYTE, num_bytes), then)

    def close(self) -> None:
        """Close this end; no callback is called any more."""
        if not self.closed:
            self.closed = True
            self._loop.forget(self._sock)
            self._sock.close()
            self._outgoing.clear()

    def _put(self, *items: bytes | _Bytes | Callable[[], Mapping[str, Any]]) -> None:
        if not self.closed:
            self._outgoing += items
            self._loop.watch(self._sock, READ | WRITE, self._ready)

    def _ready(self, events: int) -> None:
        began = time.thread_time()
        try:
            if events & WRITE:
                self._write()
            if events & READ and not self.closed:
                self._read()
        except NOT_NOW:
            pass
        except OSError as error:
            self._lost(error.strerror or str(error))
        except (*WRONG_FORM, EOFError) as error:
            self._lost(f"it sent an invalid message ({invalid_text(error)})")
        self.work_s += time.thread_time() - began

    def _write(self) -> None:
        room = TURN_BYTES
        while self._outgoing and room > 0:
            item = self._outgoing[0]
            if callable(item):
                self._outgoing[0] = encode(item())
            elif isinstance(item, bytes):
                sent = self._sock.send(item)
                self._outgoing.popleft()
                if sent < len(item):
                    self._outgoing.appendleft(item[sent:])
            elif item.slot is None or item.left == 0:
                self._outgoing.popleft()
            else:
                wanted = min(item.left, PIECE_BYTES)
                if isinstance(self._sock, ssl.SSLSocket):
                    piece = os.pread(item.slot.fd, wanted, item.offset)
                    sent = self._sock.send(piece) if piece else 0
                else:
                    sent = os.sendfile(self._sock.fileno(), item.slot.fd, item.offset, wanted)
                if sent == 0:
                    raise ValueError(f"a snapshot ends {item.left} bytes before its end")
                item.offset, item.left, room = item.offset + sent, item.left - sent, room - sent
        if not self._outgoing:
            self._loop.watch(self._sock, READ, self._ready)

    def _read(self) -> None:
        room = TURN_BYTES
        while not self.closed and (room > 0 or self._has_decrypted()):
            wanted = min(self._incoming.left, PIECE_BYTES) or LINE_BYTES
            count = self._sock.recv_into(self._piece[:wanted])
            if count == 0:
                self._lost("it closed the connection")
                return
            room -= count
            if self._incoming.left:
                self._store(self._piece[:count])
            else:
                self._lines += self._piece[:count]
                self._take_lines()

    def _has_decrypted(self) -> bool:
        """Whether TLS holds bytes of which the event loop does not know."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def _take_lines(self) -> None:
        """Handle complete lines; the bytes that follow a `load` line are not lines."""
        while not self.closed and (end := self._lines.find(b"\n")) >= 0:
            message = decode(self._lines[:end])
            del self._lines[: end + 1]
            num_bytes = int(message.get("bytes", 0))
            if num_bytes < 0:
                raise ValueError(f"a snapshot of {num_bytes} bytes")
            self._incoming = _Bytes(self._on_message(message), FIRST_BYTE, num_bytes)
            if num_bytes:
                early = bytes(self._lines[:num_bytes])
                del self._lines[:num_bytes]
                self._store(memoryview(early))
            if self._incoming.left:
                return
        if len(self._lines) > LINE_BYTES:
            raise ValueError(f"a line of more than {LINE_BYTES} bytes")

    def _store(self, data: memoryview) -> None:
        incoming = self._incoming
        if incoming.slot is not None:
            incoming.slot.write(incoming.offset, data)
        incoming.offset, incoming.left = incoming.offset + len(data), incoming.left - len(data)

    def _lost(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_close(reason)
