"""The coordinator's half of the rendezvous: it waits until all hosts are there, then gives each its ranks.

    host -> coordinator   hello: its name, its address, the job that it was started for
    coordinator -> host   welcome: its place; or refused: why, and whether to retry later; ping while waiting

Admission stays open while the job runs: a host that comes later or returns is admitted if the coordinator wants it, and
any other is refused with a reason.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import LaunchError
from paceline.launch.coordinator.coordinator import Coordinator
from paceline.launch.coordinator.join_request import JobTerms, mismatch
from paceline.launch.coordinator.remote_hosts import COORDINATOR_INDEX, FAREWELL_S, PING_S, SILENCE_S, RemoteHost
from paceline.launch.coordinator.takeover import HostReport, Takeover
from paceline.launch.io.authentication import AuthenticatedListener
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.launch.job.placement import ranks_by_host, slots_per_host
from paceline.launch.job.restart_plan import RestartPlan
from paceline.launch.snapshots.snapshot_replication import HostAddress, SnapshotReplication

__all__ = ["HostAdmission"]

RETURN_S = 5.0  # hosts whose coordinator was lost have noticed that by then, and found the one that takes over


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
        takeover: Takeover | None = None,
    ) -> None:
        """`restart_plan`: workers were lost and all restart, on hosts that return. `takeover`: the coordinator was
        lost, and its other hosts return to this one, with their workers at work."""
        self._terms, self._loop, self._say, self._restart_plan = terms, loop, say, restart_plan
        self._takeover = takeover
        self._reports: dict[int, HostReport] = {}  # of hosts that have returned, by index
        self._slots: dict[MessageStream, int | None] = {}  # of each host, as it was told; None: an even share
        self._begin_at = time.monotonic() + RETURN_S
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
        if self._takeover is not None:
            are_late = self._coordinator is None and time.monotonic() >= self._begin_at
            return self._coordinator is not None or are_late or self._reports.keys() >= self._takeover.hosts.keys()
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
        terms, own = self._terms, None
        if self._restart_plan is None and self._takeover is None:
            slots = [terms.job.slots, *(self._slots.get(remote_host.link) for remote_host in self._remote_hosts)]
            try:
                ranks = ranks_by_host(terms.job.workers or 0, slots)
            except ValueError as error:
                raise LaunchError(f"The hosts do not fit the job: {error}.") from error
            own = ranks[COORDINATOR_INDEX]
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
            takeover=self._takeover,
            reports=self._reports,
            head=terms.point,
            ranks=own,
        )
        return self._coordinator

    def _welcome(self, remote_host: RemoteHost) -> None:
        place = {"host_index": remote_host.index, "ranks": sorted(remote_host.workers), "slots": remote_host.slots}
        run = {"attempt": self._terms.attempt, "run_dir": self._terms.run_dir}
        snapshot_addresses = [[index, *at] for index, at in self.snapshot_addresses.items()]
        coordinator = f"{self._terms.host} ({self._address})"
        at = self._terms.point if self._takeover is None else self._takeover.record.address
        about = {"head": coordinator, "at": at, "doors": snapshot_addresses}
        remote_host.link.send({"op": "welcome", **about, **place, **run})

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

    def give_up(self, reason: str, *, signum: int | None = None, may_retry: bool = False) -> None:
        """Refuse the hosts that came, with the reason; a signal that came here ends them as well."""
        said = {"op": "refused", "reason": f"the coordinator gave up: {reason}", "again": may_retry, "signal": signum}
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
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = str(sock.getpeername()[0])
        except OSError:  # it has gone away meanwhile
            sock.close()
            return
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
                self._reports.pop(remote_host.index, None)
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
        if "report" in message:
            return self._on_return(link, name, message)
        refusal = self._coordinator.refusal() if self._coordinator is not None else ("it is about to begin", True)
        if self.complete and refusal is not None:
            reason, may_retry = refusal
            self._turn_away(link, name, f"the run has all its hosts, and {reason}", may_retry=may_retry)
            return None
        slots = self._slots[link] = None if message.get("slots") is None else int(message["slots"])
        remote_host = RemoteHost(
            link=link,
            host=str(message.get("host")),
            address=str(message.get("address")),
            index=len(self._remote_hosts) + 1
            if self._coordinator is None
            else self._coordinator.remote_hosts.next_index,
            slots=slots or slots_per_host(self._terms.asked),
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

    def _on_return(self, link: MessageStream, name: str, message: Mapping[str, Any]) -> RemoteHost | None:
        """A host whose coordinator was lost, and whose workers are at work, takes its place again."""
        index, takeover = int(message["host_index"]), self._takeover
        if takeover is None or self._coordinator is not None or index not in takeover.hosts or index in self._reports:
            self._turn_away(link, name, "it has come too late: its workers have been given up", may_retry=False)
            return None
        report = self._reports[index] = HostReport.from_json(message["report"])
        remote_host = RemoteHost(
            link=link,
            host=str(message.get("host")),
            address=str(message.get("address")),
            index=index,
            slots=report.slots,
            port=int(message.get("port") or 0),
            workers={worker for worker, one in report.workers.items() if not one.has_ended},
            ended=frozenset(worker for worker, one in report.workers.items() if one.has_ended)
            | {ended.worker for ended in report.exits},
            pids=dict(report.pids),
            has_spoken=True,
        )
        self._remote_hosts.append(remote_host)
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
            self._say(f"{name} has to wait: {reason}" if may_retry else f"refused {name}: {reason}")
