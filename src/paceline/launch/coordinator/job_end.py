"""What SIGTERM, Ctrl-C, preemption and a failure do under `paceline run`: the job ends on all hosts. Its workers save
and leave, are terminated, or are killed.

`JobEnd` keeps how the workers ended and the job's outcome. The coordinator decides when the job ends. Other hosts carry
the end out for their own workers, and get a little more time to report it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW, Finish
from paceline.events import Event, Warned
from paceline.launch.coordinator.elastic_controller import ElasticController
from paceline.launch.coordinator.remote_hosts import RemoteHosts
from paceline.launch.coordinator.restart_decision import have_text
from paceline.launch.fork.local_workers import LocalWorkers
from paceline.launch.io.signals import signal_text
from paceline.launch.job.outcome import JobOutcome, WorkerExits, interrupted, lost_worker

__all__ = ["FAILURE_REPORTS_S", "REPORT_S", "STOP_S", "TERMINATE_S", "JobEnd"]

FAILURE_REPORTS_S = 1.0  # after the first failure, other workers may report what they know of it
TERMINATE_S = 3.0  # after a failure, from SIGTERM to SIGKILL
STOP_S = 5.0  # after a signal to the supervisor, from SIGTERM to SIGKILL
REPORT_S = 4.0  # another host gets this long on top to report how its workers ended


class JobEnd:
    """How far the job's end has come, and the means to end its workers on all hosts."""

    def __init__(
        self,
        exits: WorkerExits,
        remote_hosts: RemoteHosts,
        *,
        grace_s: float,
        timeout_s: float,
        say: Callable[[str], None],
        saves: bool = True,
    ) -> None:
        """`grace_s` is how long workers may take to save and leave; after Ctrl-C they may take as long as a step may
        (`timeout_s`), since the person who pressed it can do so again. `saves=False`: another framework's program saves
        what it does, or nothing.
        """
        self.exits = exits
        self.outcome: JobOutcome | None = None
        self.is_ending = False  # the workers were told to end, or were killed for a restart
        self.leave_by: float | None = None  # deadline for workers that were asked to leave
        self.end_at: float | None = None  # after a failure: when the other workers get SIGTERM
        self._is_restarting = False  # the workers were killed for a restart
        self._report_by: float | None = None  # deadline for other hosts to report their workers' ends
        self._num_signals = 0  # to this supervisor
        self._leave_signum: int = signal.SIGTERM  # the one that asked workers to leave
        self._remote_hosts, self._grace_s, self._say = remote_hosts, grace_s, say
        self._timeout_s, self._saves = timeout_s, saves
        self._local_workers: LocalWorkers | None = None
        self._emit: Callable[[Event], None] | None = None

    def lead(self, local_workers: LocalWorkers, emit: Callable[[Event], None]) -> None:
        """Take over this host's local workers; `emit` writes events to the run's record."""
        self._local_workers, self._emit = local_workers, emit

    @property
    def has_failed(self) -> bool:
        """Whether a failure or the job's end came before, so that a further loss is only its consequence."""
        return self.is_ending or self.end_at is not None

    @property
    def is_under_way(self) -> bool:
        """Whether the workers have been asked to leave or told to end."""
        return self.is_ending or self.leave_by is not None

    def count_signal(self) -> None:
        """A first signal has had another effect than the end of the job."""
        self._num_signals += 1

    def on_signal(self, signum: int, *, has_begun: bool, controller: ElasticController | None) -> None:
        """Handle a signal to this supervisor.

        The first one, Ctrl-C too, asks workers that are taking steps (`has_begun`) to save and leave. Before that it
        ends the workers. The second one ends them at once, and a further one kills them.
        """
        self._num_signals += 1
        if self._num_signals == 1 and has_begun and not self.is_ending:
            self._leave_signum = signum
            self.ask_to_leave(f"{signal_text(signum)} came", controller, by_person=signum == signal.SIGINT)
            return
        if self._num_signals == 1 or not self.is_ending:
            self.stop(signum, to_all_hosts=not has_begun or signum == signal.SIGINT)
            return
        self._remote_hosts.broadcast({"op": "kill"})
        if self._local_workers is not None:
            self._local_workers.kill()

    def ask_to_leave(self, reason: str, controller: ElasticController | None, *, by_person: bool = False) -> None:
        """Make all workers finish the step, save and leave; those that take too long are ended."""
        if self.is_under_way:
            return
        if by_person:
            self._grace_s = max(self._grace_s, self._timeout_s)
        self.leave_by = time.monotonic() + self._grace_s
        again = "; once more ends the run at once" if self._num_signals else ""
        does = "finishing the step in hand, then saving" if self._saves else "the programs are asked to save and end"
        self._say(f"{reason}: {does}{again}")
        if controller is not None:
            controller.stop(PREEMPTED, reason)
            self.note_finish(controller.finish)
            return
        finish = Finish(exit_code=PREEMPTED, reason=reason)
        self.note_finish(finish)
        for worker in self.exits.missing:
            self._remote_hosts.send(worker, finish.to_json())

    def remind(self, worker: int) -> None:
        """Tell a worker that was forked after all were asked to leave; an elastic run's controller does so itself."""
        if self.exits.finish is not None and not self.is_ending:
            self._remote_hosts.send(worker, self.exits.finish.to_json())

    def note_finish(self, finish: Finish | None) -> None:
        """Record that all workers were told to save and leave."""
        if finish is not None and self.exits.finish is None:
            self.exits.finish = finish
            self.leave_by = self.leave_by or time.monotonic() + self._grace_s

    def stop(self, signum: int, *, by: str = "", to_all_hosts: bool = False) -> None:
        """End all workers because of a signal; `by` says where it came, if not here. `to_all_hosts`: other hosts may
        have got it as well, and be lost for that."""
        if not self.is_ending:
            self.exits.stop(signum, by=by, to_all_hosts=to_all_hosts)
            self.terminate(STOP_S)
        elif self._is_restarting:
            self.exits.stop(signum, by=by, anyway=True)
        elif to_all_hosts and self.exits.stopped is None:
            self.exits.stop(signum, by=by, to_all_hosts=True)

    def terminate(self, grace_s: float) -> None:
        """Send SIGTERM to all workers on all hosts, and SIGKILL `grace_s` seconds later."""
        self.is_ending = True
        self._report_by = time.monotonic() + grace_s + REPORT_S
        self._remote_hosts.broadcast({"op": "stop", "grace_s": grace_s})
        if self._local_workers is not None:
            self._local_workers.terminate(grace_s)

    def kill_for_restart(self) -> None:
        """Kill all workers on all hosts at once: their state is kept, so they need no time to save."""
        self.is_ending = self._is_restarting = True
        self._remote_hosts.broadcast({"op": "again"})
        if self._local_workers is not None:
            self._local_workers.kill()

    def finish_when_all_ended(self) -> bool:
        """Set the outcome if every worker has ended; return whether they have."""
        if self.exits.missing:
            return False
        outcome = self.exits.outcome
        if self.exits.have_all_left:
            does = "everything is saved" if self._saves else "the programs have ended, and go on from what they saved"
            self._say(f"{outcome.reason}: {does}")
        self.finish(outcome)
        return True

    def finish(self, outcome: JobOutcome) -> None:
        """Set the job's outcome, and send it to the other hosts."""
        if self.outcome is None:
            self.outcome = outcome
            self._remote_hosts.farewell({"op": "end", "outcome": outcome.to_json()})

    def abandon(self, host: str, reason: str, signum: int | None, *, is_accident: bool = False) -> None:
        """End the job before this `host` had workers: it was stopped by a signal, or cannot go on."""
        if signum is not None:
            self.finish(interrupted(signum, (), by=f" on host {host}"))
            return
        reason = f"host {host}: {reason}"
        kind, exit_code = ("HostLost", TOO_FEW) if is_accident else ("LaunchError", 1)
        failure = lost_worker(0, host=host, pid=0, kind=kind, message=reason)
        self.finish(JobOutcome(state="failed", exit_code=exit_code, failures=(failure,), reason=reason))

    def tick(self, now: float) -> None:
        """End workers that leave too late or outlive a failure, and lose hosts that report no ends."""
        if self.leave_by is not None and now >= self.leave_by and not self.is_ending:
            if self._emit is not None:
                late = have_text(self.exits.missing)
                self._emit(Warned(text=f"{late} not left within {self._grace_s:.0f} s: they are ended"))
            self.stop(self._leave_signum)
        if self._report_by is not None and now >= self._report_by:
            for remote_host in self._remote_hosts:
                if self._remote_hosts.workers_of(remote_host):
                    self._remote_hosts.lose(remote_host, "it was told to end its workers and did not report their ends")
        if self.end_at is not None and now >= self.end_at and not self.is_ending:
            self.terminate(TERMINATE_S)
