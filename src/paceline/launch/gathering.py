"""The head's half of the meeting: waits at the meeting point until all hosts are there, then gives each its place.

    member -> head    hello: its name, its address, what it was started for
    head -> member    welcome: its place; or refused: why, and whether to try again later; ping meanwhile

The door stays open while the job runs: hosts that come later, or come back, are taken in where the head wants them, and
everybody else gets an answer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from paceline.launch.again import Again
from paceline.launch.carrying import At, Carrying
from paceline.launch.door import Door
from paceline.launch.guests import FAREWELL_S, HEAD, PING_S, SILENCE_S, Guest
from paceline.launch.head import Head
from paceline.launch.link import Link
from paceline.launch.loop import Loop
from paceline.launch.place import deal, share_of
from paceline.launch.terms import Terms, mismatch

__all__ = ["Gathering"]


class Gathering:
    """Turns connections that have proved the token into guests."""

    def __init__(
        self,
        listener: socket.socket,
        terms: Terms,
        loop: Loop,
        say: Callable[[str], None],
        *,
        carrying: Carrying | None = None,
        again: Again | None = None,
    ) -> None:
        """`again`: those who were lost begin again, on hosts that come back."""
        self._terms, self._loop, self._say, self._again = terms, loop, say, again
        self._carrying = carrying
        self._guests: list[Guest] = []  # that the job begins with
        self._unnamed: set[Link] = set()  # have proved the token and not said hello yet
        self._turned_away: set[str] = set()  # what was said of them is said once
        self._head: Head | None = None
        self._next_ping = 0.0
        self._address = str(listener.getsockname()[0])
        if carrying is not None:
            carrying.open(self._address)
        self._door = Door(listener, terms.token, loop, on_proved=self._came, say=say)
        name = terms.at[0]
        if self._address.startswith("127.") and name not in ("localhost", self._address):
            say(
                f"{name} means {self._address} on this host, which no other machine reaches: if nobody comes, "
                "use an address of this host's network as head"
            )

    @property
    def complete(self) -> bool:
        return len(self._guests) == self._num_guests

    @property
    def _num_guests(self) -> int:
        return (self._terms.job.hosts if self._again is None else len(self._again.ranks)) - 1

    @property
    def doing(self) -> str:
        """What is waited for."""
        more = self._num_guests - len(self._guests)
        here = ", ".join([self._terms.host, *(guest.host for guest in self._guests)])
        return f"waiting at {self._terms.point} for {more} more host{'' if more == 1 else 's'}; here: {here}"

    def tick(self, now: float) -> None:
        self._door.tick(now)
        for link in [link for link in self._unnamed if now - link.heard > SILENCE_S]:
            self._unnamed.discard(link)
            link.close()
        if self._head is None and now >= self._next_ping:
            self._next_ping = now + PING_S
            for guest in self._guests:
                guest.link.send({"op": "ping"})

    def welcome(self) -> Head:
        """Deal the ranks, tell every guest its place, and go over into the job."""
        terms = self._terms
        if self._again is None:
            ranks = deal(terms.job.workers or 0, terms.job.hosts)
            for index, guest in enumerate(self._guests, start=1):
                guest.index, guest.slots, guest.workers = index, len(ranks[index]), set(ranks[index])
        for guest in self._guests:
            self._welcome(guest)
        self._head = Head(
            host=terms.host,
            address=self._address,
            job=terms.job,
            guests=self._guests,
            door=self,
            attempt=terms.attempt,
            run_dir=terms.run_dir,
            say=self._say,
            doors=self.doors,
            again=self._again,
        )
        return self._head

    def _welcome(self, guest: Guest) -> None:
        place = {"host_index": guest.index, "ranks": sorted(guest.workers), "slots": guest.slots}
        run = {"attempt": self._terms.attempt, "run_dir": self._terms.run_dir}
        doors = [[index, *at] for index, at in self.doors.items()]
        head = f"{self._terms.host} ({self._address})"
        guest.link.send({"op": "welcome", "head": head, **place, **run, "doors": doors})

    @property
    def doors(self) -> dict[int, At]:
        """Where each host gives what others' workers begin with."""
        found = {guest.index: (guest.address, guest.port) for guest in self._guests if guest.port}
        return found | ({} if self._carrying is None else {HEAD: (self._address, self._carrying.port)})

    def give_up(self, reason: str) -> None:
        """Send those who came home."""
        for guest in self._guests:
            guest.link.send({"op": "refused", "reason": f"the head gave up: {reason}", "again": False})
            guest.link.flush(FAREWELL_S)
            guest.link.close()
        self.close()

    def close(self, *, stays_open: bool = False) -> socket.socket | None:
        """Close the door; guests stay. `stays_open`: hosts come again soon, and wait at the socket that is returned."""
        while self._unnamed:
            self._unnamed.pop().close()
        return self._door.close(stays_open=stays_open)

    def _came(self, sock: socket.socket) -> None:
        """A connection has proved the token."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = str(sock.getpeername()[0])
        guest: Guest | None = None

        def said(message: Mapping[str, Any]) -> None:
            nonlocal guest
            if guest is None:
                self._unnamed.discard(link)
                guest = self._hello(link, address, message)
            elif self._head is not None:
                self._head.guests.said(guest, message)

        def closed(error: Exception) -> None:
            self._unnamed.discard(link)
            if guest is not None and self._head is not None:
                self._head.guests.lose(guest, str(error))
            elif guest is not None:
                self._guests.remove(guest)
                self._say(f"{guest.name} has left again: {error}")

        link = Link(sock, self._loop, on_message=said, on_close=closed)
        self._unnamed.add(link)

    def _hello(self, link: Link, address: str, message: Mapping[str, Any]) -> Guest | None:
        """Make a guest of who was started for this job; tell the others why they are none."""
        job, who = message.get("job"), f"host {message.get('host')} ({address})"
        different = mismatch(self._terms.essentials, job if isinstance(job, dict) else {})
        if different:
            self._turn_away(link, who, f"it was started for another job ({different})", again=False)
            return None
        refusal = self._head.refusal() if self._head is not None else ("it is about to begin", True)
        if self.complete and refusal is not None:
            reason, again = refusal
            self._turn_away(link, who, f"the run has all its hosts, and {reason}", again=again)
            return None
        guest = Guest(
            link=link,
            host=str(message.get("host")),
            address=str(message.get("address")),
            index=len(self._guests) + 1 if self._head is None else self._head.guests.next_index,
            slots=share_of(self._terms.asked),
            port=int(message.get("port") or 0),
        )
        if self._head is None and self._again is not None:
            if not self._comes_back(guest, message.get("host_index"), self._again):
                self._turn_away(link, who, "all are about to begin again after a loss", again=True)
                return None
            self._guests.append(guest)
        elif self._head is None:
            self._guests.append(guest)
            self._say(f"{guest.name} has come: {len(self._guests) + 1} of {self._terms.job.hosts}")
        else:
            self._welcome(guest)
            self._head.join(guest)
        return guest

    def _comes_back(self, guest: Guest, host_index: Any, again: Again) -> bool:
        """Give a host the place that it had; False where it had none."""
        taken = {HEAD, *(other.index for other in self._guests)}
        if not isinstance(host_index, int) or host_index not in again.ranks or host_index in taken:
            return False
        guest.index, guest.slots = host_index, again.slots[host_index]
        guest.workers = set(again.ranks[host_index])
        return True

    def _turn_away(self, link: Link, who: str, reason: str, *, again: bool) -> None:
        link.send({"op": "refused", "reason": reason, "again": again})
        link.close()
        if f"{who}{reason}" not in self._turned_away:
            self._turned_away.add(f"{who}{reason}")
            self._say(f"refused {who}: {reason}")
