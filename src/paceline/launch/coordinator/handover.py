"""The coordinator's host is asked to leave an elastic run, and another one takes over: the run goes on without it.

Its workers leave between two steps, as those of any other host do. Then the register says that the coordinator has
left, and its connections end. The other hosts take over as from a lost one (`head_search`), and nothing is lost.

A signal may have come to all hosts: the scheduler ends the whole run. So the coordinator first waits for what others
say. Until then they leave one after the other, and those that cannot leave without ending the run save.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.elastic.membership_messages import PREEMPTED
from paceline.launch.coordinator.elastic_controller import ElasticController
from paceline.launch.coordinator.job_end import JobEnd
from paceline.launch.coordinator.leadership import Leadership
from paceline.launch.coordinator.remote_hosts import RemoteHosts
from paceline.launch.coordinator.restart_decision import leave_text
from paceline.launch.fork.local_workers import LocalWorkers
from paceline.launch.io.signals import signal_text
from paceline.launch.job.outcome import JobOutcome

__all__ = ["TOGETHER_S", "Handover", "OwnDeparture"]

TOGETHER_S = 3.0  # a signal to all hosts has reached them by then


class Handover:
    """How far the coordinator's host has left. `reason` is why it leaves; its workers have been asked to."""

    def __init__(
        self,
        reason: str,
        remote_hosts: RemoteHosts,
        *,
        grace_s: float,
        kill: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """`kill()` ends this host's workers, if they take longer than `grace_s`."""
        self.reason, self._remote_hosts, self._grace_s, self._kill, self._say = reason, remote_hosts, grace_s, kill, say
        now = time.monotonic()
        self._failed_at = 0.0  # when the register could not be written first
        self._not_before, self._leave_by = now + min(TOGETHER_S, grace_s / 2), now + grace_s

    def hurry(self) -> None:
        """A second signal: this host's workers end at once, and it waits for nothing."""
        if self._remote_hosts.own_workers:
            self._kill()
            self._not_before = 0.0

    def is_due(self, now: float) -> bool:
        """Whether this host has no workers any more, and no other one is about to leave, as far as it is known."""
        if self._remote_hosts.own_workers:
            if now >= self._leave_by:
                self._leave_by = now + self._grace_s  # until their ends are seen
                self._say(f"the workers here have not left within {self._grace_s:.0f} s: they are ended")
                self._kill()
            return False
        is_another_leaving = any(remote_host.leave_by is not None for remote_host in self._remote_hosts)
        return now >= (self._leave_by if is_another_leaving else self._not_before)

    def has_failed(self, now: float) -> bool:
        """The register could not be written; return whether that has lasted for too long."""
        self._failed_at = self._failed_at or now
        return now >= self._failed_at + self._grace_s


class OwnDeparture:
    """Makes this host leave where it is the coordinator's, and another one can take over."""

    def __init__(
        self,
        remote_hosts: RemoteHosts,
        leadership: Leadership,
        end: JobEnd,
        *,
        host: str,
        grace_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._remote_hosts, self._leadership, self._end = remote_hosts, leadership, end
        self._host, self._grace_s, self._say = host, grace_s, say
        self._local_workers: LocalWorkers | None = None
        self._handover: Handover | None = None

    def lead(self, local_workers: LocalWorkers) -> None:
        """Take over this host's local workers."""
        self._local_workers = local_workers

    @property
    def is_under_way(self) -> bool:
        """Whether this host's workers have been asked to leave, so that another host takes over."""
        return self._handover is not None

    @property
    def left(self) -> str | None:
        """Why this host has left; None while it has workers, and where it stays."""
        return None if self._handover is None or self._remote_hosts.own_workers else self._handover.reason

    def forget(self) -> None:
        """This host does not leave any more."""
        self._handover = None

    def on_signal(self, signum: int, controller: ElasticController | None) -> bool:
        """Make this host's workers leave between two steps, or at once if they are leaving; returns False where the
        whole run has to end. `controller`: of an elastic run that is taking steps."""
        if self._handover is not None and not self._end.is_under_way:
            self._handover.hurry()
            return True
        if controller is None or controller.finish is not None or self._local_workers is None:
            return False
        if self._end.is_under_way or not self._is_possible:
            return False
        reason = f"{signal_text(signum)} came on host {self._host}"
        self._remote_hosts.shut_own()
        workers = sorted(self._remote_hosts.own_workers)
        if not controller.leave(workers, reason, room=self._remote_hosts.room(controller.workers_each)):
            return False
        self._say(f"{reason}: {leave_text(workers)}another host takes over, and the run goes on without this one")
        self._handover = Handover(
            reason, self._remote_hosts, grace_s=self._grace_s, kill=self._local_workers.kill, say=self._say
        )
        self._end.count_signal()
        return True

    def tick(self, now: float, controller: ElasticController | None) -> None:
        """Once this host has no workers any more: let another one take over."""
        handover = self._handover
        if handover is None or not handover.is_due(now):
            return
        if not self._is_possible:  # the others leave, too
            self._end.ask_to_leave(handover.reason, controller)
        elif not self._leadership.publish():
            if self._end.outcome is None and handover.has_failed(now):
                self._end.ask_to_leave(handover.reason, controller)
        else:
            self._remote_hosts.farewell({"op": "left", "reason": handover.reason})
            reason = f"{handover.reason}: it has left, and the run goes on without it"
            self._say("this host has left, and the run goes on without it")
            self._end.outcome = JobOutcome(state="stopped", exit_code=PREEMPTED, reason=reason, is_superseded=True)

    @property
    def _is_possible(self) -> bool:
        """Whether other hosts stay, and all of them see the register."""
        staying = [remote_host for remote_host in self._remote_hosts if remote_host.leave_by is None]
        return self._leadership.register is not None and bool(staying) and all(one.sees_register for one in staying)
