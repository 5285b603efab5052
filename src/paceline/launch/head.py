"""The side of the first host, which holds the board and decides for the whole job; the only one on a single host.

    member -> head    said (a worker's request or notice), started, exited (with what is in error.json), leaving, ping
    head -> member    tell (a worker), stop (in how many seconds SIGKILL follows), kill, end (the outcome), ping,
                      start and kill_worker (elastic runs)
    for whoever looks out for hangs: member -> head  doing (its workers)      head -> member  stack (ask a worker)

It decides little: the job has finished when all workers ended well; when one failed, the others get a moment to say
what they know, and are ended. A host that closes its connection, or is silent for long, is lost, and its workers with
it. In an elastic run (the workers say so: the plan may be in the script) lost workers are no failure: the controller
has the others go on. SIGTERM has everybody save and leave, if they are at work on steps.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from paceline.comm.board import Board
from paceline.elastic.membership import Limits
from paceline.elastic.notices import FROM_WORKERS, PREEMPTED, TOO_FEW, Finish
from paceline.events import Event
from paceline.launch.controller import Controller
from paceline.launch.crew import Crew
from paceline.launch.link import Link
from paceline.launch.outcome import Outcome, WorkerExit, interrupted, left, lost, verdict
from paceline.plan.job import Job

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
    workers: set[int] = dataclasses.field(default_factory=set[int])  # its ranks
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
        job: Job,
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
        self._job, self._guests, self._door, self._say = job, guests, door, say
        self._expected = set(range(job.workers or 0))  # workers whose end is to be waited for
        self._controller: Controller | None = None
        self._emit: Callable[[Event], None] = _nowhere
        self.heard_doing: Callable[[Sequence[Mapping[str, Any]], float], None] = _unheard  # of other hosts' workers
        self._places: set[int] = set()  # ranks that are, or were, this host's
        self._has_begun = False  # some worker is at work on steps
        self._finish_told: Finish | None = None
        self._board = Board()
        self._exits: dict[int, WorkerExit] = {}
        self._num_signals = 0  # to this supervisor
        self._signum: int | None = None  # somebody stopped the job
        self._by = ""  # where, when it was not here
        self._leave_by: float | None = None  # workers that were asked to leave have done so by then
        self._end_at: float | None = None  # workers get SIGTERM
        self._ending = False
        self._lost_at: float | None = None  # members must have reported by then
        self._next_ping = 0.0

    def lead(self, crew: Crew, emit: Callable[[Event], None]) -> None:
        """Take over the workers of this host; `emit` takes events for the run's record."""
        self._crew, self._emit = crew, emit
        self._places = set(crew.alive)

    # What whoever looks out for hangs wants done.

    def ask_stack(self, worker: int) -> None:
        """Have a worker write its stacks."""
        guest = self._guest_of(worker)
        if guest is not None:
            guest.link.send({"op": "stack", "worker": worker})
        elif self._crew is not None:
            self._crew.ask_stack(worker)

    def stuck(self, workers: Sequence[int], error: Mapping[str, Any], *, goes_on: bool) -> bool:
        """These workers hold up the others, for longer than the job waits: end the job. Where it `goes_on` without
        them, and is elastic, only they are killed: that is a loss like any other. Returns whether the job ends."""
        if self._ending or self.outcome is not None:
            return True
        if goes_on and self._controller is not None and self._expected - self._exits.keys() - set(workers):
            for worker in workers:
                self._kill_one(worker)
            return False
        culprit = int(error["worker"])
        ended = lost(culprit, host=error["host"], pid=error["pid"], kind=error["kind"], message=error["message"])
        self._exits[culprit] = dataclasses.replace(ended, error=error)
        self._end_all(TERMINATE_S)
        return True

    # What the crew tells (its Listener).

    def request(self, worker: int, request: Mapping[str, Any]) -> None:
        if request.get("op") in FROM_WORKERS:
            self._heard(worker, request)
        elif self._crew is not None:
            self._crew.tell(worker, self._board.handle(request))

    def started(self, worker: int, pid: int) -> None:
        """Nothing to do: the crew knows its own."""

    def exited(self, ended: WorkerExit) -> None:
        if self.outcome is not None or ended.worker in self._exits or ended.worker not in self._expected:
            return
        if self._controller is not None and not self._ending and self._goes_on(self._controller, ended):
            return
        self._exits[ended.worker] = ended
        if ended.failed and not self._ending and self._end_at is None:
            self._end_at = time.monotonic() + GATHER_S

    # What the supervisor tells.

    def interrupted(self, signum: int) -> None:
        """A signal to the supervisor: end the workers (SIGTERM: ask them first, to save and leave); another one after
        that: kill them."""
        self._num_signals += 1
        if self._num_signals == 1 and signum == signal.SIGTERM and self._has_begun and not self._ending:
            self._ask_to_leave("SIGTERM came")
            return
        if self._num_signals == 1 or not self._ending:
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

    def asked(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a command of this host's user (`paceline.launch.control`)."""
        if request.get("op") != "resize" or not isinstance(request.get("replicas"), int):
            return {"error": f"this run does not understand {dict(request)}"}
        if self._controller is None:
            return {
                "error": "the run has a fixed number of replicas (or has not begun): only "
                "Layout(replicas=(least, most)) can be resized while it goes on"
            }
        if self._ending or self._leave_by is not None:
            return {"error": "the run is ending"}
        try:
            self._controller.resize(int(request["replicas"]))
        except ValueError as error:
            return {"error": str(error)}
        return {"says": f"it will have {request['replicas']} replicas"}

    def tick(self, now: float) -> None:
        """Decide what is due; signals that came as well have been told before."""
        if self._exits.keys() >= self._expected:
            exits = [self._exits[worker] for worker in sorted(self._exits)]
            told = self._finish_told
            if self._signum is None and told is not None and exits and all(ended.has_left for ended in exits):
                self._say(f"{told.reason}: everything is saved; run the same command again to go on")
                self._finish(left(told, exits))
            else:
                self._finish(verdict(exits) if self._signum is None else interrupted(self._signum, exits, by=self._by))
            return
        if self._controller is not None and not self._ending:
            self._controller.tick(now)
        if self._leave_by is not None and now >= self._leave_by and not self._ending:
            self._say(f"the workers have not left within {self._job.grace_s:.0f} s: they are ended")
            self._stop(signal.SIGTERM)
        if self._door is not None:
            self._door.tick(now)
        if now >= self._next_ping:
            self._next_ping = now + PING_S
            self._tell_all({"op": "ping"})
        for guest in self._guests:
            silence_s = SILENCE_S if self._controller is None else self._job.silence_s
            if now - guest.link.heard > silence_s:
                self.guest_lost(guest, f"it said nothing for {silence_s:.0f} s")
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
        exits = [
            lost(worker, host=guest.host, pid=guest.pids.get(worker, 0), kind=kind, message=message, echo=number > 0)
            for number, worker in enumerate(sorted((guest.workers & self._expected) - self._exits.keys()))
        ]
        if self._controller is not None and not self._ending and self._survived(exits, replace=False):
            return
        for ended in exits:
            self.exited(ended)

    def _serve(self, guest: Guest, message: Mapping[str, Any]) -> None:
        match message["op"]:
            case "ping":
                pass
            case "said":
                request = message["request"]
                if not isinstance(request, dict):
                    raise TypeError(f"request is {request!r}")
                worker = int(message["worker"])
                if worker not in guest.workers:
                    raise ValueError(f"worker {worker} is not on host {guest.host}")
                if request.get("op") in FROM_WORKERS:
                    self._heard(worker, request)
                else:
                    self.tell(worker, self._board.handle(request))
            case "started":
                guest.pids[int(message["worker"])] = int(message["pid"])
            case "exited":
                ended = WorkerExit.from_json(message["exit"])
                if ended.worker not in guest.workers:
                    raise ValueError(f"worker {ended.worker} is not on host {guest.host}")
                self.exited(ended)
            case "doing":
                self.heard_doing(message["workers"], time.monotonic())
            case "leaving" if message["signal"] == signal.SIGTERM and self._has_begun:
                self._ask_to_leave(f"SIGTERM came on host {guest.host}")
            case "leaving" if message["signal"] is not None:
                self._stop(int(message["signal"]), by=f" on host {guest.host}")
            case "leaving":
                self.guest_lost(guest, str(message["reason"]), kind="LaunchError")
            case op:
                raise ValueError(f"unknown message {op!r}")

    # What the controller does (its Crews).

    def tell(self, worker: int, message: Mapping[str, Any]) -> None:
        """Say something to a worker, wherever it is."""
        guest = self._guest_of(worker)
        if guest is not None:
            guest.link.send({"op": "tell", "worker": worker, "message": message})
        elif self._crew is not None:
            self._crew.tell(worker, message)

    def start(self, worker: int, *, workers: int) -> None:
        """Have a worker started: where its predecessor was, or on this host."""
        self._expected.add(worker)
        self._exits.pop(worker, None)
        guest = self._guest_of(worker) or self._emptiest(worker)
        if guest is not None:
            guest.workers.add(worker)
            guest.link.send({"op": "start", "worker": worker, "workers": workers})
        elif self._crew is not None:
            self._crew.add(worker, workers=workers)

    def kill(self, worker: int) -> None:
        """Kill a worker that may not go on; its end is no news then."""
        self._expected.discard(worker)
        self._kill_one(worker)

    def _kill_one(self, worker: int) -> None:
        guest = self._guest_of(worker)
        if guest is not None:
            guest.link.send({"op": "kill_worker", "worker": worker})
        elif self._crew is not None:
            self._crew.kill_worker(worker)

    def give_up(self, reason: str) -> None:
        """Nobody is left who could go on."""
        self._say(f"{reason}: run the same command again to go on from the newest checkpoint")
        self._finish(Outcome(state="stopped", exit_code=TOO_FEW, reason=reason))

    def _emptiest(self, worker: int) -> Guest | None:
        """The host for a worker that has none: that with the fewest; None: this one."""
        if self._crew is not None and worker in self._places:
            return None
        own = len(self._crew.alive) if self._crew is not None else 0
        there = [(len(guest.workers & self._expected), guest) for guest in self._guests if not guest.gone]
        fewest = min(there, key=lambda one: one[0], default=None)
        if fewest is not None and fewest[0] < own:
            return fewest[1]
        self._places.add(worker)
        return None

    def _guest_of(self, worker: int) -> Guest | None:
        return next((guest for guest in self._guests if worker in guest.workers and not guest.gone), None)

    def _heard(self, worker: int, notice: Mapping[str, Any]) -> None:
        """A worker's notice."""
        match notice["op"]:
            case "elastic":
                if self._controller is None and not self._ending:
                    self._begin_elastic(int(notice["least"]), int(notice["most"]), int(notice["workers_each"]))
            case "begun":
                self._has_begun = True
            case "leaving" if not self._has_begun:
                self._stop(signal.SIGTERM, by=f" to worker {worker}")
            case "leaving" if self._controller is None:
                self._ask_to_leave(f"worker {worker} was asked to leave by SIGTERM")
            case _ if self._controller is not None and worker in self._expected:
                self._controller.heard(worker, notice)
                self._note_finish(self._controller.finish)
            case _:
                pass

    def _begin_elastic(self, least: int, most: int, workers_each: int) -> None:
        limits = Limits(
            least=least,
            most=most,
            workers_each=workers_each,
            silence_s=self._job.silence_s,
            patience_s=self._job.patience_s,
        )
        self._controller = Controller(limits, workers=self._job.workers or 1, crews=self, emit=self._emit)
        early = [ended for ended in self._exits.values() if ended.failed]
        if early:
            self._end_at = None
            for ended in early:
                del self._exits[ended.worker]
                self.exited(ended)

    def _goes_on(self, controller: Controller, ended: WorkerExit) -> bool:
        """Tell the controller how a worker of an elastic run has ended; returns whether the run goes on without it."""
        if ended.failed:
            return self._survived([ended])
        was_member = controller.is_member(ended.worker)
        controller.ended(ended.worker, has_saved=ended.has_left)
        if not was_member and not ended.has_left:
            self._expected.discard(ended.worker)
        return not was_member and not ended.has_left

    def _survived(self, exits: Sequence[WorkerExit], *, replace: bool = True) -> bool:
        """Whether an elastic run goes on without these workers; an error of the user's program is no such loss."""
        controller = self._controller
        if controller is None:
            return False
        if not all(map(_is_loss, exits)):
            return False
        self._expected.difference_update(ended.worker for ended in exits)
        controller.lost(exits, replace=replace)
        return True

    def _ask_to_leave(self, reason: str) -> None:
        """Have everybody finish the step, save and leave; in time, or they are ended."""
        if self._leave_by is not None or self._ending:
            return
        self._leave_by = time.monotonic() + self._job.grace_s
        self._say(f"{reason}: finishing the step in hand, then saving")
        if self._controller is not None:
            self._controller.stop(PREEMPTED, reason)
            self._note_finish(self._controller.finish)
            return
        finish = Finish(exit_code=PREEMPTED, reason=reason)
        self._note_finish(finish)
        for worker in self._expected - self._exits.keys():
            self.tell(worker, finish.to_json())

    def _note_finish(self, finish: Finish | None) -> None:
        if finish is not None and self._finish_told is None:
            self._finish_told = finish
            self._leave_by = self._leave_by or time.monotonic() + self._job.grace_s

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


def _is_loss(ended: WorkerExit) -> bool:
    """Whether a worker was lost, and did not fail by its own program: killed, gone with its host, or cut off."""
    return ended.failed and (ended.exit_code is None or bool((ended.error or {}).get("echo")))


def _unheard(doings: Sequence[Mapping[str, Any]], now: float) -> None:
    """Where nobody looks out for hangs."""


def _nowhere(event: Event) -> None:
    """Where nobody keeps a record."""
