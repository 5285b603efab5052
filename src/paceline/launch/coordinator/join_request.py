"""How another host joins the coordinator: one attempt, and the job terms that must be the same on all hosts."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.launch.coordinator.host_agent import HostAgent
from paceline.launch.coordinator.remote_hosts import FAREWELL_S, SILENCE_S
from paceline.launch.io.authentication import AuthenticatedConnection
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.launch.io.signals import STOP_SIGNALS
from paceline.launch.snapshots.snapshot_replication import SnapshotReplication
from paceline.plan.job import Job

__all__ = ["JobTerms", "JoinRequest", "mismatch"]


class JoinRequest:
    """Connects, proves the token, says hello and waits for a place: the result is `member`, or `failed` says why not.

    If the coordinator's name has several addresses, `number` chooses one, modulo their count. `host_index` is the index
    that this host had before a restart.
    """

    def __init__(
        self,
        terms: JobTerms,
        loop: EventLoop,
        say: Callable[[str], None],
        *,
        number: int,
        replication: SnapshotReplication | None,
        host_index: int | None,
    ) -> None:
        self._terms, self._loop, self._say = terms, loop, say
        self._replication, self._host_index = replication, host_index
        self.member: HostAgent | None = None
        self.failed = ""
        self.final = False  # retrying is useless
        self.was_refused = False  # a coordinator of the job is there
        self.signum: int | None = None  # the signal that stopped the coordinator
        self._call = AuthenticatedConnection(terms.token, loop, on_proved=self._proved, on_failed=self._fail)
        self._link: MessageStream | None = None
        self._connect(number)

    @property
    def progress(self) -> str:
        """What is being waited for, as a sentence."""
        if self._link is None:
            return f"connecting to the coordinator at {self._terms.point}"
        return f"waiting with the coordinator at {self._terms.point} for the other hosts"

    def tick(self, now: float) -> None:
        self._call.tick(now)
        if self._link is not None and self.member is None and now - self._link.last_received > SILENCE_S:
            self._fail(f"the coordinator sent nothing for {SILENCE_S:.0f} s")

    def withdraw(self, signum: int) -> None:
        """Tell the coordinator that a signal stopped this host; it may have counted on it already."""
        if self._link is not None:
            self._link.send({"op": "leaving", "signal": signum, "reason": ""})
            self._link.flush(FAREWELL_S)
            self._link.close()

    def close(self) -> None:
        """Close the connection unless a `HostAgent` has taken it over."""
        self._call.close()
        if self._link is not None and self.member is None:
            self._link.close()

    def _connect(self, number: int) -> None:
        try:
            found = socket.getaddrinfo(*self._terms.at, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            self._fail(f"the name {self._terms.at[0]} is not known ({error.strerror})")
            return
        family, _, _, _, address = found[number % len(found)]
        self._call.begin(family, address)

    def _proved(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The address that faces the coordinator: other hosts reach this one there too.
        self._address = str(sock.getsockname()[0])
        self._link = MessageStream(sock, self._loop, on_message=self._on_message, on_close=self._closed)
        port = 0
        if self._replication is not None:
            self._replication.open(self._address)
            port = self._replication.port
        self._port = port
        self._link.send({**self._hello(self._address), "host_index": self._host_index})

    def _hello(self, address: str) -> dict[str, Any]:
        identity = {"host": self._terms.host, "address": address, "port": self._port}
        return {"op": "hello", **identity, "slots": self._terms.job.slots, "job": self._terms.essentials}

    def _on_message(self, message: Mapping[str, Any]) -> None:
        if self.member is not None:
            self.member.on_message(message)
        elif message.get("op") == "refused":
            self.was_refused = True
            if isinstance(message.get("signal"), int) and message["signal"] in STOP_SIGNALS:
                self.signum = message["signal"]
            self._fail(str(message.get("reason")), final=not message.get("again"))
        elif message.get("op") == "welcome":
            self._become_member(message)
        elif message.get("op") != "ping":
            self._fail(f"the coordinator sent {message.get('op')!r} instead of a welcome", final=True)

    def _become_member(self, message: Mapping[str, Any]) -> None:
        if self._link is None:
            return
        try:
            self.member = HostAgent(
                self._link,
                coordinator=str(message["head"]),
                host=self._terms.host,
                address=self._address,
                host_index=int(message["host_index"]),
                ranks=tuple(map(int, message["ranks"])),
                slots=int(message["slots"]),
                attempt=int(message["attempt"]),
                run_dir=str(message["run_dir"]),
                silence_s=self._terms.job.silence_s,
                say=self._say,
                token=self._terms.token,
                loop=self._loop,
                hello=self._hello,
                snapshot_addresses={int(index): (str(host), int(port)) for index, host, port in message["doors"]},
            )
            self.member.head = str(message["at"])
        except (KeyError, TypeError, ValueError) as error:
            self._fail(f"the coordinator's welcome is invalid ({type(error).__name__}: {error})", final=True)

    def _closed(self, error: Exception) -> None:
        if self.member is not None:
            self.member.coordinator_lost(str(error))
        else:
            self._fail(f"the coordinator is lost: {error}")

    def _fail(self, reason: str, final: bool = False) -> None:
        if self.failed:
            return
        self.failed, self.final = reason, final
        self.close()


PROTOCOL = 8  # version of the messages between hosts; raised when they change


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobTerms:
    """The job as this host was started for it."""

    job: Job  # as it starts now: after a restart perhaps with fewer workers
    asked: Job  # as this host's user started it
    plan: str  # what command and job file say of it, as text
    attempt: int
    run_dir: str  # as this host's user wrote it
    host: str  # this host's name
    at: tuple[str, int]  # the rendezvous address: host and port
    token: bytes = dataclasses.field(repr=False)

    @property
    def point(self) -> str:
        """The rendezvous address as the user wrote it."""
        return self.job.head or ""

    @property
    def essentials(self) -> dict[str, Any]:
        """The terms that must be the same on all hosts, in the user's words."""
        return {
            "protocol": PROTOCOL,
            "program": Path(self.job.program).name or "(a function)",
            "workers": self.asked.workers,
            "hosts": self.asked.hosts,
            "plan": self.plan,
        }


def mismatch(coordinator: Mapping[str, Any], host: Mapping[str, Any]) -> str:
    """Name the terms that differ, with both values; "" if all agree."""
    ours, theirs = coordinator, host
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return ", ".join(
        f"{name}: {ours.get(name)!r} on the coordinator's host, {theirs.get(name)!r} here" for name in names
    )
