"""Messages between clients and a server over ZeroMQ: a header in JSON, and tensors as they lie in memory.

A client has one connection to each server (zmq.DEALER to zmq.ROUTER), so its messages arrive in order. Before anything
is read, both sides prove a secret (`paceline.comm.messages.token_handshake`). On loopback the connection is a Unix
socket in a directory of this user alone. Between hosts it is encrypted and authenticated by ZeroMQ's CURVE, with keys
that follow from the secret. What a message is made of stands in `paceline.comm.messages.tensor_frames`. Tensors are
sent from where they lie and used where they arrive. A large tensor travels in pieces and is joined by the
receiver, and a large header, too. Each piece that arrives is a sign of life, even over a link that needs minutes for
the whole; and a stranger cannot have ZeroMQ collect more than a piece.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.monitor
from torch import Tensor

from paceline.comm.messages.socket_directory import make_socket_directory
from paceline.comm.messages.tensor_frames import FRAME_BYTES, decoded_message, encoded_frames
from paceline.comm.messages.token_handshake import HANDSHAKE_TIMEOUT_S, TokenHandshake, TokenRefused
from paceline.errors import SyncError

__all__ = ["Secret", "ServerLost", "ServerTimeout", "TensorClient", "TensorMessage", "TensorServer"]

POLL_S = 0.02  # how often a wait checks for changes
LINGER_MS = 1000  # when closing, for messages still being sent
HELLO = b"paceline"
BACKLOG = 4096  # connections that the system keeps until they are accepted
# Detects hosts that have vanished; the system of a process that is only stopped still answers.
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 3}

# A server listens before its address is published. So a client that cannot connect, or is disconnected, has lost it.
CONNECTION_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED

Secret = bytes
# What reading a message of the wrong form raises; RuntimeError: torch refuses a shape.
WRONG_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorMessage:
    """A received message; the tensors belong to the receiver."""

    header: Mapping[str, Any]
    tensors: tuple[Tensor, ...] = ()


class ServerLost(SyncError):
    """The server is gone."""

    listener = ""  # its name, for messages


class ServerTimeout(ServerLost):
    """The server may be alive, but has not answered within its client's time limit."""


class TensorServer:
    """Receives messages of clients that know the secret, and answers them; for one thread."""

    def __init__(self, address: str, secret: Secret, *, silence_s: float | None = None) -> None:
        """Bind to a free port of `address`. A client that is silent for `silence_s`, because its process is stopped or
        its host unreachable, is disconnected; None: a stopped client stays connected."""
        self._secret = secret
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER, is_v6=":" in address)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_TIMEOUT_S * 1000))  # silent strangers go by then
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        _cut_off_after(silence_s, self._socket)
        host = f"[{address}]" if ":" in address else address
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._directory: Path | None = None
        if is_loopback(address):
            self._directory = make_socket_directory()
            self.endpoint = f"ipc://{self._directory / 's'}"
            self._socket.bind(self.endpoint)
        else:
            self._socket.curve_secretkey, self._socket.curve_publickey = _curve_keys(secret)
            self._socket.curve_server = True
            self.endpoint = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._open: set[int] = set()  # connections, by file descriptor
        self._handshakes: dict[bytes, tuple[int, TokenHandshake]] = {}  # by client: connection, unfinished handshake
        self._known: dict[bytes, int] = {}  # clients that have proved the secret, and their connections
        self.had_any = False  # some client has proved the secret

    @property
    def num_connected(self) -> int:
        """How many clients that have proved the secret are connected."""
        return sum(connection in self._open for connection in self._known.values())

    def is_connected(self, peer: bytes) -> bool:
        """Return whether a client that has proved the secret is still connected."""
        return self._known.get(peer) in self._open

    def receive(self, timeout_s: float) -> tuple[bytes, TensorMessage] | None:
        """Return a message and its sender; None if none came in time. A client that sends something malformed has to
        connect again.
        """
        ready = dict(self._poll(timeout_s))
        if self._socket not in ready:
            self._update_connections()
            return None
        caller, *frames = self._socket.recv_multipart(copy=False)
        self._update_connections()  # now the connection of this message is known
        peer, connection = caller.bytes, int(frames[0].get(zmq.SRCFD))
        if self._known.get(peer) != connection:  # a new connection under an old name has to prove the secret, too
            self._handshake(peer, frames, connection)
            return None
        try:
            return peer, TensorMessage(*decoded_message(frames))
        except WRONG_FORM as error:
            self._known.pop(peer, None)
            self.send(peer, {"failed": f"it got a malformed message ({type(error).__name__}: {str(error)[:200]})"})
            return None

    def send(self, peer: bytes, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Answer; the tensors must not be written to afterwards."""
        frames = [peer, *encoded_frames(header, tensors)]
        with contextlib.suppress(zmq.ZMQError):  # it has disconnected meanwhile
            self._socket.send_multipart(frames, copy=False)

    def close(self) -> None:
        """Deliver what was sent, and close."""
        self._socket.disable_monitor()
        self._socket.close(linger=LINGER_MS)
        self._monitor.close(linger=0)
        self._context.term()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _poll(self, timeout_s: float) -> list[tuple[zmq.Socket[bytes], int]]:
        poller = zmq.Poller()
        for one in (self._socket, self._monitor):
            poller.register(one, zmq.POLLIN)
        return poller.poll(round(timeout_s * 1000))

    def _update_connections(self) -> None:
        while self._monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)
            connection = int(event["value"])
            if event["event"] == zmq.EVENT_DISCONNECTED:  # its earlier messages may still be unread
                self._open.discard(connection)
                self._handshakes = {peer: one for peer, one in self._handshakes.items() if one[0] != connection}
            else:
                self._open.add(connection)
                self._known = {peer: one for peer, one in self._known.items() if one != connection}

    def _handshake(self, peer: bytes, frames: Sequence[zmq.Frame], connection: int) -> None:
        """Handle one step of the handshake of an unknown client."""
        if connection not in self._open:
            return
        said = frames[0].bytes if len(frames) == 1 and len(frames[0].buffer) <= 2 * len(HELLO) + 128 else b""
        if said == HELLO:
            shake = TokenHandshake(self._secret, is_head=True)
            self._handshakes[peer] = (connection, shake)  # at most one of each connection that is open
            self._socket.send_multipart([peer, shake.greeting])
            return
        began_over, shake = self._handshakes.pop(peer, (None, None))
        if shake is None or began_over != connection or len(said) > shake.wanted:
            return
        try:
            answer = shake.feed(said)
        except TokenRefused as refused:
            self._socket.send_multipart([peer, refused.farewell])
            return
        if shake.wanted:
            return
        self._known[peer] = connection
        self.had_any = True
        self._socket.send_multipart([peer, answer])


class TensorClient:
    """One connection to a server; for one thread. Raise SyncError if the two do not hold the same secret."""

    def __init__(
        self,
        endpoint: str,
        secret: Secret,
        *,
        name: str,
        timeout_s: float,
        silence_s: float | None = None,
        check: Callable[[], None] = lambda: None,
        waits: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`name`: of the server, for messages. The server is lost when it is silent for `silence_s`, as the clients of
        a `TensorServer` are. In a wait, `check()` is called, and may raise to end it; `waits(seconds)` is called with
        its length so far."""
        self.name = name
        self._timeout_s, self._check, self._waits = timeout_s, check, waits
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.DEALER, is_v6="[" in endpoint)
        _cut_off_after(silence_s, self._socket)
        self._monitor = self._socket.get_monitor_socket(CONNECTION_LOST)
        self._lost = False
        self._num_calls = 0
        if not endpoint.startswith("ipc:"):
            self._socket.curve_serverkey = _curve_keys(secret)[1]
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(endpoint)
        try:
            self._prove(secret)
        except BaseException:
            self.close(at_once=True)
            raise

    def send(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> zmq.MessageTracker | None:
        """Send a message; return a tracker that shows when the tensors may be overwritten (None: now)."""
        sent = self._socket.send_multipart(encoded_frames(header, tensors), copy=False, track=bool(tensors))
        return sent if isinstance(sent, zmq.MessageTracker) else None

    def begin(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> int:
        """Send a request; return its number, for `answer`."""
        self._num_calls += 1
        self.send({**header, "call": self._num_calls}, tensors)
        return self._num_calls

    def wait_sent(self, sent: zmq.MessageTracker | None) -> None:
        """Return when the tensors of that `send` may be overwritten. Raises as `answer` does."""
        deadline, what = time.monotonic() + self._timeout_s, f"{self.name} to take what was sent"
        while sent is not None:
            try:
                sent.wait(POLL_S)
                return
            except zmq.NotDone:
                self._go_on_waiting(deadline, self._timeout_s, what, is_lost=bool(self._monitor.poll(0)))

    def answer(
        self,
        call: int,
        *,
        checks: bool = True,
        meanwhile: Callable[[], None] = lambda: None,
        heard: Callable[[TensorMessage], None] = lambda _: None,
    ) -> TensorMessage:
        """Wait for the answer to a request. Answers to other requests are passed to `heard`; each gives the server the
        full time again. `meanwhile()` is called repeatedly, and may send more messages.

        Raises ServerLost if the server was lost, ServerTimeout if it sends nothing in time, RuntimeError if it has
        failed, and, with `checks`, what `check` raises.
        """
        while True:
            message = TensorMessage(
                *decoded_message(self._wait(self._timeout_s, f"an answer of {self.name}", checks, meanwhile))
            )
            if "failed" in message.header:
                raise RuntimeError(f"{self.name} failed:\n{message.header['failed']}")
            if message.header.get("call") == call:
                return message
            heard(message)

    def close(self, *, at_once: bool = False) -> None:
        """Close the connection; unless `at_once`, messages that were sent still arrive."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._socket.close(linger=0 if at_once or self._lost else LINGER_MS)
        self._monitor.close(linger=0)
        self._context.term()

    def _prove(self, secret: Secret) -> None:
        shake = TokenHandshake(secret, is_head=False)
        self._socket.send(HELLO)
        while shake.wanted:
            (frame,) = self._wait(HANDSHAKE_TIMEOUT_S + self._timeout_s, f"the greeting of {self.name}")
            try:
                said = shake.feed(frame.bytes)
            except TokenRefused as refused:
                raise SyncError(f"{self.name} does not take this worker in: {refused}") from None
            if said:
                self._socket.send(said)

    def _wait(
        self, limit_s: float, what: str, checks: bool = True, meanwhile: Callable[[], None] = lambda: None
    ) -> list[zmq.Frame]:
        deadline = time.monotonic() + limit_s
        poller = zmq.Poller()
        for one in (self._socket, self._monitor):
            poller.register(one, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(round(POLL_S * 1000)))
            if self._socket in ready:
                return self._socket.recv_multipart(copy=False)
            self._go_on_waiting(deadline, limit_s, what, is_lost=self._monitor in ready, checks=checks)
            meanwhile()

    def _go_on_waiting(self, deadline: float, limit_s: float, what: str, *, is_lost: bool, checks: bool = True) -> None:
        if is_lost or self._lost:
            self._lost = True
            raise self._named(
                ServerLost(f"{self.name} was lost: the connection was closed while this worker waited for {what}")
            )
        if checks:
            self._check()
        now = time.monotonic()
        if now > deadline:
            raise self._named(ServerTimeout(f"waited {limit_s:.0f} s for {what}"))
        self._waits(limit_s - (deadline - now))

    def _named(self, lost: ServerLost) -> ServerLost:
        lost.listener = self.name
        return lost


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: zmq.SocketType, *, is_v6: bool) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.IPV6, int(is_v6))
    made.setsockopt(zmq.SNDHWM, 0)  # nothing is ever dropped because a receiver is slow
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)  # who sends more is disconnected, stranger or not
    made.setsockopt(zmq.LINGER, LINGER_MS)  # otherwise an unclosed socket would wait forever for a lost receiver
    for option, value in KEEPALIVE.items():
        made.setsockopt(option, value)
    return made


def is_loopback(address: str) -> bool:
    """Whether only processes of this host reach an address."""
    return address.startswith("127.") or address in ("::1", "localhost")


def _curve_keys(secret: Secret) -> tuple[bytes, bytes]:
    """Return a server's secret and public key. Only those who know the secret can make the first, or even the second,
    without which nobody can connect."""
    from zmq.utils import z85

    key = z85.encode(hmac.digest(secret, b"paceline curve server", hashlib.sha256))
    return key, zmq.curve_public(key)


def _cut_off_after(silence_s: float | None, socket: zmq.Socket[bytes]) -> None:
    """Close connections that are silent for so long; None: never, while the other side's system answers."""
    if silence_s is not None:  # a thread of ZeroMQ answers, even while the other threads of a process are busy
        socket.setsockopt(zmq.HEARTBEAT_IVL, round(silence_s * 250))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(silence_s * 1000))
