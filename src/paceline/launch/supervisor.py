"""The event loop of one host's supervisor: one thread, no torch, until the job has an outcome.

`LocalWorkers` starts and ends workers, and the node role (coordinator or host agent) decides. The supervisor turns the
loop, passes signals on and polls the observer about five times a second. On every path it leaves no process behind.
"""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.errors import LaunchError
from paceline.events import Event
from paceline.launch.coordinator.coordinator import Coordinator
from paceline.launch.coordinator.host_agent import HostAgent
from paceline.launch.fork.local_workers import LocalWorkers
from paceline.launch.fork.warm_parent_client import WarmParent
from paceline.launch.io.event_loop import EventLoop
from paceline.launch.io.signals import StopSignals
from paceline.launch.job.outcome import JobOutcome, interrupted
from paceline.launch.job.restart_plan import RestartPlan
from paceline.launch.snapshots.snapshot_replication import HostAddress
from paceline.launch.snapshots.snapshot_store import SnapshotStore
from paceline.plan.job import Assignment

__all__ = ["GuardedObserver", "Observer", "Supervisor"]

OBSERVE_S = 0.2
TERMINAL_GONE = (errno.EIO, errno.EPIPE)  # EPIPE: the reader of `paceline run ... | head` has ended


class Observer(Protocol):
    """Shows the run to the user and records its events."""

    def poll(self) -> None:
        """Read what the workers have written; called about five times a second."""

    def say(self, text: str) -> None:
        """Show one sentence."""

    def emit(self, event: Event) -> None:
        """Record an event."""

    def hush(self) -> None:
        """Show nothing any more: another process on this host shows the run."""


class GuardedObserver:
    """An observer that turns a closed terminal into SIGHUP: writing to it may fail before the signal comes."""

    def __init__(self, observer: Observer, signals: StopSignals) -> None:
        self._observer, self._signals = observer, signals
        self._blind = False

    def poll(self) -> None:
        self._try(self._observer.poll)

    def say(self, text: str) -> None:
        self._try(lambda: self._observer.say(text))

    def emit(self, event: Event) -> None:
        self._observer.emit(event)

    def hush(self) -> None:
        self._observer.hush()

    def _try(self, look: Callable[[], None]) -> None:
        if self._blind:
            return
        try:
            look()
        except OSError as error:
            if error.errno not in TERMINAL_GONE:
                raise
            self._blind = True
            self._signals.note(signal.SIGHUP)


class Supervisor:
    """Runs one host's workers to the job's end."""

    def __init__(
        self,
        assignments: Sequence[Assignment],
        *,
        template: Assignment,
        node_role: Coordinator | HostAgent,
        parent: WarmParent | None,
        loop: EventLoop,
        observer: Observer,
        signals: StopSignals,
        memory_checkpoints: SnapshotStore | None = None,
        restart_plan: RestartPlan | None = None,
    ) -> None:
        """With `restart_plan`, the workers start from snapshots in `memory_checkpoints`, here or on other hosts."""
        self._missing_snapshot = ""  # which snapshot the workers lack, and why it could not be fetched
        self._replication = node_role.replication
        wanted = _snapshots_to_fetch(node_role, restart_plan)
        self.local_workers = LocalWorkers(
            assignments,
            template=template,
            parent=parent,
            loop=loop,
            listener=node_role,
            say=observer.say,
            memory_checkpoints=memory_checkpoints,
            on_snapshot=None if self._replication is None else self._replication.kept,
            awaits_snapshots=bool(wanted),
        )
        if self._replication is not None and restart_plan is not None and restart_plan.begins_at is not None and wanted:
            self._replication.fetch(
                wanted, restart_plan.begins_at, done=self.local_workers.snapshots_arrived, failed=self._fetch_failed
            )
        self._node_role, self._loop, self._observer, self._signals = node_role, loop, observer, signals
        self._observe_at = 0.0
        node_role.lead(self.local_workers, observer.emit)

    @property
    def has_begun(self) -> bool:
        """Whether a worker is taking steps, so that there is something to save."""
        return self._node_role.has_begun

    def run(self) -> JobOutcome:
        """Start the workers and return when the job has ended on all hosts.

        Raise LaunchError if workers could not be started. On every path all processes are ended; only before a restart
        the warm parent is kept.
        """
        try:
            self.local_workers.start()
            while self._node_role.outcome is None:
                self._loop.turn(OBSERVE_S)
                self._observe()
                for signum in self._signals.take():
                    self._node_role.interrupted(signum)
                now = time.monotonic()
                self._node_role.tick(now)
                if self._replication is not None:
                    self._replication.tick(now)
                if self._missing_snapshot:
                    raise LaunchError(self._missing_snapshot)
                self.local_workers.tick(now)
            return self._node_role.outcome
        except LaunchError as error:
            signals = self._signals.take()
            self._node_role.abandon(str(error), signum=signals[0] if signals else None, is_accident=error.is_accident)
            if signals:  # to all processes at once, and the warm parent was faster
                return interrupted(signals[0], ())
            raise
        finally:
            outcome = self._node_role.outcome
            self.local_workers.close(keeps_parent=outcome is not None and outcome.may_restart)

    def _fetch_failed(self, reason: str) -> None:
        self._missing_snapshot = reason

    def _observe(self) -> None:
        now = time.monotonic()
        if now >= self._observe_at:
            self._observe_at = now + OBSERVE_S
            self._observer.poll()


def _snapshots_to_fetch(
    node_role: Coordinator | HostAgent, restart_plan: RestartPlan | None
) -> dict[HostAddress, list[int]]:
    """Return the workers whose snapshots this host must fetch, by the address of the host that has them."""
    found: dict[HostAddress, list[int]] = {}
    for snapshot_transfer in () if restart_plan is None else restart_plan.transfers:
        if snapshot_transfer.to == node_role.host_index:
            found.setdefault(node_role.snapshot_addresses[snapshot_transfer.source], []).append(
                snapshot_transfer.worker
            )
    return found
