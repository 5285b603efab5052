"""Replicates each host's in-memory snapshots to a neighbor host, where they outlive the host, and fetches them back.

The *neighbor* of a host is the next one by index; the last host's is the first. When a worker has finished a snapshot,
its supervisor sends it there in the background, one at a time. The neighbor also has two slots, so the previous
snapshot stays valid until the next one is complete. A worker waits for that (`MemoryCheckpoint.is_replicated`) before
it overwrites the older snapshot. So at every moment there is a step that all hosts and all their neighbors have.

Restoring unpickles part of a snapshot. The sender therefore signs that part with the job's token, and an unsigned
snapshot is discarded: nothing between the hosts can replace it.

For a restart, a host that lacks a snapshot its workers need fetches it from a host that has it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.comm.memory_checkpoint import FIRST_BYTE, ReplicationStatus, SnapshotHeader, SnapshotSlot
from paceline.host_memory import free_bytes
from paceline.launch.io.authentication import AuthenticatedConnection, AuthenticatedListener
from paceline.launch.io.event_loop import EventLoop
from paceline.launch.snapshots.snapshot_connection import SnapshotConnection
from paceline.launch.snapshots.snapshot_store import SnapshotStore
from paceline.units import bytes_text

__all__ = ["HostAddress", "SnapshotReplication"]

RETRY_S = 1.0
MAX_FAILED_ATTEMPTS = 3  # failed attempts in a row after which the neighbor counts as unreachable
MAX_NUMBER = 1 << 62  # in a snapshot's header, where it has eight bytes
HostAddress = tuple[str, int]  # an address and a port


class SnapshotReplication:
    """One host's part in the exchange, within its supervisor's loop. `say` shows the user a sentence."""

    def __init__(
        self, memory_checkpoints: SnapshotStore, token: bytes, loop: EventLoop, say: Callable[[str], None]
    ) -> None:
        self._memory_checkpoints, self._token, self._loop, self._say = memory_checkpoints, token, loop, say
        self._listener: AuthenticatedListener | None = None
        self._incoming: list[_IncomingHost] = []
        self._neighbor: _NeighborSender | None = None
        self._fetching: list[_SnapshotFetch] = []
        self.port = 0

    def open(self, address: str) -> None:
        """Accept other hosts at an address of this one; a connection that does not prove the job's token is refused."""
        if self._listener is None:
            listener = socket.socket(_family(address), socket.SOCK_STREAM)
            listener.bind((address, 0))
            listener.listen()
            self.port = int(listener.getsockname()[1])
            self._listener = AuthenticatedListener(
                listener, self._token, self._loop, on_proved=self._accepted, say=self._say
            )

    def replicate_to(self, at: HostAddress | None, name: str = "") -> None:
        """From now on replicate this host's snapshots to the host called `name`; None: to none."""
        if self._neighbor is not None:
            if self._neighbor.at == at:
                return
            self._neighbor.close()
        self._memory_checkpoints.set_replicating(at is not None)
        self._neighbor = None
        if at is not None:
            self._neighbor = _NeighborSender(
                self._memory_checkpoints, self._token, self._loop, at, name=name, say=self._say
            )

    def kept(self, worker: int) -> None:
        """A worker of this host has finished a snapshot."""
        if self._neighbor is not None:
            self._neighbor.add(worker)

    def fetch(
        self,
        wanted: Mapping[HostAddress, Sequence[int]],
        step: int,
        *,
        done: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        """Fetch workers' snapshots of `step` from other hosts; then call `done()`, or `failed(why)`."""
        left = set(wanted)
        if not left:
            done()

        def one_done(at: HostAddress) -> None:
            left.discard(at)
            if not left:
                done()

        for at, workers in wanted.items():
            self._fetching.append(
                _SnapshotFetch(
                    self._memory_checkpoints, self._token, self._loop, at, workers, step, done=one_done, failed=failed
                )
            )

    def tick(self, now: float) -> None:
        if self._listener is not None:
            self._listener.tick(now)
        if self._neighbor is not None:
            self._neighbor.tick(now)
        for one in self._fetching:
            one.call.tick(now)

    def close(self) -> None:
        """End all transfers; incomplete snapshots do not count."""
        if self._listener is not None:
            self._listener.close()
        for one in (self._neighbor, *self._fetching, *self._incoming):
            if one is not None:
                one.close()

    def _accepted(self, sock: socket.socket) -> None:
        self._incoming = [one for one in self._incoming if not one.connection.closed]
        self._incoming.append(_IncomingHost(self._memory_checkpoints, self._token, sock, self._loop))


class _SnapshotReceiver:
    """Stores incoming snapshots: each counts once its last byte is there and its signature is right."""

    def __init__(self, memory_checkpoints: SnapshotStore, token: bytes) -> None:
        self._memory_checkpoints, self._token = memory_checkpoints, token
        self._slot: SnapshotSlot | None = None
        self._worker, self._mark = -1, SnapshotHeader(step=-1, index=0, index_bytes=0)
        self._refusal = ""

    def load(self, message: Mapping[str, Any]) -> SnapshotSlot | None:
        """Start one snapshot; return the slot for its bytes."""
        self._worker, self._mark, self._refusal = int(message["worker"]), _mark_of(message), ""
        num_bytes = FIRST_BYTE + int(message["bytes"])
        try:
            slot = self._memory_checkpoints.room_for(self._worker)
            slot.clear()
            free = free_bytes()
            if free is not None and num_bytes - slot.num_bytes > free:
                raise OSError(f"it has {bytes_text(num_bytes)}, and {bytes_text(free)} of memory are left")
            slot.reserve(num_bytes)
            self._slot = slot
        except OSError as error:
            self._slot, self._refusal = None, error.strerror or str(error)
        return self._slot

    def whole(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the snapshot and return the answer; ValueError if its signature is wrong."""
        if self._slot is None:
            return {"op": "refused", "worker": self._worker, "reason": self._refusal}
        if not hmac.compare_digest(_signature(self._token, self._worker, self._slot, self._mark), message["signature"]):
            raise ValueError(f"the snapshot of worker {self._worker} is not what its sender has signed")
        self._slot.commit(self._mark)
        self._slot = None
        return {"op": "taken", "worker": self._worker, "step": self._mark.step}


class _IncomingHost:
    """Another host that sends its snapshots here, or asks for one."""

    def __init__(self, memory_checkpoints: SnapshotStore, token: bytes, sock: socket.socket, loop: EventLoop) -> None:
        self._memory_checkpoints, self._token, self._receiver = (
            memory_checkpoints,
            token,
            _SnapshotReceiver(memory_checkpoints, token),
        )
        self.connection = SnapshotConnection(sock, loop, on_message=self._heard, on_close=_unheard)

    def close(self) -> None:
        self.connection.close()

    def _heard(self, message: Mapping[str, Any]) -> SnapshotSlot | None:
        match message["op"]:
            case "load":
                return self._receiver.load(message)
            case "whole":
                self.connection.send(self._receiver.whole(message))
            case "torn":
                self.connection.send({"op": "torn", "worker": int(message["worker"])})
            case "give":
                worker = int(message["worker"])
                slot = self._memory_checkpoints.find(worker, int(message["step"]))
                if slot is None or not _send(self.connection, worker, slot, self._token):
                    self.connection.send({"op": "lacks", "worker": worker})
            case op:
                raise ValueError(f"unknown message {op!r}")
        return None


class _NeighborSender:
    """Sends this host's snapshots to its neighbor, one at a time."""

    def __init__(
        self,
        memory_checkpoints: SnapshotStore,
        token: bytes,
        loop: EventLoop,
        at: HostAddress,
        *,
        name: str,
        say: Callable[[str], None],
    ) -> None:
        self.at = at
        self._memory_checkpoints, self._token, self._loop, self._name, self._say = (
            memory_checkpoints,
            token,
            loop,
            name,
            say,
        )
        # Workers whose newest snapshot is to be sent, oldest first.
        self._waiting = dict.fromkeys(memory_checkpoints.own)
        self._in_flight: tuple[int, float, float] | None = None  # worker, start time, and CPU time used before
        self._connection: SnapshotConnection | None = None
        self._num_failures = 0  # in a row
        self._has_room = True
        self._retry_at: float | None = None
        self._call = AuthenticatedConnection(
            token, loop, on_proved=self._proved, on_failed=lambda reason, _: self._broken(reason)
        )
        self._call.begin(_family(at[0]), at)

    def add(self, worker: int) -> None:
        """A worker has finished another snapshot."""
        if self._has_room:
            self._waiting[worker] = None
            self._send_next()

    def tick(self, now: float) -> None:
        self._call.tick(now)
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._call.begin(_family(self.at[0]), self.at)

    def close(self) -> None:
        self._call.close()
        if self._connection is not None:
            self._connection.close()

    def _proved(self, sock: socket.socket) -> None:
        if self._num_failures >= MAX_FAILED_ATTEMPTS:
            self._memory_checkpoints.set_replicating(True)
            self._waiting = dict.fromkeys(self._memory_checkpoints.own)
        self._num_failures = 0
        self._connection = SnapshotConnection(sock, self._loop, on_message=self._heard, on_close=self._broken)
        self._send_next()

    def _broken(self, reason: str) -> None:
        """The connection is lost, and perhaps the host; in that case the coordinator will name another neighbor."""
        if self._in_flight is not None:
            self._waiting[self._in_flight[0]] = None
        self._connection, self._in_flight, self._retry_at = None, None, time.monotonic() + RETRY_S
        self._num_failures += 1
        if self._num_failures == MAX_FAILED_ATTEMPTS:
            self._stop_replicating(
                f"cannot be reached for copies of them at {self.at[0]}, port {self.at[1]} ({reason})"
            )

    def _stop_replicating(self, why: str) -> None:
        """Tell the user why copies stop, and let no worker wait for one."""
        self._say(f"snapshots in memory stay on their own host: host {self._name} {why}")
        self._memory_checkpoints.set_replicating(False)

    def _send_next(self) -> None:
        while self._connection is not None and self._in_flight is None and self._waiting:
            worker = next(iter(self._waiting))
            del self._waiting[worker]
            slot = self._memory_checkpoints.newest_of(worker)
            if slot is not None and _send(self._connection, worker, slot, self._token):
                self._in_flight = worker, time.monotonic(), self._connection.work_s

    def _heard(self, message: Mapping[str, Any]) -> SnapshotSlot | None:
        if self._in_flight is None or self._connection is None or int(message["worker"]) != self._in_flight[0]:
            raise ValueError(f"an answer without a request: {message}")
        worker, began, worked_s = self._in_flight
        self._in_flight = None
        slot = self._memory_checkpoints.newest_of(worker)
        match message["op"]:
            case "taken" if slot is not None and slot.mark is not None and slot.mark.step == message["step"]:
                work_s = self._connection.work_s - worked_s
                slot.note(ReplicationStatus(step=slot.mark.step, work_s=work_s, took_s=time.monotonic() - began))
            case "taken" | "torn":
                self._waiting[worker] = None
            case "refused":
                self._has_room = False
                self._waiting.clear()
                self._stop_replicating(f"has no room for copies of them ({message['reason']})")
            case op:
                raise ValueError(f"unknown message {op!r}")
        self._send_next()
        return None


class _SnapshotFetch:
    """Asks another host for the snapshots that workers restart from here."""

    def __init__(
        self,
        memory_checkpoints: SnapshotStore,
        token: bytes,
        loop: EventLoop,
        at: HostAddress,
        workers: Sequence[int],
        step: int,
        *,
        done: Callable[[HostAddress], None],
        failed: Callable[[str], None],
    ) -> None:
        self._at, self._workers, self._step = at, set(workers), step
        self._done, self._failed, self._loop = done, failed, loop
        self._receiver = _SnapshotReceiver(memory_checkpoints, token)
        self._connection: SnapshotConnection | None = None
        self.call = AuthenticatedConnection(
            token, loop, on_proved=self._proved, on_failed=lambda reason, _: self._fail(reason)
        )
        self.call.begin(_family(at[0]), at)

    def close(self) -> None:
        self.call.close()
        if self._connection is not None:
            self._connection.close()

    def _proved(self, sock: socket.socket) -> None:
        self._connection = SnapshotConnection(sock, self._loop, on_message=self._heard, on_close=self._fail)
        for worker in sorted(self._workers):
            self._connection.send({"op": "give", "worker": worker, "step": self._step})

    def _heard(self, message: Mapping[str, Any]) -> SnapshotSlot | None:
        match message["op"]:
            case "load":
                return self._receiver.load(message)
            case "whole":
                answer = self._receiver.whole(message)
                if answer["op"] == "refused":
                    self._fail(f"no room for it here ({answer['reason']})")
                    return None
                self._workers.discard(int(answer["worker"]))
                if not self._workers and self._connection is not None:
                    self._connection.close()
                    self._done(self._at)
            case "torn" | "lacks":
                self._fail("it is not there any more")
            case op:
                raise ValueError(f"unknown message {op!r}")
        return None

    def _fail(self, reason: str) -> None:
        if self._workers:
            ranks = ", ".join(map(str, sorted(self._workers)))
            self._workers.clear()
            self.close()
            self._failed(
                f"the state of worker {ranks} after step {self._step} did not come from {self._at[0]}: {reason}"
            )


def _send(connection: SnapshotConnection, worker: int, slot: SnapshotSlot, token: bytes) -> bool:
    """Send a snapshot; False if it is no longer valid. If it is overwritten meanwhile, the receiver discards it as
    torn.
    """
    mark = slot.mark
    if mark is None:
        return False

    def then() -> dict[str, Any]:
        if slot.mark != mark:
            return {"op": "torn", "worker": worker}
        return {"op": "whole", "worker": worker, "signature": _signature(token, worker, slot, mark)}

    num_bytes = mark.index + mark.index_bytes - FIRST_BYTE
    connection.send_slot({"op": "load", "worker": worker, "mark": dataclasses.asdict(mark)}, slot, num_bytes, then=then)
    return True


def _mark_of(message: Mapping[str, Any]) -> SnapshotHeader:
    """Return the header that a snapshot is to have; ValueError where its bytes are not those that are announced."""
    mark = SnapshotHeader(**message["mark"])
    numbers = (mark.step, mark.index, mark.index_bytes, message["bytes"])
    if not all(type(one) is int and 0 <= one < MAX_NUMBER for one in numbers) or type(mark.is_for_all) is not bool:
        raise ValueError(f"a snapshot with the header {message['mark']}")
    if mark.index < FIRST_BYTE or mark.index + mark.index_bytes != FIRST_BYTE + message["bytes"]:
        raise ValueError(f"a snapshot of {message['bytes']:,} bytes with the header {message['mark']}")
    return mark


def _signature(token: bytes, worker: int, slot: SnapshotSlot, mark: SnapshotHeader) -> str:
    """Sign the owner, the header and the pickled part of a snapshot."""
    rest = bytearray(mark.index_bytes)
    slot.read_into(mark.index, memoryview(rest))
    return hmac.digest(token, f"snapshot {worker} {mark} ".encode() + rest, hashlib.sha256).hex()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _unheard(reason: str) -> None:
    """Do nothing: the sending host connects again."""
