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

from paceline.launch.carrying import Carrying
from paceline.launch.crew import Crew
from paceline.launch.link import Link
from paceline.launch.outcome import WorkerExit, lost
from paceline.launch.slots import Slots
from paceline.launch.stock import HostLeft

__all__ = ["FAREWELL_S", "HEAD", "PING_S", "SILENCE_S", "Guest", "Guests", "Host"]

PING_S = 1.0
SILENCE_S = 15.0  # a host that has said nothing for so long is lost
FAREWELL_S = 2.0  # to hand the outcome to the members
HEAD = 0  # the head's own index


@dataclasses.dataclass(kw_only=True)
class Guest:
    """Another host, as the head sees it."""

    link: Link
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


class Host(Protocol):
    """The head: what guests and their workers say ends up with it."""

    def request(self, worker: int, request: Mapping[str, Any]) -> None: ...

    def exited(self, ended: WorkerExit) -> None: ...

    def guest_gone(self, guest: Guest, left: HostLeft) -> None:
        """It has ended its workers, so that all can begin again."""
        ...

    def guest_leaves(self, guest: Guest, signum: int, *, at_once: bool) -> None:
        """Somebody stopped its supervisor; `at_once`: for the second time, and it kills its workers."""
        ...

    def guest_lost(self, guest: Guest, exits: Sequence[WorkerExit], message: str, *, silent_s: float) -> None:
        """It is there no longer; `exits` are its workers. Nothing had been heard of it for so long."""
        ...


class Guests:
    """Finds each worker's host, its own crew's or a guest's, and says there what is to be said."""

    def __init__(
        self,
        guests: Sequence[Guest],
        *,
        own: Collection[int],
        slots: int,
        host: Host,
        name: str,
        lease_s: float,
    ) -> None:
        """`own` are the ranks of the head itself, which has so many `slots`, and whose `name` is that of its host.
        `lease_s`: so long others' workers go on after their host has said a word that was answered."""
        self.here = set(own)  # ranks that have their files on the head
        self.heard_doing: Callable[[Sequence[Mapping[str, Any]], float], None] = _unheard  # of other hosts' workers
        self._host, self._name, self._lease_s = host, name, lease_s
        self._crew: Crew | None = None
        self._guests: dict[int, Guest] = {}
        self._slots = Slots()
        self._slots.open(HEAD, slots, own)
        self._num_hosts = 1  # that were ever there
        self._quiet: set[int] = set()  # guests that have been silent for half as long as a lost one, or longer
        self._released: list[Link] = []  # of guests that have left; they close them
        for guest in guests:
            self.add(guest)

    def __iter__(self) -> Iterator[Guest]:
        return iter(tuple(self._guests.values()))

    def lead(self, crew: Crew) -> None:
        """Take over the head's own workers."""
        self._crew = crew

    @property
    def next_index(self) -> int:
        """The index of the next host that comes; none is given twice."""
        return self._num_hosts

    def add(self, guest: Guest) -> None:
        """One more host is there."""
        self._num_hosts = max(self._num_hosts, guest.index + 1)
        self._guests[guest.index] = guest
        self._slots.open(guest.index, guest.slots, guest.workers)

    # Workers, wherever they are.

    def host_of(self, worker: int) -> str:
        """The name of a worker's host."""
        guest = self._guest_of(worker)
        return self._name if guest is None else guest.host

    def workers_of(self, guest: Guest) -> frozenset[int]:
        """The workers that are on a guest now."""
        return self._slots.workers_on(guest.index)

    def hosts_of(self, workers: Collection[int]) -> frozenset[int]:
        """The indices of the hosts on which these workers are."""
        return frozenset(self._slots.host_of(worker) or HEAD for worker in workers)

    def has_place(self, worker: int) -> bool:
        """Whether a worker is somewhere, or its successor knows where to go."""
        return self._slots.host_of(worker) is not None

    def barren(self) -> None:
        """The head itself can start no more workers."""
        self._slots.shut(HEAD)

    def room(self, workers_each: int, *, without: Collection[int] = ()) -> int:
        """For how many more replicas of so many workers there are free slots, when those `without` are gone."""
        return self._slots.room(workers_each, without=without)

    def tell(self, worker: int, message: Mapping[str, Any]) -> None:
        """Say something to a worker."""
        guest = self._guest_of(worker)
        if guest is not None:
            guest.link.send({"op": "tell", "worker": worker, "message": message})
        elif self._crew is not None:
            self._crew.tell(worker, message)

    def start(self, replica: Sequence[int], *, workers: int, incarnation: int) -> None:
        """Have the workers of a replica started, where there is most room; the run has so many `workers` then."""
        numbers = {"workers": workers, "incarnation": incarnation}
        self._slots.place(replica, quiet=self._quiet)
        for worker in replica:
            guest = self._guest_of(worker)
            if guest is not None:
                self.here.discard(worker)
                guest.workers.add(worker)
                guest.former[worker] = guest.pids.pop(worker, 0)
                guest.link.send({"op": "start", "worker": worker, **numbers})
            elif self._crew is not None:
                self.here.add(worker)
                self._crew.add(worker, **numbers)

    def kill(self, worker: int) -> None:
        """Send SIGKILL to one worker."""
        guest = self._guest_of(worker)
        if guest is not None:
            guest.link.send({"op": "kill_worker", "worker": worker})
        elif self._crew is not None:
            self._crew.kill_worker(worker)

    def ask_stack(self, worker: int) -> None:
        """Have a worker write its stacks."""
        guest = self._guest_of(worker)
        if guest is not None:
            guest.link.send({"op": "stack", "worker": worker})
        elif self._crew is not None:
            self._crew.ask_stack(worker)

    @property
    def unheard(self) -> frozenset[int]:
        """Workers on quiet hosts: of these nothing can be heard, and they are lost with their host, if it is."""
        return frozenset[int]().union(*map(self._slots.workers_on, self._quiet))

    def forget(self, worker: int, *, for_good: bool) -> None:
        """A worker is there no longer. Where it was lost, and not `for_good`, its successor goes where it was."""
        if for_good:
            if self._crew is not None:
                self._crew.drop_state(worker)
            self.tell_all({"op": "drop", "worker": worker})
            self._slots.leave(worker)
        else:
            self._slots.lose(worker)

    # Guests.

    def shut(self, guest: Guest) -> None:
        """No more workers are started on a guest; those that are there stay."""
        self._slots.shut(guest.index)

    def release(self, guest: Guest, message: Mapping[str, Any]) -> None:
        """Let a guest go that has no workers any more, with a last word."""
        del self._guests[guest.index]
        self._slots.close(guest.index)
        self._released.append(guest.link)  # closed here, it could lose the message
        guest.link.send(message)

    def link_up(self, address: str, own: Carrying) -> None:
        """Say to each host where copies of what it has in memory go: to the next one. The head has this address."""
        at = {guest.index: (guest.address, guest.port) for guest in self if guest.port} | {HEAD: (address, own.port)}
        ring = sorted(at)
        for index, to in zip(ring, [*ring[1:], ring[0]], strict=True):
            goes_to = at[to] if to != index else None
            name = self._name if to == HEAD else self._guests[to].host
            if index == HEAD:
                own.go_to(goes_to, name)
            else:
                self._guests[index].link.send({"op": "neighbour", "at": goes_to, "name": name})

    def tell_all(self, message: Mapping[str, Any]) -> None:
        for guest in self:
            guest.link.send(message)

    def farewell(self, message: Mapping[str, Any]) -> None:
        """Say the last word, and see that it is on its way."""
        self.tell_all(message)
        for guest in self:
            guest.link.flush(FAREWELL_S)

    def close(self) -> None:
        for link in [*self._released, *(guest.link for guest in self)]:
            link.close()

    def tick(self, now: float, *, silence_s: float) -> None:
        """Lose who has been silent for longer than `silence_s`."""
        self._quiet = {guest.index for guest in self if now - guest.link.heard > silence_s / 2}
        for guest in self:
            limit_s = silence_s if guest.has_spoken else max(silence_s, SILENCE_S)  # it prepares its directory first
            if now - guest.link.heard > limit_s:
                self.lose(guest, f"it said nothing for {limit_s:.0f} s", silent_s=now - guest.link.heard)
        self._quiet.intersection_update(self._guests)

    def said(self, guest: Guest, message: Mapping[str, Any]) -> None:
        """Serve one message of a member; what makes no sense ends the membership."""
        if guest.index not in self._guests:
            return
        guest.has_spoken = True
        try:
            self._serve(guest, message)
        except (KeyError, TypeError, ValueError) as error:
            self.lose(guest, f"it said something that makes no sense ({type(error).__name__}: {error})")

    def lose(self, guest: Guest, reason: str, *, kind: str = "HostLost", silent_s: float = 0.0) -> None:
        """A member is there no longer, and neither are its workers."""
        if self._guests.pop(guest.index, None) is None:
            return
        guest.link.close()
        workers = sorted(self._slots.workers_on(guest.index))
        self._slots.close(guest.index)
        message = f"{guest.name} was lost: {reason}" if kind == "HostLost" else reason
        exits = [
            lost(worker, host=guest.host, pid=guest.pids.get(worker, 0), kind=kind, message=message, echo=number > 0)
            for number, worker in enumerate(workers)
        ]
        self._host.guest_lost(guest, exits, message, silent_s=silent_s)

    def _guest_of(self, worker: int) -> Guest | None:
        return self._guests.get(self._slots.host_of(worker) or HEAD)

    def _is_on(self, guest: Guest, worker: int) -> bool:
        """Whether a worker that a guest speaks of is there now; ValueError where it never was.

        The last words of one that has left may come when the next one with its number is on another host.
        """
        if worker not in guest.workers:
            raise ValueError(f"worker {worker} is not on host {guest.host}")
        return self._slots.host_of(worker) == guest.index

    def _serve(self, guest: Guest, message: Mapping[str, Any]) -> None:
        match message["op"]:
            case "ping":
                guest.link.send({"op": "ping", "asked": float(message["asked"]), "for_s": self._lease_s})
            case "said":
                request = message["request"]
                if not isinstance(request, dict):
                    raise TypeError(f"request is {request!r}")
                if self._is_on(guest, int(message["worker"])):
                    self._host.request(int(message["worker"]), request)
            case "started":
                guest.pids[int(message["worker"])] = int(message["pid"])
            case "exited":
                ended = WorkerExit.from_json(message["exit"])
                is_former = ended.pid != 0 and ended.pid == guest.former.get(ended.worker)  # was on its way meanwhile
                if self._is_on(guest, ended.worker) and not is_former:
                    self._host.exited(ended)
            case "gone":
                self._host.guest_gone(guest, HostLeft.from_json(message["left"]))
            case "barren":
                self._slots.shut(guest.index)
            case "doing":
                own = [told for told in message["workers"] if self._is_on(guest, int(told["doing"]["worker"]))]
                self.heard_doing(own, time.monotonic())
            case "leaving" if message["signal"] is not None:
                self._host.guest_leaves(guest, int(message["signal"]), at_once=bool(message.get("at_once")))
            case "leaving":
                self.lose(guest, str(message["reason"]), kind="LaunchError")
            case op:
                raise ValueError(f"unknown message {op!r}")


def _unheard(doings: Sequence[Mapping[str, Any]], now: float) -> None:
    """Where nobody looks out for hangs."""
