"""Messages between the processes of a job: one JSON object a line, over a stream socket.

Nothing is unpickled and nothing is evaluated: a message is plain data, bounded in size, in depth, and in the size of
its numbers. So what a reader does with a message that passed cannot overflow or recurse without end.

`LineBuffer` turns the bytes
of any stream into messages; `Channel` is a worker's own end of the socket to the supervisor of its host: a request
goes out, its reply comes back, and several threads may ask.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.plain_data import DataRefused, read_object

__all__ = ["MAX_MESSAGE_BYTES", "Channel", "ChannelClosed", "LineBuffer", "decode", "encode"]

MAX_MESSAGE_BYTES = 16 * 2**20  # of one line; torch's process groups exchange addresses of a few hundred bytes

CHUNK_BYTES = 1 << 16


class ChannelClosed(ConnectionError):
    """The other end has closed the connection, or sent an invalid message; the text says which."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as one line. Raises ValueError if it is too long, TypeError if it is not plain data."""
    line = json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(line)} bytes is too long: at most {MAX_MESSAGE_BYTES} bytes travel in one")
    return line


def decode(line: bytes | bytearray) -> dict[str, Any]:
    """Read one line; raise ValueError if it is not a JSON object, nested too deeply, or has numbers that are not
    finite or have too many digits."""
    try:
        return read_object(line, is_strict=True)
    except DataRefused as refused:
        raise ValueError(f"a message {refused}: {_shown(line)}") from None


class LineBuffer:
    """Collects the bytes of a stream and yields the messages in them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield each message that `data` completes; raises ValueError at the first that is malformed or too long."""
        searched = len(self._bytes)  # there is no line end before this
        self._bytes += data
        while (end := self._bytes.find(b"\n", searched)) >= 0:
            line, searched = self._bytes[:end], 0
            del self._bytes[: end + 1]
            if len(line) >= MAX_MESSAGE_BYTES:
                raise ValueError(
                    f"a message of {len(line)} bytes is too long: at most {MAX_MESSAGE_BYTES} bytes travel in one"
                )
            yield decode(line)
        if len(self._bytes) >= MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message is too long: {len(self._bytes)} bytes and no end; at most {MAX_MESSAGE_BYTES} travel in one"
            )


class Channel:
    """A worker's end of the socket to its supervisor. Blocking; safe for several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(True)
        self._lines = LineBuffer()
        self._arrived: list[dict[str, Any]] = []
        self._sending, self._calling = threading.Lock(), threading.Lock()
        self._last_id = 0
        self._replies: dict[int, dict[str, Any]] | None = None  # while a thread listens
        self._news = threading.Condition()
        self._end: ChannelClosed | None = None

    @classmethod
    def inherited(cls, fd: int) -> Channel:
        """Return the channel over the socket that this process was started with (`Assignment.channel_fd`)."""
        os.set_inheritable(fd, False)  # programs that the user's code starts must not get it
        return cls(socket.socket(fileno=fd))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; blocks while the other end does not read. Raises ChannelClosed."""
        line = encode(message)
        try:
            with self._sending:
                self._sock.sendall(line)
        except OSError as error:
            raise ChannelClosed(f"the other end has gone ({error.strerror or error})") from None

    def receive(self) -> dict[str, Any]:
        """Wait for the next message. Raises ChannelClosed."""
        while not self._arrived:
            try:
                data = self._sock.recv(CHUNK_BYTES)
                self._arrived += self._lines.feed(data)
            except ValueError as error:
                self.close()
                raise ChannelClosed(str(error)) from None
            except OSError as error:
                raise ChannelClosed(f"the other end has gone ({error.strerror or error})") from None
            if not data:
                raise ChannelClosed("the other end has gone")
        return self._arrived.pop(0)

    def call(self, op: str, **fields: Any) -> Any:
        """Send a request and wait for the answer. Raises ChannelClosed, and ValueError if the request is refused."""
        with self._calling:
            self._last_id += 1
            self.send({"id": self._last_id, "op": op, **fields})
            reply = self._reply(self._last_id)
        if "closed" in reply:
            raise ChannelClosed(str(reply["closed"]))
        if "error" in reply:
            raise ValueError(f"{op}: {reply['error']}")
        return reply.get("value")

    def begin_listening(self) -> int:
        """Let one thread call `take` whenever the returned descriptor is readable; `call` continues to work."""
        self._replies = {}
        return self._sock.fileno()

    def take(self) -> list[dict[str, Any]]:
        """Read what has arrived, pass replies to their callers, and return the other messages. For the listener."""
        try:
            first = self.receive()
        except ChannelClosed as end:
            with self._news:
                self._end = end
                self._news.notify_all()
            raise
        arrived, self._arrived = [first, *self._arrived], []
        with self._news:
            for message in arrived:
                if isinstance(message.get("id"), int) and self._replies is not None:
                    self._replies[message["id"]] = message
            self._news.notify_all()
        return [message for message in arrived if "id" not in message]

    def close(self) -> None:
        self._sock.close()

    def _reply(self, number: int) -> dict[str, Any]:
        """Wait for the reply to call `number`; older replies belong to calls that an exception interrupted. Messages
        that are not replies are kept for the listener."""
        if self._replies is None:
            kept = list[dict[str, Any]]()
            try:
                while (reply := self.receive()).get("id") != number:
                    if "id" not in reply:
                        kept.append(reply)
                return reply
            finally:
                self._arrived[:0] = kept
        with self._news:
            while number not in self._replies:
                if self._end is not None:
                    raise self._end
                self._news.wait()
            for old in [one for one in self._replies if one < number]:
                del self._replies[old]
            return self._replies.pop(number)


def _shown(line: bytes | bytearray) -> str:
    return repr(bytes(line[:80])) + ("..." if len(line) > 80 else "")
