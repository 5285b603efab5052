"""The other hosts of a job as the coordinator sees them, and the host on which each worker runs.

    host -> coordinator   said (a worker's request or notice), started, exited (with its error.json), leaving,
                          ping (`asked`: the time by the host's own clock), barren (it can fork no more workers),
                          gone (all its workers ended; which snapshots it has in memory), sees (whether it sees the
                          run's register)
    coordinator -> host   tell (a message for a worker), stop (SIGKILL follows after `grace_s`), kill,
                          ping (the answer: workers may go on until `for_s` seconds after `asked`),
                          start and kill_worker (elastic runs), again (kill all workers for a restart),
                          neighbour (the host that receives copies of its snapshots), drop (free the snapshots of
                          a worker that left), end (the outcome of the run, or of this host alone),
                          left (the coordinator's host leaves: another one is to take over)
    for the hang monitor  host -> coordinator: doing (worker activity); coordinator -> host: stack (write stacks)

A host is lost, with all its workers, if it closes its connection, is silent too long or sends an invalid message.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from paceline.elastic.membership_messages import PREEMPTED
from paceline.launch.fork.local_workers import LocalWorkers
from paceline.launch.io.event_loop import MessageStream
from paceline.launch.job.outcome import JobOutcome, WorkerExit, lost_worker
from paceline.launch.job.placement import HostSlots
from paceline.launch.job.restart_plan import RemainingHost
from paceline.launch.snapshots.snapshot_replication import SnapshotReplication

__all__ = ["COORDINATOR_INDEX", "FAREWELL_S", "PING_S", "SILENCE_S", "RemoteHost", "RemoteHosts", "RemoteHostsListener"]

PING_S = 1.0
SILENCE_S = 15.0  # a host that has been silent for this long is lost
FAREWELL_S = 2.0  # to send the outcome to the other hosts
COORDINATOR_INDEX = 0  # the index of the coordinator's host


@dataclasses.dataclass(kw_only=True)
class RemoteHost:
    """Another host, as the coordinator sees it."""

    link: MessageStream
    host: str  # its name
    address: str  # as its peers see it
    index: int
    slots: int  # workers that it has room for
    port: int = 0  # where it accepts copies of other hosts' snapshots; 0: it does not
    workers: set[int] = dataclasses.field(default_factory=set[int])  # ranks that are or were on it
    ended: frozenset[int] = frozenset()  # ranks whose ends it had seen when this coordinator took over
    pids: dict[int, int] = dataclasses.field(default_factory=dict)
    # The pid of the predecessor of each restarted worker.
    former: dict[int, int] = dataclasses.field(default_factory=dict)
    has_spoken: bool = False  # since it was welcomed
    sees_register: bool = False  # the run's register, as it has said: it could take over
    leave_by: float | None = None  # it was asked to leave, and its workers must have left by then

    @property
    def name(self) -> str:
        """Name and address."""
        return f"host {self.host} ({self.address})"


class RemoteHostsListener(Protocol):
    """The coordinator, which receives what other hosts and their workers report."""

    def request(self, worker: int, request: Mapping[str, Any]) -> None: ...

    def exited(self, ended: WorkerExit) -> None: ...

    def remote_host_ended_workers(self, remote_host: RemoteHost, left: RemainingHost) -> None:
        """The host has ended its workers for a restart."""
        ...

    def remote_host_leaves(self, remote_host: RemoteHost, signum: int, *, at_once: bool) -> None:
        """Its supervisor got a signal; with `at_once` it was the second one, and the host kills its workers."""
        ...

    def remote_host_lost(
        self, remote_host: RemoteHost, exits: Sequence[WorkerExit], message: str, *, silent_s: float
    ) -> None:
        """The host is lost; `exits` are its workers, and `silent_s` is for how long it had been silent."""
        ...


class RemoteHosts:
    """Finds the host of each worker, this one or another, and sends messages there."""

    def __init__(
        self,
        remote_hosts: Sequence[RemoteHost],
        *,
        own: Collection[int],
        slots: int,
        host: RemoteHostsListener,
        name: str,
        lease_s: float,
    ) -> None:
        """`own` are the ranks on the coordinator's host, which has `slots` slots and is called `name`. `lease_s` is how
        long workers of another host may go on after the coordinator answered a ping of that host.
        """
        self.here = set(own)  # ranks whose files are on the coordinator's host
        self.on_activity: Callable[[Sequence[Mapping[str, Any]], float], None] = _unheard  # of other hosts' workers
        self._host, self._name, self._lease_s = host, name, lease_s
        self._local_workers: LocalWorkers | None = None
        self._remote_hosts: dict[int, RemoteHost] = {}
        self._slots = HostSlots()
        self._slots.open(COORDINATOR_INDEX, slots, own)
        self._num_hosts = 1  # hosts that ever joined
        self._quiet: set[int] = set()  # hosts silent for at least half of the limit
        self._released: list[MessageStream] = []  # of hosts that have left; they close the connection
        for remote_host in remote_hosts:
            self.add(remote_host)

    def __iter__(self) -> Iterator[RemoteHost]:
        return iter(tuple(self._remote_hosts.values()))

    def lead(self, local_workers: LocalWorkers) -> None:
        """Take over the local workers of the coordinator's host."""
        self._local_workers = local_workers

    @property
    def next_index(self) -> int:
        """The index of the next host that joins; no index is used twice."""
        return self._num_hosts

    def add(self, remote_host: RemoteHost) -> None:
        """Add a host."""
        self._num_hosts = max(self._num_hosts, remote_host.index + 1)
        self._remote_hosts[remote_host.index] = remote_host
        self._slots.open(remote_host.index, remote_host.slots, remote_host.workers)

    # Workers, wherever they are.

    def host_of(self, worker: int) -> str:
        """The name of a worker's host."""
        remote_host = self._remote_host_of(worker)
        return self._name if remote_host is None else remote_host.host

    def workers_of(self, remote_host: RemoteHost) -> frozenset[int]:
        """Return the workers that run on a host now."""
        return self._slots.workers_on(remote_host.index)

    @property
    def own_workers(self) -> frozenset[int]:
        """The workers that run on the coordinator's host now."""
        return self._slots.workers_on(COORDINATOR_INDEX)

    def hosts_of(self, workers: Collection[int]) -> frozenset[int]:
        """The indices of the hosts on which these workers are."""
        return frozenset(self._slots.host_of(worker) or COORDINATOR_INDEX for worker in workers)

    def has_place(self, worker: int) -> bool:
        """Return whether a worker has a host, or a lost worker's successor has one."""
        return self._slots.host_of(worker) is not None

    def shut_own(self) -> None:
        """Start no more workers on the coordinator's host: it can fork none, or is to leave."""
        self._slots.shut(COORDINATOR_INDEX)

    def room(self, workers_each: int, *, without: Collection[int] = ()) -> int:
        """Return how many more replicas of `workers_each` workers have free slots, once the workers `without` are
        gone.
        """
        return self._slots.room(workers_each, without=without)

    def granted(self, shares: Mapping[str, int]) -> dict[int, int]:
        """Return the share of each host that can start workers, by index. `shares` has them by name; a host that is not
        in it has none, and one that is not here is passed over.
        """
        names = {
            index: self._name if index == COORDINATOR_INDEX else self._remote_hosts[index].host
            for index in self._slots.open_hosts
        }
        newest = {name: index for index, name in names.items()}  # of one name: the others are about to leave
        return {index: shares.get(name, 0) if newest[name] == index else 0 for index, name in names.items()}

    def limit(self, granted: Mapping[int, int], *, workers_each: int) -> frozenset[int]:
        """Give hosts slots for so many replicas; return the workers that are too many on theirs."""
        excess = frozenset[int]()
        for index, replicas in granted.items():
            excess |= self._slots.limit(index, replicas * workers_each, workers_each=workers_each)
        return excess

    def send(self, worker: int, message: Mapping[str, Any]) -> None:
        """Send a message to a worker."""
        remote_host = self._remote_host_of(worker)
        if remote_host is not None:
            remote_host.link.send({"op": "tell", "worker": worker, "message": message})
        elif self._local_workers is not None:
            self._local_workers.send(worker, message)

    def start(self, replica: Sequence[int], *, workers: int, incarnation: int) -> None:
        """Start the workers of a replica where most slots are free; the run then has `workers` workers."""
        numbers = {"workers": workers, "incarnation": incarnation}
        self._slots.place(replica, quiet=self._quiet)
        for worker in replica:
            remote_host = self._remote_host_of(worker)
            if remote_host is not None:
                self.here.discard(worker)
                remote_host.workers.add(worker)
                remote_host.former[worker] = remote_host.pids.pop(worker, 0)
                remote_host.link.send({"op": "start", "worker": worker, **numbers})
            elif self._local_workers is not None:
                self.here.add(worker)
                self._local_workers.add(worker, **numbers)

    def kill(self, worker: int) -> None:
        """Send SIGKILL to one worker."""
        remote_host = self._remote_host_of(worker)
        if remote_host is not None:
            remote_host.link.send({"op": "kill_worker", "worker": worker})
        elif self._local_workers is not None:
            self._local_workers.kill_worker(worker)

    def request_stacks(self, worker: int) -> None:
        """Make a worker write its Python stacks."""
        remote_host = self._remote_host_of(worker)
        if remote_host is not None:
            remote_host.link.send({"op": "stack", "worker": worker})
        elif self._local_workers is not None:
            self._local_workers.request_stacks(worker)

    @property
    def unheard(self) -> frozenset[int]:
        """Workers on silent hosts: nothing can be heard of them, and they are lost if their host is."""
        return frozenset[int]().union(*map(self._slots.workers_on, self._quiet))

    def forget(self, worker: int, *, for_good: bool) -> None:
        """Remove a worker. If it was lost (not `for_good`), its successor starts on the same host."""
        if for_good:
            if self._local_workers is not None:
                self._local_workers.drop_state(worker)
            self.broadcast({"op": "drop", "worker": worker})
            self._slots.leave(worker)
        else:
            self._slots.lose(worker)

    # Other hosts.

    def shut(self, remote_host: RemoteHost) -> None:
        """Start no more workers on this host; those that run there stay."""
        self._slots.shut(remote_host.index)

    def release(self, remote_host: RemoteHost, message: Mapping[str, Any]) -> None:
        """Send a last message to a host without workers, and let it go."""
        del self._remote_hosts[remote_host.index]
        self._slots.close(remote_host.index)
        self._released.append(remote_host.link)  # closed here, it could lose the message
        remote_host.link.send(message)

    def release_leavers(self, now: float, *, grace_s: float, say: Callable[[str], None]) -> bool:
        """Release leaving hosts whose workers have left, and kill workers that exceed the grace time; return whether
        any host was released.
        """
        is_any_released = False
        for remote_host in self:
            if remote_host.leave_by is None:
                continue
            if not self.workers_of(remote_host):
                reason = f"host {remote_host.host} was asked to leave, and the run goes on without it"
                outcome = JobOutcome(state="stopped", exit_code=PREEMPTED, reason=reason)
                self.release(remote_host, {"op": "end", "outcome": outcome.to_json()})
                is_any_released = True
            elif now >= remote_host.leave_by:
                remote_host.leave_by = now + grace_s  # until their ends are reported
                say(f"the workers on {remote_host.name} have not left within {grace_s:.0f} s: they are ended")
                remote_host.link.send({"op": "kill"})
        return is_any_released

    def assign_neighbors(self, address: str | None, own: SnapshotReplication) -> None:
        """Tell each host its neighbor, the next host by index, which receives copies of its snapshots.

        `address` is that of the coordinator's host; None where the coordinator has no workers of its own: it has taken
        over.
        """
        at = {remote_host.index: (remote_host.address, remote_host.port) for remote_host in self if remote_host.port}
        if address is not None:
            at[COORDINATOR_INDEX] = (address, own.port)
        ring = sorted(at)
        for index, to in zip(ring, [*ring[1:], *ring[:1]], strict=True):
            goes_to = at[to] if to != index else None
            name = self._name if to == COORDINATOR_INDEX else self._remote_hosts[to].host
            if index == COORDINATOR_INDEX:
                own.replicate_to(goes_to, name)
            else:
                self._remote_hosts[index].link.send({"op": "neighbour", "at": goes_to, "name": name})

    def broadcast(self, message: Mapping[str, Any]) -> None:
        for remote_host in self:
            remote_host.link.send(message)

    def farewell(self, message: Mapping[str, Any]) -> None:
        """Send a last message to all hosts, and wait until it is on its way."""
        self.broadcast(message)
        for remote_host in self:
            remote_host.link.flush(FAREWELL_S)

    def close(self) -> None:
        for link in [*self._released, *(remote_host.link for remote_host in self)]:
            link.close()

    def tick(self, now: float, *, silence_s: float) -> None:
        """Lose hosts that have been silent for longer than `silence_s`."""
        self._quiet = {
            remote_host.index for remote_host in self if now - remote_host.link.last_received > silence_s / 2
        }
        for remote_host in self:
            # It prepares its directory before it sends anything.
            limit_s = silence_s if remote_host.has_spoken else max(silence_s, SILENCE_S)
            if now - remote_host.link.last_received > limit_s:
                self.lose(
                    remote_host, f"it sent nothing for {limit_s:.0f} s", silent_s=now - remote_host.link.last_received
                )
        self._quiet.intersection_update(self._remote_hosts)

    def on_message(self, remote_host: RemoteHost, message: Mapping[str, Any]) -> None:
        """Handle a message of a host; an invalid one makes the host lost."""
        if remote_host.index not in self._remote_hosts:
            return
        remote_host.has_spoken = True
        try:
            self._serve(remote_host, message)
        except (KeyError, TypeError, ValueError) as error:
            self.lose(remote_host, f"it sent an invalid message ({type(error).__name__}: {error})")

    def lose(self, remote_host: RemoteHost, reason: str, *, kind: str = "HostLost", silent_s: float = 0.0) -> None:
        """Remove a host that is lost, and report its workers as lost."""
        if self._remote_hosts.pop(remote_host.index, None) is None:
            return
        remote_host.link.close()
        workers = sorted(self._slots.workers_on(remote_host.index))
        self._slots.close(remote_host.index)
        message = f"{remote_host.name} was lost: {reason}" if kind == "HostLost" else reason
        exits = [
            lost_worker(
                worker,
                host=remote_host.host,
                pid=remote_host.pids.get(worker, 0),
                kind=kind,
                message=message,
                echo=number > 0,
            )
            for number, worker in enumerate(workers)
        ]
        self._host.remote_host_lost(remote_host, exits, message, silent_s=silent_s)

    def _remote_host_of(self, worker: int) -> RemoteHost | None:
        return self._remote_hosts.get(self._slots.host_of(worker) or COORDINATOR_INDEX)

    def _is_on(self, remote_host: RemoteHost, worker: int) -> bool:
        """Return whether a worker that this host reports on runs there now; ValueError if it never did.

        A late message about a worker may arrive after its end, or after its successor started on another host.
        """
        if worker not in remote_host.workers and worker not in remote_host.ended:
            raise ValueError(f"worker {worker} is not on host {remote_host.host}")
        return self._slots.host_of(worker) == remote_host.index

    def _serve(self, remote_host: RemoteHost, message: Mapping[str, Any]) -> None:
        match message["op"]:
            case "ping":
                remote_host.link.send({"op": "ping", "asked": float(message["asked"]), "for_s": self._lease_s})
            case "said":
                request = message["request"]
                if not isinstance(request, dict):
                    raise TypeError(f"request is {request!r}")
                if self._is_on(remote_host, int(message["worker"])):
                    self._host.request(int(message["worker"]), request)
            case "started":
                remote_host.pids[int(message["worker"])] = int(message["pid"])
            case "exited":
                ended = WorkerExit.from_json(message["exit"])
                # A late message about the predecessor.
                is_former = ended.pid != 0 and ended.pid == remote_host.former.get(ended.worker)
                if self._is_on(remote_host, ended.worker) and not is_former:
                    self._host.exited(ended)
            case "gone":
                self._host.remote_host_ended_workers(remote_host, RemainingHost.from_json(message["left"]))
            case "sees":
                remote_host.sees_register = bool(message["register"])
            case "barren":
                self._slots.shut(remote_host.index)
            case "doing":
                own = [one for one in message["workers"] if self._is_on(remote_host, int(one["doing"]["worker"]))]
                self.on_activity(own, time.monotonic())
            case "leaving" if message["signal"] is not None:
                self._host.remote_host_leaves(remote_host, int(message["signal"]), at_once=bool(message.get("at_once")))
            case "leaving":
                is_accident = bool(message.get("is_accident"))
                self.lose(remote_host, str(message["reason"]), kind="HostLost" if is_accident else "LaunchError")
            case op:
                raise ValueError(f"unknown message {op!r}")


def _unheard(activities: Sequence[Mapping[str, Any]], now: float) -> None:
    """Drop the report: there is no hang monitor."""
