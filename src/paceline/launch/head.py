"""The side of the first host, which holds the board and decides for the whole job; the only one on a single host.

    member -> head    board (a worker's request), started, exited (with what is in error.json), leaving, ping
    head -> member    reply, stop (in how many seconds SIGKILL follows), kill, end (the outcome), ping

It decides little: the job has finished when all workers ended well; when one failed, the others get a moment to say
what they know, and are ended. A host that closes its connection, or is silent for long, is lost, and its workers have
failed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.comm.board import Board
from paceline.launch.crew import Crew
from paceline.launch.link import Link
from paceline.launch.outcome import Outcome, WorkerExit, interrupted, lost, verdict

__all__ = ["GATHER_S", "PING_S", "SILENCE_S", "STOP_S", "TERMINATE_S", "Guest", "Head"]

GATHER_S = 1.0  # after the first failure: the others may say what they know of it
TERMINATE_S = 3.0  # after a failure, from SIGTERM to SIGKILL
STOP_S = 5.0  # after a signal to the supervisor, from SIGTERM to SIGKILL
PING_S = 1.0
SILENCE_S = 15.0  # a host that has said nothing for so long is lost
REPORT_S = 4.0  # a member has this long, on top, to report its workers' ends
FAREWELL_S = 2.0  # to hand the outcome to the members


@dataclasses.dataclass(kw_only=True)
class Guest:
    """Another host, as the head sees it."""

    link: Link
    host: str  # its name
    address: str  # as its peers see it
    workers: range = range(0)  # its ranks
    pids: dict[int, int] = dataclasses.field(default_factory=dict)
    gone: bool = False


class Entrance(Protocol):
    """Where members came in, and strangers are still turned away."""

    def tick(self, now: float) -> None: ...

    def close(self) -> None: ...


class Head:
    """Serves the board, hears how all workers end, and decides."""

    def __init__(
        self,
        *,
        host: str,
        address: str,
        workers: int,
        guests: list[Guest],
        door: Entrance | None,
        attempt: int,
        run_dir: str,
        say: Callable[[str], None],
    ) -> None:
        self.host, self.address, self.host_index = host, address, 0
        self.attempt, self.run_dir = attempt, run_dir
        self.outcome: Outcome | None = None
        self._crew: Crew | None = None
        self._num_workers, self._guests, self._door, self._say = workers, guests, door, say
        self._board = Board()
        self._exits: dict[int, WorkerExit] = {}
        self._num_signals = 0  # to this supervisor
        self._signum: int | None = None  # somebody stopped the job
        self._by = ""  # where, when it was not here
        self._end_at: float | None = None  # workers get SIGTERM
        self._ending = False
        self._lost_at: float | None = None  # members must have reported by then
        self._next_ping = 0.0

    def lead(self, crew: Crew) -> None:
        """Take over the workers of this host."""
        self._crew = crew

    # What the crew tells (its Listener).

    def request(self, worker: int, request: Mapping[str, Any]) -> None:
        if self._crew is not None:
            self._crew.reply(worker, self._board.handle(request))

    def started(self, worker: int, pid: int) -> None:
        """Nothing to do: the crew knows its own."""

    def exited(self, ended: WorkerExit) -> None:
        if self.outcome is not None or ended.worker in self._exits:
            return
        self._exits[ended.worker] = ended
        if ended.failed and not self._ending and self._end_at is None:
            self._end_at = time.monotonic() + GATHER_S

    # What the supervisor tells.

    def interrupted(self, signum: int) -> None:
        """A signal to the supervisor: end the workers; a second one: kill them."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._stop(signum)
            return
        self._tell_all({"op": "kill"})
        if self._crew is not None:
            self._crew.kill()

    def abandon(self, reason: str, *, signum: int | None = None) -> None:
        """This host cannot go on, or was stopped before it had workers: tell the others."""
        if signum is not None:
            self._finish(interrupted(signum, (), by=f" on host {self.host}"))
            return
        failure = lost(0, host=self.host, pid=0, kind="LaunchError", message=f"host {self.host}: {reason}")
        self._finish(Outcome(state="failed", exit_code=1, failures=(failure,), reason=f"host {self.host}: {reason}"))

    def tick(self, now: float) -> None:
        """Decide what is due; signals that came as well have been told before."""
        if len(self._exits) == self._num_workers:
            exits = [self._exits[worker] for worker in sorted(self._exits)]
            self._finish(verdict(exits) if self._signum is None else interrupted(self._signum, exits, by=self._by))
            return
        if self._door is not None:
            self._door.tick(now)
        if now >= self._next_ping:
            self._next_ping = now + PING_S
            self._tell_all({"op": "ping"})
        for guest in self._guests:
            if now - guest.link.heard > SILENCE_S:
                self.guest_lost(guest, f"it said nothing for {SILENCE_S:.0f} s")
            elif self._lost_at is not None and now >= self._lost_at and not self._exits.keys() >= set(guest.workers):
                self.guest_lost(guest, "it was told to end its workers and did not report their ends")
        if self._end_at is not None and now >= self._end_at and not self._ending:
            self._end_all(TERMINATE_S)

    def close(self) -> None:
        for guest in self._guests:
            guest.link.close()
        if self._door is not None:
            self._door.close()

    # What other hosts say.

    def guest_said(self, guest: Guest, message: Mapping[str, Any]) -> None:
        """Serve one message of a member; what makes no sense ends the membership."""
        try:
            self._serve(guest, message)
        except (KeyError, TypeError, ValueError) as error:
            self.guest_lost(guest, f"it said something that makes no sense ({type(error).__name__}: {error})")

    def guest_lost(self, guest: Guest, reason: str, *, kind: str = "HostLost") -> None:
        """A member is there no longer: its workers have failed."""
        if guest.gone or self.outcome is not None:
            return
        guest.gone = True
        guest.link.close()
        message = f"host {guest.host} ({guest.address}) was lost: {reason}" if kind == "HostLost" else reason
        self._say(message)
        for number, worker in enumerate(sorted(set(guest.workers) - self._exits.keys())):
            pid = guest.pids.get(worker, 0)
            self.exited(lost(worker, host=guest.host, pid=pid, kind=kind, message=message, echo=number > 0))

    def _serve(self, guest: Guest, message: Mapping[str, Any]) -> None:
        match message["op"]:
            case "ping":
                pass
            case "board":
                request = message["request"]
                if not isinstance(request, dict):
                    raise TypeError(f"request is {request!r}")
                reply = self._board.handle(request)
                guest.link.send({"op": "reply", "worker": message["worker"], "reply": reply})
            case "started":
                guest.pids[int(message["worker"])] = int(message["pid"])
            case "exited":
                ended = WorkerExit.from_json(message["exit"])
                if ended.worker not in guest.workers:
                    raise ValueError(f"worker {ended.worker} is not on host {guest.host}")
                self.exited(ended)
            case "leaving" if message["signal"] is not None:
                self._stop(int(message["signal"]), by=f" on host {guest.host}")
            case "leaving":
                self.guest_lost(guest, str(message["reason"]), kind="LaunchError")
            case op:
                raise ValueError(f"unknown message {op!r}")

    def _stop(self, signum: int, *, by: str = "") -> None:
        if self._ending:
            return
        # A job that has failed already stays so; but who stops a whole cgroup, say, sends workers the same signal.
        failures = [ended for ended in self._exits.values() if ended.failed]
        if all(ended.signal == signum or ended.exit_code == 128 + signum for ended in failures):
            self._signum, self._by = signum, by
        self._end_all(STOP_S)

    def _end_all(self, grace_s: float) -> None:
        self._ending = True
        self._lost_at = time.monotonic() + grace_s + REPORT_S
        self._tell_all({"op": "stop", "grace_s": grace_s})
        if self._crew is not None:
            self._crew.terminate(grace_s)

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for guest in self._guests:
            guest.link.send(message)

    def _finish(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self._tell_all({"op": "end", "outcome": outcome.to_json()})
            for guest in self._guests:
                guest.link.flush(FAREWELL_S)
