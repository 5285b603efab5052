"""The coordinator's host is asked to leave an elastic run, and another one takes over: the run goes on without it.

Its workers leave between two steps, as those of any other host do. Then the register says that the coordinator has
left, and its connections end. The other hosts take over as from a lost one (`head_search`), and nothing is lost.

A signal may have come to all hosts: the scheduler ends the whole run. So the coordinator first waits for what others
say. Until then they leave one after the other, and those that cannot leave without ending the run save.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.launch.coordinator.remote_hosts import RemoteHosts

__all__ = ["TOGETHER_S", "Handover"]

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
