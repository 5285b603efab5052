"""The coordinator's half of the rendezvous: it waits until all hosts are there, then gives each its ranks.

    host -> coordinator   hello: its name, its address, the job that it was started for
    coordinator -> host   welcome: its place; or refused: why, and whether to retry later; ping while waiting

Admission stays open while the job runs: a host that comes later or returns is admitted if the coordinator wants it, and
any other is refused with a reason.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from paceline.launch.coordinator.coordinator import Coordinator
from paceline.launch.coordinator.join_request import JobTerms, mismatch
from paceline.launch.coordinator.remote_hosts import COORDINATOR_INDEX, FAREWELL_S, PING_S, SILENCE_S, RemoteHost
from paceline.launch.io.authentication import AuthenticatedListener
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.launch.job.placement import ranks_by_host, slots_per_host
from paceline.launch.job.restart_plan import RestartPlan
from paceline.launch.snapshots.snapshot_replication import HostAddress, SnapshotReplication

__all__ = ["HostAdmission"]


class HostAdmission:
    """Turns connections that have proved the job's token into remote hosts."""

    def __init__(
        self,
        listener: socket.socket,
        terms: JobTerms,
        loop: EventLoop,
        say: Callable[[str], None],
        *,
        replication: SnapshotReplication | None = None,
        restart_plan: RestartPlan | None = None,
    ) -> None:
        """`restart_plan`: workers were lost and all restart, on hosts that return."""
        self._terms, self._loop, self._say, self._restart_plan = terms, loop, say, restart_plan
        self._replication = replication
        self._remote_hosts: list[RemoteHost] = []  # with which the job starts
        self._unnamed: set[MessageStream] = set()  # proved the token, but sent no hello yet
        self._turned_away: set[str] = set()  # each refusal is reported once
        self._coordinator: Coordinator | None = None
        self._next_ping = 0.0
        self._address = str(listener.getsockname()[0])
        if replication is not None:
            replication.open(self._address)
        self._listener = AuthenticatedListener(listener, terms.token, loop, on_proved=self._accepted, say=say)
        name = terms.at[0]
        if self._address.startswith("127.") and name not in ("localhost", self._address):
            say(
                f"{name} means {self._address} on this host, which no other machine reaches: if no host "
                "joins, use an address of this host's network as head"
            )

    @property
    def complete(self) -> bool:
        return len(self._remote_hosts) == self._num_remote_hosts

    @property
    def _num_remote_hosts(self) -> int:
        return (self._terms.job.hosts if self._restart_plan is None else len(self._restart_plan.ranks)) - 1

    @property
    def progress(self) -> str:
        """What is being waited for, as a sentence."""
        more = self._num_remote_hosts - len(self._remote_hosts)
        here = ", ".join([self._terms.host, *(remote_host.host for remote_host in self._remote_hosts)])
        return f"waiting at {self._terms.point} for {more} more host{'' if more == 1 else 's'}; here: {here}"

    def tick(self, now: float) -> None:
        self._listener.tick(now)
        for link in [link for link in self._unnamed if now - link.last_received > SILENCE_S]:
            self._unnamed.discard(link)
            link.close()
        if self._coordinator is None and now >= self._next_ping:
            self._next_ping = now + PING_S
            for remote_host in self._remote_hosts:
                remote_host.link.send({"op": "ping"})

    def welcome(self) -> Coordinator:
        """Assign the ranks, send every host its place, and return the coordinator."""
        terms = self._terms
        if self._restart_plan is None:
            ranks = ranks_by_host(terms.job.workers or 0, terms.job.hosts)
            for index, remote_host in enumerate(self._remote_hosts, start=1):
                remote_host.index, remote_host.slots, remote_host.workers = index, len(ranks[index]), set(ranks[index])
        for remote_host in self._remote_hosts:
            self._welcome(remote_host)
        self._coordinator = Coordinator(
            host=terms.host,
            address=self._address,
            job=terms.job,
            remote_hosts=self._remote_hosts,
            admission=self,
            attempt=terms.attempt,
            run_dir=terms.run_dir,
            say=self._say,
            snapshot_addresses=self.snapshot_addresses,
            restart_plan=self._restart_plan,
        )
        return self._coordinator

    def _welcome(self, remote_host: RemoteHost) -> None:
        place = {"host_index": remote_host.index, "ranks": sorted(remote_host.workers), "slots": remote_host.slots}
        run = {"attempt": self._terms.attempt, "run_dir": self._terms.run_dir}
        snapshot_addresses = [[index, *at] for index, at in self.snapshot_addresses.items()]
        coordinator = f"{self._terms.host} ({self._address})"
        remote_host.link.send({"op": "welcome", "head": coordinator, **place, **run, "doors": snapshot_addresses})

    @property
    def snapshot_addresses(self) -> dict[int, HostAddress]:
        """Where each host serves the snapshots that workers of other hosts start from."""
        found = {
            remote_host.index: (remote_host.address, remote_host.port)
            for remote_host in self._remote_hosts
            if remote_host.port
        }
        return found | (
            {} if self._replication is None else {COORDINATOR_INDEX: (self._address, self._replication.port)}
        )

    def give_up(self, reason: str, *, signum: int | None = None) -> None:
        """Refuse the hosts that came, with the reason; a signal that came here ends them as well."""
        said = {"op": "refused", "reason": f"the coordinator gave up: {reason}", "again": False, "signal": signum}
        for remote_host in self._remote_hosts:
            remote_host.link.send(said)
            remote_host.link.flush(FAREWELL_S)
            remote_host.link.close()
        self.close()

    def close(self, *, keep_listening: bool = False) -> socket.socket | None:
        """Admit no more hosts; joined hosts stay. With `keep_listening` the listening socket is returned for hosts that
        return soon.
        """
        while self._unnamed:
            self._unnamed.pop().close()
        return self._listener.close(keep_listening=keep_listening)

    def _accepted(self, sock: socket.socket) -> None:
        """Read messages from a connection that has proved the token."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = str(sock.getpeername()[0])
        remote_host: RemoteHost | None = None

        def received(message: Mapping[str, Any]) -> None:
            nonlocal remote_host
            if remote_host is None:
                self._unnamed.discard(link)
                remote_host = self._on_hello(link, address, message)
            elif self._coordinator is not None:
                self._coordinator.remote_hosts.on_message(remote_host, message)
            elif message.get("op") == "leaving" and remote_host in self._remote_hosts:
                link.close()
                closed(ConnectionError("it was stopped"))

        def closed(error: Exception) -> None:
            self._unnamed.discard(link)
            if remote_host is not None and self._coordinator is not None:
                self._coordinator.remote_hosts.lose(remote_host, str(error))
            elif remote_host is not None:
                self._remote_hosts.remove(remote_host)
                self._say(f"{remote_host.name} has left: {error}")

        link = MessageStream(sock, self._loop, on_message=received, on_close=closed)
        self._unnamed.add(link)

    def _on_hello(self, link: MessageStream, address: str, message: Mapping[str, Any]) -> RemoteHost | None:
        """Admit a host that was started for this job; refuse any other with the reason."""
        job, name = message.get("job"), f"host {message.get('host')} ({address})"
        different = mismatch(self._terms.essentials, job if isinstance(job, dict) else {})
        if different:
            self._turn_away(link, name, f"it was started for another job ({different})", may_retry=False)
            return None
        refusal = self._coordinator.refusal() if self._coordinator is not None else ("it is about to begin", True)
        if self.complete and refusal is not None:
            reason, may_retry = refusal
            self._turn_away(link, name, f"the run has all its hosts, and {reason}", may_retry=may_retry)
            return None
        remote_host = RemoteHost(
            link=link,
            host=str(message.get("host")),
            address=str(message.get("address")),
            index=len(self._remote_hosts) + 1
            if self._coordinator is None
            else self._coordinator.remote_hosts.next_index,
            slots=slots_per_host(self._terms.asked),
            port=int(message.get("port") or 0),
        )
        if self._coordinator is None and self._restart_plan is not None:
            if not self._reclaims_place(remote_host, message.get("host_index"), self._restart_plan):
                self._turn_away(link, name, "all workers are about to restart after a loss", may_retry=True)
                return None
            self._remote_hosts.append(remote_host)
        elif self._coordinator is None:
            self._remote_hosts.append(remote_host)
            self._say(f"{remote_host.name} has come: {len(self._remote_hosts) + 1} of {self._terms.job.hosts}")
        else:
            self._welcome(remote_host)
            self._coordinator.join(remote_host)
        return remote_host

    def _reclaims_place(self, remote_host: RemoteHost, host_index: Any, restart_plan: RestartPlan) -> bool:
        """Give a returning host the place that it had; return False if it had none."""
        taken = {COORDINATOR_INDEX, *(other.index for other in self._remote_hosts)}
        if not isinstance(host_index, int) or host_index not in restart_plan.ranks or host_index in taken:
            return False
        remote_host.index, remote_host.slots = host_index, restart_plan.slots[host_index]
        remote_host.workers = set(restart_plan.ranks[host_index])
        return True

    def _turn_away(self, link: MessageStream, name: str, reason: str, *, may_retry: bool) -> None:
        link.send({"op": "refused", "reason": reason, "again": may_retry})
        link.close()
        if f"{name}{reason}" not in self._turned_away:
            self._turned_away.add(f"{name}{reason}")
            self._say(f"refused {name}: {reason}")
