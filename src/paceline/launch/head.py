"""The side of the first host, which holds the board and decides for the whole job; the only one on a single host.

It decides little: the job has finished when all workers ended well; when one failed, the others get a moment to say
what they know, and are ended. In an elastic run (the workers say so: the plan may be in the script) lost workers are no
failure, nor is a lost host: the controller has the others go on, and hosts that come later are taken in. SIGTERM has
everybody save and leave, if they are at work on steps; on another host only its own workers leave, where enough others
are left. `paceline.launch.guests` reaches workers and other hosts.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoint.folder import find
from paceline.comm.board import Board
from paceline.elastic.membership import Limits
from paceline.elastic.notices import FROM_WORKERS, PREEMPTED, TOO_FEW, Finish
from paceline.events import Event, Warned
from paceline.launch.controller import Controller
from paceline.launch.crew import Crew
from paceline.launch.guests import SILENCE_S, Guest, Guests
from paceline.launch.outcome import Outcome, WorkerExit, interrupted, left, lost, verdict
from paceline.launch.place import deal
from paceline.plan.job import Job

__all__ = ["GATHER_S", "REPORT_S", "STOP_S", "TERMINATE_S", "Head"]

GATHER_S = 1.0  # after the first failure: the others may say what they know of it
TERMINATE_S = 3.0  # after a failure, from SIGTERM to SIGKILL
STOP_S = 5.0  # after a signal to the supervisor, from SIGTERM to SIGKILL
REPORT_S = 4.0  # a member has this long, on top, to report its workers' ends


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
        self.ranks = deal(job.workers or 0, job.hosts)[0]  # with which this host begins
        self.guests = Guests(guests, own=self.ranks, host=self, name=host)
        self.outcome: Outcome | None = None
        self._crew: Crew | None = None
        self._job, self._door, self._say = job, door, say
        self._expected = set(range(job.workers or 0))  # workers whose end is to be waited for
        self._controller: Controller | None = None
        self._emit: Callable[[Event], None] = _nowhere
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

    @property
    def slots(self) -> int:
        """How many workers this host has room for."""
        return len(self.ranks)

    @property
    def here(self) -> Collection[int]:
        """Ranks that have their files on this host; follows them as they come and go."""
        return self.guests.here

    def lead(self, crew: Crew, emit: Callable[[Event], None]) -> None:
        """Take over the workers of this host; `emit` takes events for the run's record."""
        self._crew, self._emit = crew, emit
        self.guests.lead(crew)

    # What whoever looks out for hangs wants done.

    def ask_stack(self, worker: int) -> None:
        """Have a worker write its stacks."""
        self.guests.ask_stack(worker)

    def can_do_without(self, workers: Sequence[int]) -> bool:
        """Whether the job is elastic, and others than these workers are there."""
        return self._controller is not None and bool(self._expected - self._exits.keys() - set(workers))

    def stuck(self, workers: Sequence[int], error: Mapping[str, Any], *, goes_on: bool) -> None:
        """These workers hold up the others, for longer than the job waits: end the job. Where it `goes_on` without
        them, and is elastic, only they are killed: a loss like any other, for which `error["cause"]` is the reason."""
        if self._ending or self.outcome is not None:
            return
        if goes_on and self.can_do_without(workers):
            hosts = {worker: self.guests.host_of(worker) for worker in workers}
            for worker in workers:
                self.guests.kill(worker)
            self._survived(
                [lost(one, host=hosts[one], pid=0, kind="Hang", message=error["cause"]) for one in workers],
                silent_s=float(error["waited_s"]),
            )
            return
        culprit = int(error["worker"])
        ended = lost(culprit, host=error["host"], pid=error["pid"], kind=error["kind"], message=error["message"])
        self._exits[culprit] = dataclasses.replace(ended, error=error)
        self._end_all(TERMINATE_S)

    # What the crew tells (its Listener), and other hosts of their workers.

    def request(self, worker: int, request: Mapping[str, Any]) -> None:
        if request.get("op") in FROM_WORKERS:
            self._heard(worker, request)
        else:
            self.guests.tell(worker, self._board.handle(request))

    def started(self, worker: int, pid: int) -> None:
        """Nothing to do: the crew knows its own."""

    def exited(self, ended: WorkerExit) -> None:
        if self.outcome is not None or ended.worker in self._exits or ended.worker not in self._expected:
            return
        if self._controller is not None and not self._ending and self._goes_on(self._controller, ended):
            return
        self.guests.forget(ended.worker, for_good=False)
        self._exits[ended.worker] = ended
        if ended.failed and not self._ending and self._end_at is None:
            self._end_at = time.monotonic() + GATHER_S

    def barren(self) -> None:
        self.guests.barren()

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
        self.guests.tell_all({"op": "kill"})
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
            self._note_finish(self._controller.finish)
        if self._leave_by is not None and now >= self._leave_by and not self._ending:
            late = _workers(self._expected - self._exits.keys())
            self._emit(Warned(text=f"{late} not left within {self._job.grace_s:.0f} s: they are ended"))
            self._stop(signal.SIGTERM)
        if self._door is not None:
            self._door.tick(now)
        self.guests.tick(now, silence_s=SILENCE_S if self._controller is None else self._job.silence_s)
        for guest in self.guests:
            if guest.leave_by is not None:
                self._see_off(guest, now)
        if self._lost_at is not None and now >= self._lost_at:
            for guest in self.guests:
                if self.guests.workers_of(guest):
                    self.guests.lose(guest, "it was told to end its workers and did not report their ends")
        if self._end_at is not None and now >= self._end_at and not self._ending:
            self._end_all(TERMINATE_S)

    def close(self) -> None:
        self.guests.close()
        if self._door is not None:
            self._door.close()

    # What happens to other hosts (their Host).

    def refusal(self) -> tuple[str, bool] | None:
        """Why a host that comes now cannot join, and whether it may try again later; None where it can."""
        if self._ending or self._leave_by is not None or self.outcome is not None:
            return "the run is about to end", True
        if self._controller is not None:
            return None
        if self._has_begun:
            return (
                "its plan has a fixed number of replicas: Layout(replicas=(least, most)) lets hosts come later",
                False,
            )
        return "it has not begun yet", True

    def join(self, guest: Guest) -> None:
        """One more host has come while the run goes on."""
        self.guests.add(guest)
        gained = 0 if self._controller is None else self._controller.grow(guest.slots)
        self._say(f"{guest.name} has joined: {_more(gained) if gained else 'its slots are spare'}")

    def guest_leaves(self, guest: Guest, signum: int, *, at_once: bool) -> None:
        if at_once and self._controller is not None:
            return  # its workers are lost then, and the others go on, or save, without them
        if at_once or signum != signal.SIGTERM or not self._has_begun:
            self._stop(signum, by=f" on host {guest.host}")
            return
        reason = f"SIGTERM came on host {guest.host}"
        if self._controller is None or not self._goes_on_without(guest, self._controller, reason):
            self._ask_to_leave(reason)

    def guest_lost(self, exits: Sequence[WorkerExit], message: str, *, silent_s: float) -> None:
        if self.outcome is not None:
            return
        self._say(message)
        if self._controller is not None and not self._ending and self._survived(exits, silent_s=silent_s):
            return
        for ended in exits:
            self.exited(ended)

    # What the controller does (its Crews).

    def tell(self, worker: int, message: Mapping[str, Any]) -> None:
        self.guests.tell(worker, message)

    def start(self, replica: Sequence[int], *, workers: int) -> None:
        self._expected.update(replica)
        for worker in replica:
            self._exits.pop(worker, None)
        self.guests.start(replica, workers=workers)

    def kill(self, worker: int) -> None:
        """Kill a worker that may not go on; its end is no news then."""
        self._expected.discard(worker)
        self.guests.kill(worker)
        self.guests.forget(worker, for_good=False)

    def host_of(self, worker: int) -> str:
        return self.guests.host_of(worker)

    def is_spread(self, workers: Collection[int]) -> bool:
        return self.guests.is_spread(workers)

    def give_up(self, reason: str) -> None:
        """Nobody is left who could go on."""
        step = find(Path(self.run_dir) / "checkpoints").step
        if step:
            again = f"run the same command again to go on from the newest checkpoint, of step {step}"
        else:
            again = "nothing was saved; run the same command again to begin at step 1"
        self._say(f"{reason}: {again}")
        self._finish(Outcome(state="stopped", exit_code=TOO_FEW, reason=reason))

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
        has_left = not controller.is_member(ended.worker) and not ended.has_left
        if has_left:
            self._expected.discard(ended.worker)
            self.guests.forget(ended.worker, for_good=True)
        controller.ended(ended.worker, host=ended.host, has_saved=ended.has_left)
        return has_left

    def _goes_on_without(self, guest: Guest, controller: Controller, reason: str) -> bool:
        """Have a host's workers leave between two steps; returns whether enough are left, or can be started elsewhere.

        Where not, everybody has been told to save and leave.
        """
        if self._ending or self._leave_by is not None or controller.finish is not None:
            return False
        self.guests.shut(guest)
        workers = sorted(self.guests.workers_of(guest))
        if not controller.leave(workers, reason, room=self.guests.room(controller.workers_each)):
            return False
        guest.leave_by = time.monotonic() + self._job.grace_s
        self._say(f"{reason} ({guest.address}): {_leave(workers)}the run goes on without this host")
        return True

    def _see_off(self, guest: Guest, now: float) -> None:
        """A host that leaves alone ends when its workers have left; who has not in time is killed, and lost."""
        if self._ending or self._leave_by is not None or self._exits:
            return  # the run ends, and this host with it
        workers = self.guests.workers_of(guest)
        if not workers:
            reason = f"host {guest.host} was asked to leave, and the run goes on without it"
            gone = Outcome(state="stopped", exit_code=PREEMPTED, reason=reason)
            self.guests.release(guest, {"op": "end", "outcome": gone.to_json()})
        elif guest.leave_by is not None and now >= guest.leave_by:
            guest.leave_by = now + self._job.grace_s  # until their ends are known
            self._say(f"the workers on {guest.name} have not left within {self._job.grace_s:.0f} s: they are ended")
            guest.link.send({"op": "kill"})

    def _survived(self, exits: Sequence[WorkerExit], *, silent_s: float = 0.0) -> bool:
        """Whether an elastic run goes on without these workers; an error of the user's program is no such loss.

        `silent_s`: nothing had come of them for so long before.
        """
        controller = self._controller
        if controller is None:
            return False
        if not all(map(_is_loss, exits)):
            return False
        for ended in exits:
            self._expected.discard(ended.worker)
            self.guests.forget(ended.worker, for_good=False)
        # Who is lost alone leaves its slot free; who is lost with its host, or with its slots, needs one elsewhere.
        is_alone = bool(exits) and all(self.guests.has_place(ended.worker) for ended in exits)
        room = None if is_alone else self.guests.room(controller.workers_each)
        controller.lost(exits, room=room, silent_s=silent_s)
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
            self.guests.tell(worker, finish.to_json())

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
        self.guests.tell_all({"op": "stop", "grace_s": grace_s})
        if self._crew is not None:
            self._crew.terminate(grace_s)

    def _finish(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.guests.farewell({"op": "end", "outcome": outcome.to_json()})


def _is_loss(ended: WorkerExit) -> bool:
    """Whether a worker was lost, and did not fail by its own program: killed, gone with its host, or cut off."""
    return ended.failed and (ended.exit_code is None or bool((ended.error or {}).get("echo")))


def _more(replicas: int) -> str:
    return f"{replicas} more replica{'s' if replicas > 1 else ''}"


def _leave(workers: Sequence[int]) -> str:
    if not workers:
        return ""
    who = f"worker {workers[0]} leaves" if len(workers) == 1 else f"workers {', '.join(map(str, workers))} leave"
    return f"{who} between two steps, "


def _workers(ranks: Collection[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"worker {names} has" if len(ranks) == 1 else f"workers {names} have"


def _nowhere(event: Event) -> None:
    """Where nobody keeps a record."""
