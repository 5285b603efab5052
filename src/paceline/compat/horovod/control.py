"""The control thread of a worker: it sends what the worker submits to the coordinator, and brings back the verdicts.

Worker 0's thread is the coordinator as well (`negotiation.py`), whatever its main thread does. Members have one
connection to it, over which lines of JSON travel (`requests.py`): a socket that admits no stranger
(`comm/peer_sockets/meeting.py`). The thread sleeps until something comes.

Submissions wait for a moment, so that many travel in one line: until somebody waits for a result, until there are
`batch_bytes` of them, or for the cycle time at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

from paceline.compat.horovod.negotiation import Negotiation
from paceline.compat.horovod.requests import Kind, OpRequest, OpVerdict, decoded, encoded

__all__ = ["ControlLimits", "ControlThread"]

READ_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 28
BARRIER_S = 0.005  # that a barrier waits for other submissions; it hurries nobody
LOOK_S = 1.0  # between two looks at what is stalled, while something waits
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
FAREWELL_S = 5.0  # for which lines still to be sent may take when the thread ends

log = logging.getLogger("paceline.horovod")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlLimits:
    """Times in seconds. `warn_s` 0: no warning of stalled operations."""

    cycle_s: float
    warn_s: float
    stall_s: float  # after which what some have not submitted fails
    batch_bytes: int


class _Connection:
    """A connection to the coordinator, or to a member."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank, self.sock = rank, sock
        self.incoming, self.outgoing = bytearray(), bytearray()
        sock.setblocking(False)


class ControlThread:
    """One for each session. `follow(verdict)` and `fail(reason)` are called in the thread, and must not block.

    `why_over()` is asked every second: a text says that the session has ended, though no connection has.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        *,
        rank: int,
        coordinator: int,
        negotiation: Negotiation | None,
        limits: ControlLimits,
        follow: Callable[[OpVerdict], None],
        fail: Callable[[str], None],
        why_over: Callable[[], str],
    ) -> None:
        self._rank, self._coordinator, self._limits = rank, coordinator, limits
        self._negotiation, self._follow, self._fail = negotiation, follow, fail
        self._why_over = why_over
        self._connections = {peer: _Connection(peer, sock) for peer, sock in sockets.items()}
        self._lock = threading.Lock()  # of the batch
        self._io = threading.RLock()  # of the connections and the negotiation
        self._batch: list[OpRequest] = []
        self._batch_bytes, self._batch_due, self._is_urgent = 0, 0.0, False
        self._leaves, self._failure, self._is_over = False, "", False
        self._heard_at = self._sent_at = self._looked_at = time.monotonic()
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._wake, self._woken):
            sock.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for connection in self._connections.values():
            self._selector.register(connection.sock, selectors.EVENT_READ, connection)
        _open.add(self)
        self._thread = threading.Thread(target=self._serve, name="paceline-horovod-control", daemon=True)
        self._thread.start()

    def submit(self, request: OpRequest, *, is_urgent: bool) -> None:
        """Have a request sent to the coordinator, at once or with the next ones."""
        with self._lock:
            self._batch.append(request)
            self._batch_bytes += request.num_bytes
            is_first = len(self._batch) == 1
            due = time.monotonic() + (BARRIER_S if request.kind == Kind.BARRIER else self._limits.cycle_s)
            is_sooner = is_first or due < self._batch_due
            if is_sooner:
                self._batch_due = due
            self._is_urgent = self._is_urgent or is_urgent or self._batch_bytes >= self._limits.batch_bytes
            wakes = is_sooner or self._is_urgent
        if wakes:
            self._nudge()

    def flush(self) -> None:
        """Have all submitted requests sent now, by the calling thread if it can: somebody waits for a result."""
        with self._lock:
            if not self._batch or self._is_urgent:
                return
            self._is_urgent = True
        if self._io.acquire(blocking=False):
            try:
                if not self._is_over:
                    self._send_batch()
            finally:
                self._io.release()
        else:
            self._nudge()

    def leave(self) -> None:
        """Tell the coordinator that this worker submits nothing more."""
        self._leaves = True
        self._nudge()

    def report_failure(self, reason: str) -> None:
        """Tell the coordinator that nothing can run any more: all workers hear it."""
        self._failure = self._failure or reason
        self._nudge()

    def end(self) -> None:
        """End the thread once what it has to send is sent. The coordinator's goes on until no worker needs it."""
        self._is_over = True
        self._nudge()

    def join(self, limit_s: float) -> None:
        """Wait for the end of the thread, for so long at most."""
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s)

    def drop(self) -> None:
        """Close the descriptors in a process that was forked: the connections are its parent's."""
        for sock in (self._wake, self._woken, *(one.sock for one in self._connections.values())):
            with contextlib.suppress(OSError):
                os.close(sock.detach())

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _serve(self) -> None:
        try:
            while not self._has_ended():
                ready = self._selector.select(self._patience_s())
                with self._io:
                    for key, events in ready:
                        self._serve_one(key.data, events)
                    self._send_batch()
                    self._look()
        except Exception as error:  # the boundary of the thread: others would wait for it
            log.exception("the control thread of rank %d has failed", self._rank)
            self._fail(f"the control thread of rank {self._rank} has failed: {error}")
        finally:
            with self._io:
                self._is_over = True
                self._say_farewell()

    def _serve_one(self, connection: _Connection | None, events: int) -> None:
        if connection is None:
            with contextlib.suppress(*NOT_NOW):
                while self._woken.recv(4096):
                    pass
            return
        if events & selectors.EVENT_READ:
            self._read(connection)
        if events & selectors.EVENT_WRITE and connection.rank in self._connections:
            self._write(connection)

    def _has_ended(self) -> bool:
        return self._is_over and (self._negotiation is None or self._negotiation.is_over)

    def _patience_s(self) -> float:
        """How long nothing has to be done, unless something comes."""
        with self._lock:
            if self._batch:
                return 0.0 if self._is_urgent else max(0.0, self._batch_due - time.monotonic())
        return LOOK_S

    def _send_batch(self) -> None:
        with self._lock:
            is_due = self._batch and (self._is_urgent or self._leaves or time.monotonic() >= self._batch_due)
            batch = self._batch if is_due else []
            if is_due:
                self._batch, self._batch_bytes, self._is_urgent = [], 0, False
        if batch:
            self._say("requests", batch)
        if self._failure:
            reason, self._failure = self._failure, ""
            self._say("failed", reason)
        if self._leaves:
            self._leaves = False
            self._say("leave", None)

    def _say(self, kind: str, content: list[OpRequest] | str | None) -> None:
        """Tell the coordinator, which may be this worker."""
        if self._negotiation is not None:
            self._hear(self._rank, kind, content)
        elif (connection := self._connections.get(self._coordinator)) is not None:
            line = encoded(kind, content) if isinstance(content, list) else _plain(kind, content)
            self._queue(connection, line)

    def _hear(self, rank: int, kind: str, content: list[OpRequest] | str | None) -> None:
        """Take what a member says, as the coordinator."""
        negotiation, now = self._negotiation, time.monotonic()
        if negotiation is None:
            return
        if kind == "requests" and isinstance(content, list):
            negotiation.submit(rank, content, now=now)
        elif kind == "failed":
            negotiation.fail(str(content))
        elif kind == "leave":
            negotiation.leave(rank)
        self._spread(negotiation)

    def _spread(self, negotiation: Negotiation) -> None:
        """Tell the members what was decided."""
        by_rank: dict[int, list[OpVerdict]] = {}
        for verdict, ranks in negotiation.decide():
            for rank in ranks:
                by_rank.setdefault(rank, []).append(verdict)
        for rank, verdicts in by_rank.items():
            if rank == self._rank:
                self._follow_all(verdicts)
            elif (connection := self._connections.get(rank)) is not None:
                self._queue(connection, encoded("verdicts", verdicts))

    def _follow_all(self, verdicts: Iterable[OpVerdict]) -> None:
        for verdict in verdicts:
            if verdict.kind == Kind.FAILED:
                self._fail(verdict.error)
            self._follow(verdict)

    def _look(self) -> None:
        """Look at what is stalled, and give or expect a sign of life."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        negotiation, limits = self._negotiation, self._limits
        if (reason := self._why_over()) and not self._is_over:
            self._fail(reason)
        if negotiation is None:
            if now - self._heard_at > limits.stall_s + 2 * _sign_s(limits):
                self._lose_coordinator(f"nothing was heard of it for {now - self._heard_at:.0f} s")
            return
        if limits.warn_s:
            for stalled in negotiation.stalled(now, after_s=limits.warn_s):
                log.warning(
                    "%s has waited for %.0f s for ranks %s, which have not submitted it. Other ranks may submit other "
                    "tensors, or have gone on without it",
                    stalled.name,
                    stalled.waited_s,
                    ", ".join(map(str, stalled.missing)),
                )
        negotiation.expire(now, limit_s=limits.stall_s)
        self._spread(negotiation)
        if now - self._sent_at > _sign_s(limits):
            self._sent_at = now
            for connection in list(self._connections.values()):
                self._queue(connection, _plain("alive", None))

    def _queue(self, connection: _Connection, line: bytes) -> None:
        connection.outgoing += line
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        """Send as much as the system takes."""
        try:
            while connection.outgoing:
                del connection.outgoing[: connection.sock.send(connection.outgoing)]
        except NOT_NOW:
            pass
        except OSError as error:
            self._lose(connection, f"was lost ({error.strerror or error})")
            return
        if connection.rank in self._connections:  # it may have been lost meanwhile
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outgoing else 0)
            self._selector.modify(connection.sock, events, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            while True:
                data = connection.sock.recv(READ_BYTES)
                if not data:
                    self._lose(connection, "was lost: its process has ended")
                    return
                connection.incoming += data
                self._heard_at = time.monotonic()
                if len(connection.incoming) > MAX_LINE_BYTES:
                    raise ValueError("a message without an end")
                self._take_lines(connection)
        except NOT_NOW:
            return
        except (OSError, ValueError) as error:
            self._lose(connection, f"was lost ({error})")

    def _take_lines(self, connection: _Connection) -> None:
        *lines, rest = connection.incoming.split(b"\n")
        connection.incoming = rest
        for line in lines:
            kind, content = decoded(bytes(line))
            if kind == "verdicts":
                self._follow_all(content)
            elif kind == "requests":
                self._hear(connection.rank, kind, content)
            elif kind in ("failed", "leave"):
                self._hear(connection.rank, kind, str(content[0]))

    def _lose(self, connection: _Connection, reason: str) -> None:
        """A connection has ended."""
        if self._connections.pop(connection.rank, None) is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        if self._negotiation is not None:
            self._negotiation.lose(connection.rank, reason)
            self._spread(self._negotiation)
        elif not self._is_over:
            self._lose_coordinator(reason)

    def _lose_coordinator(self, reason: str) -> None:
        self._fail(f"rank {self._coordinator}, which coordinates the others, {reason}")

    def _say_farewell(self) -> None:
        """Send what is left, and close."""
        deadline = time.monotonic() + FAREWELL_S
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
                connection.sock.sendall(connection.outgoing)
            connection.sock.close()
        self._selector.close()
        for sock in (self._wake, self._woken):
            sock.close()


def _plain(kind: str, content: str | None) -> bytes:
    return json.dumps([kind, content]).encode() + b"\n"


def _sign_s(limits: ControlLimits) -> float:
    """The time between two signs of life of the coordinator."""
    return max(LOOK_S, min(10.0, limits.stall_s / 4))


_open: weakref.WeakSet[ControlThread] = weakref.WeakSet()


def _drop_all() -> None:
    for control in list(_open):
        control.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all)
