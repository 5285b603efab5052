"""The socket by which user commands such as `paceline resize` reach a running coordinator.

It is a Unix socket in the abstract namespace, found by the supervisor's pid and open only to its own user and root. One
line of JSON asks, one answers: {"op": "resize", "replicas": 6} or {"op": "stop"} -> {"says": ...} or {"error": ...}.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

from paceline.comm.messages.json_channel import LineBuffer, encode
from paceline.launch.io.event_loop import READ, EventLoop, MessageStream

__all__ = ["ControlSocket", "ask_to_end", "send_command"]

ANSWER_S = 5.0
ROOT = 0  # may send signals, too


class ControlSocket:
    """Answers commands from within the supervisor's loop. On systems without abstract sockets it does nothing."""

    def __init__(self, loop: EventLoop, answer: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
        self._loop, self._answer = loop, answer
        self._links: set[MessageStream] = set()
        self._listener: socket.socket | None = None
        if sys.platform == "linux":
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._listener.bind(_name(os.getpid()))
            except OSError:  # another job in this process has the socket already
                self._listener.close()
                self._listener = None
                return
            self._listener.listen(16)
            self._listener.setblocking(False)
            loop.watch(self._listener, READ, self._accepted)

    def close(self) -> None:
        """Close the socket."""
        if self._listener is not None:
            self._loop.forget(self._listener)
            self._listener.close()
            self._listener = None
        while self._links:
            self._links.pop().close()

    def _accepted(self, _: int) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if _user(sock) not in (os.getuid(), ROOT):
                sock.close()
                return

            def asked(message: dict[str, Any]) -> None:
                link.send(self._answer(message))

            link = MessageStream(sock, self._loop, on_message=asked, on_close=lambda _: self._links.discard(link))
            self._links.add(link)


def send_command(pid: int, request: Mapping[str, Any], *, answer_s: float = ANSWER_S) -> dict[str, Any]:
    """Ask the supervisor with this pid, on this host. Raises ConnectionError where it does not answer: each of its
    steps, connecting too, is waited for `answer_s`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(answer_s)
        try:
            sock.connect(_name(pid))
            if os.getuid() not in (_user(sock), ROOT):
                raise ConnectionError(f"process {pid} belongs to another user")
            sock.sendall(encode(request))
            lines = LineBuffer()
            while True:
                data = sock.recv(1 << 16)
                if not data:
                    raise ConnectionError(f"process {pid} closed the connection without an answer")
                for message in lines.feed(data):
                    return message
        except OSError as error:
            raise ConnectionError(f"process {pid} does not answer: {error.strerror or error}") from error


def ask_to_end(pid: int, *, answer_s: float = ANSWER_S) -> bool:
    """Have this supervisor end the run on all hosts; False where it takes no commands, and a signal has to do."""
    try:
        return "error" not in send_command(pid, {"op": "stop"}, answer_s=answer_s)
    except ConnectionError as error:
        return isinstance(error.__cause__, TimeoutError)  # it stands still, and reads it when it goes on


def _name(pid: int) -> str:
    return f"\0paceline-control-{pid}"


def _user(sock: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user
