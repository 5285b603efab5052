"""The other hosts of a job, as the head sees them, and which worker is where: whoever wants a worker asks here.

    member -> head    said (a worker's request or notice), started, exited (with what is in error.json), leaving, ping
                      (`asked` at this time of its own clock), barren (it can start no more workers), gone (all its
                      workers, and what it has in memory)
    head -> member    tell (a worker), stop (in how many seconds SIGKILL follows), kill, ping (the answer: for
                      `for_s` seconds after it was `asked` workers may go on), start and kill_worker (elastic runs),
                      again (kill all: they begin again), neighbour (where copies of what is in memory go), drop (what
                      a worker has kept that left), end (the outcome: of the run, or of this host alone)
    for whoever looks out for hangs: member -> head  doing (its workers)      head -> member  stack (ask a worker)

A guest that closes its connection, is silent for long, or says what makes no sense is lost, and its workers with it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from paceline.launch.fork.local_workers import LocalWorkers
from paceline.launch.io.event_loop import MessageStream
from paceline.launch.job.outcome import WorkerExit, lost
from paceline.launch.job.placement import HostSlots
from paceline.launch.job.restart_plan import RemainingHost
from paceline.launch.snapshots.snapshot_replication import SnapshotReplication

__all__ = ["COORDINATOR_INDEX", "FAREWELL_S", "PING_S", "SILENCE_S", "RemoteHost", "RemoteHosts", "RemoteHostsListener"]

PING_S = 1.0
SILENCE_S = 15.0  # a host that has said nothing for so long is lost
FAREWELL_S = 2.0  # to hand the outcome to the members
COORDINATOR_INDEX = 0  # the head's own index


@dataclasses.dataclass(kw_only=True)
class RemoteHost:
    """Another host, as the head sees it."""

    link: MessageStream
    host: str  # its name
    address: str  # as its peers see it
    index: int
    slots: int  # workers that it has room for
    port: int = 0  # at which it takes in copies of what other hosts have in memory; 0: it does not
    workers: set[int] = dataclasses.field(default_factory=set[int])  # ranks that are, or were, on it
    pids: dict[int, int] = dataclasses.field(default_factory=dict)
    former: dict[int, int] = dataclasses.field(default_factory=dict)  # predecessors' pids, of workers started anew
    has_spoken: bool = False  # since it was welcomed
    leave_by: float | None = None  # it was asked to leave, and its workers have left by then

    @property
    def name(self) -> str:
        """Name and address."""
        return f"host {self.host} ({self.address})"


class RemoteHostsListener(Protocol):
    """The head: what guests and their workers say ends up with it."""

    def request(self, worker: int, request: Mapping[str, Any]) -> None: ...

    def exited(self, ended: WorkerExit) -> None: ...

    def remote_host_gone(self, remote_host: RemoteHost, left: RemainingHost) -> None:
        """It has ended its workers, so that all can begin again."""
        ...

    def remote_host_leaves(self, remote_host: RemoteHost, signum: int, *, at_once: bool) -> None:
        """Somebody stopped its supervisor; `at_once`: for the second time, and it kills its workers."""
        ...

    def remote_host_lost(
        self, remote_host: RemoteHost, exits: Sequence[WorkerExit], message: str, *, silent_s: float
    ) -> None:
        """It is there no longer; `exits` are its workers. Nothing had been heard of it for so long."""
        ...


class RemoteHosts:
    """Finds each worker's host, its own crew's or a guest's, and says there what is to be said."""

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
        """`own` are the ranks of the head itself, which has so many `slots`, and whose `name` is that of its host.
        `lease_s`: so long others' workers go on after their host has said a word that was answered."""
        self.here = set(own)  # ranks that have their files on the head
        self.on_activity: Callable[[Sequence[Mapping[str, Any]], float], None] = _unheard  # of other hosts' workers
        self._host, self._name, self._lease_s = host, name, lease_s
        self._local_workers: LocalWorkers | None = None
        self._remote_hosts: dict[int, RemoteHost] = {}
        self._slots = HostSlots()
        self._slots.open(COORDINATOR_INDEX, slots, own)
        self._num_hosts = 1  # that were ever there
        self._quiet: set[int] = set()  # guests that have been silent for half as long as a lost one, or longer
        self._released: list[MessageStream] = []  # of guests that have left; they close them
        for remote_host in remote_hosts:
            self.add(remote_host)

    def __iter__(self) -> Iterator[RemoteHost]:
        return iter(tuple(self._remote_hosts.values()))

    def lead(self, local_workers: LocalWorkers) -> None:
        """Take over the head's own workers."""
        self._local_workers = local_workers

    @property
    def next_index(self) -> int:
        """The index of the next host that comes; none is given twice."""
        return self._num_hosts

    def add(self, remote_host: RemoteHost) -> None:
        """One more host is there."""
        self._num_hosts = max(self._num_hosts, remote_host.index + 1)
        self._remote_hosts[remote_host.index] = remote_host
        self._slots.open(remote_host.index, remote_host.slots, remote_host.workers)

    # Workers, wherever they are.

    def host_of(self, worker: int) -> str:
        """The name of a worker's host."""
        remote_host = self._remote_host_of(worker)
        return self._name if remote_host is None else remote_host.host

    def workers_of(self, remote_host: RemoteHost) -> frozenset[int]:
        """The workers that are on a guest now."""
        return self._slots.workers_on(remote_host.index)

    def hosts_of(self, workers: Collection[int]) -> frozenset[int]:
        """The indices of the hosts on which these workers are."""
        return frozenset(self._slots.host_of(worker) or COORDINATOR_INDEX for worker in workers)

    def has_place(self, worker: int) -> bool:
        """Whether a worker is somewhere, or its successor knows where to go."""
        return self._slots.host_of(worker) is not None

    def cannot_fork(self) -> None:
        """The head itself can start no more workers."""
        self._slots.shut(COORDINATOR_INDEX)

    def room(self, workers_each: int, *, without: Collection[int] = ()) -> int:
        """For how many more replicas of so many workers there are free slots, when those `without` are gone."""
        return self._slots.room(workers_each, without=without)

    def tell(self, worker: int, message: Mapping[str, Any]) -> None:
        """Say something to a worker."""
        remote_host = self._remote_host_of(worker)
        if remote_host is not None:
            remote_host.link.send({"op": "tell", "worker": worker, "message": message})
        elif self._local_workers is not None:
            self._local_workers.tell(worker, message)

    def start(self, replica: Sequence[int], *, workers: int, incarnation: int) -> None:
        """Have the workers of a replica started, where there is most room; the run has so many `workers` then."""
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

    def ask_stack(self, worker: int) -> None:
        """Have a worker write its stacks."""
        remote_host = self._remote_host_of(worker)
        if remote_host is not None:
            remote_host.link.send({"op": "stack", "worker": worker})
        elif self._local_workers is not None:
            self._local_workers.ask_stack(worker)

    @property
    def unheard(self) -> frozenset[int]:
        """Workers on quiet hosts: of these nothing can be heard, and they are lost with their host, if it is."""
        return frozenset[int]().union(*map(self._slots.workers_on, self._quiet))

    def forget(self, worker: int, *, for_good: bool) -> None:
        """A worker is there no longer. Where it was lost, and not `for_good`, its successor goes where it was."""
        if for_good:
            if self._local_workers is not None:
                self._local_workers.drop_state(worker)
            self.tell_all({"op": "drop", "worker": worker})
            self._slots.leave(worker)
        else:
            self._slots.lose(worker)

    # Guests.

    def shut(self, remote_host: RemoteHost) -> None:
        """No more workers are started on a guest; those that are there stay."""
        self._slots.shut(remote_host.index)

    def release(self, remote_host: RemoteHost, message: Mapping[str, Any]) -> None:
        """Let a guest go that has no workers any more, with a last word."""
        del self._remote_hosts[remote_host.index]
        self._slots.close(remote_host.index)
        self._released.append(remote_host.link)  # closed here, it could lose the message
        remote_host.link.send(message)

    def assign_neighbors(self, address: str, own: SnapshotReplication) -> None:
        """Say to each host where copies of what it has in memory go: to the next one. The head has this address."""
        at = {
            remote_host.index: (remote_host.address, remote_host.port) for remote_host in self if remote_host.port
        } | {COORDINATOR_INDEX: (address, own.port)}
        ring = sorted(at)
        for index, to in zip(ring, [*ring[1:], ring[0]], strict=True):
            goes_to = at[to] if to != index else None
            name = self._name if to == COORDINATOR_INDEX else self._remote_hosts[to].host
            if index == COORDINATOR_INDEX:
                own.replicate_to(goes_to, name)
            else:
                self._remote_hosts[index].link.send({"op": "neighbour", "at": goes_to, "name": name})

    def tell_all(self, message: Mapping[str, Any]) -> None:
        for remote_host in self:
            remote_host.link.send(message)

    def farewell(self, message: Mapping[str, Any]) -> None:
        """Say the last word, and see that it is on its way."""
        self.tell_all(message)
        for remote_host in self:
            remote_host.link.flush(FAREWELL_S)

    def close(self) -> None:
        for link in [*self._released, *(remote_host.link for remote_host in self)]:
            link.close()

    def tick(self, now: float, *, silence_s: float) -> None:
        """Lose who has been silent for longer than `silence_s`."""
        self._quiet = {remote_host.index for remote_host in self if now - remote_host.link.heard > silence_s / 2}
        for remote_host in self:
            limit_s = (
                silence_s if remote_host.has_spoken else max(silence_s, SILENCE_S)
            )  # it prepares its directory first
            if now - remote_host.link.heard > limit_s:
                self.lose(remote_host, f"it said nothing for {limit_s:.0f} s", silent_s=now - remote_host.link.heard)
        self._quiet.intersection_update(self._remote_hosts)

    def said(self, remote_host: RemoteHost, message: Mapping[str, Any]) -> None:
        """Serve one message of a member; what makes no sense ends the membership."""
        if remote_host.index not in self._remote_hosts:
            return
        remote_host.has_spoken = True
        try:
            self._serve(remote_host, message)
        except (KeyError, TypeError, ValueError) as error:
            self.lose(remote_host, f"it said something that makes no sense ({type(error).__name__}: {error})")

    def lose(self, remote_host: RemoteHost, reason: str, *, kind: str = "HostLost", silent_s: float = 0.0) -> None:
        """A member is there no longer, and neither are its workers."""
        if self._remote_hosts.pop(remote_host.index, None) is None:
            return
        remote_host.link.close()
        workers = sorted(self._slots.workers_on(remote_host.index))
        self._slots.close(remote_host.index)
        message = f"{remote_host.name} was lost: {reason}" if kind == "HostLost" else reason
        exits = [
            lost(
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
        """Whether a worker that a guest speaks of is there now; ValueError where it never was.

        The last words of one that has left may come when the next one with its number is on another host.
        """
        if worker not in remote_host.workers:
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
                is_former = ended.pid != 0 and ended.pid == remote_host.former.get(
                    ended.worker
                )  # was on its way meanwhile
                if self._is_on(remote_host, ended.worker) and not is_former:
                    self._host.exited(ended)
            case "gone":
                self._host.remote_host_gone(remote_host, RemainingHost.from_json(message["left"]))
            case "barren":
                self._slots.shut(remote_host.index)
            case "doing":
                own = [told for told in message["workers"] if self._is_on(remote_host, int(told["doing"]["worker"]))]
                self.on_activity(own, time.monotonic())
            case "leaving" if message["signal"] is not None:
                self._host.remote_host_leaves(remote_host, int(message["signal"]), at_once=bool(message.get("at_once")))
            case "leaving":
                self.lose(remote_host, str(message["reason"]), kind="LaunchError")
            case op:
                raise ValueError(f"unknown message {op!r}")


def _unheard(activities: Sequence[Mapping[str, Any]], now: float) -> None:
    """Where nobody looks out for hangs."""
