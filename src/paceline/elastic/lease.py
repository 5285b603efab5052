"""How long workers on another host may go on without the coordinator, and where they may still commit steps.

The coordinator answers each ping of a host's supervisor. Workers of that host end by themselves when the newest
answered ping is `lease_s` old, whatever they are doing, even if their supervisor does nothing. The coordinator received
that ping after it was sent. So `lost_s` after the last ping it received, no worker of that host is running any more,
whatever the network does. The clocks only have to run equally fast.

A step is committed when all members of a generation have voted. Steps unknown to the coordinator can therefore be
committed only if all members of one generation are on lost hosts. No restart may begin before that is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence

__all__ = ["END_S", "UnreachableHosts", "coordinator_silence_s", "lease_s", "lost_s", "search_s", "seconds_since_boot"]

END_S = 3.0  # from SIGTERM to SIGKILL
SEARCH_S = 5.0  # a host takes over within two seconds where it can
MARGIN_S = 2.0  # for clock differences, and for the time between reading the clock and the end of the process
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def seconds_since_boot() -> float:
    """Return the seconds since this host was booted, for all its processes; the clock goes on while the
    machine sleeps.
    """
    return time.clock_gettime(CLOCK)


def coordinator_silence_s(silence_s: float) -> float:
    """Return after how much silence a host gives up the coordinator; its workers then save and leave if they can. By
    then the coordinator has given up the host.
    """
    return 1.5 * silence_s


def search_s(silence_s: float) -> float:
    """Return for how long at least a host without a coordinator looks for another one, before its workers save and
    leave.
    """
    return min(silence_s, SEARCH_S)


def lease_s(silence_s: float, grace_s: float) -> float:
    """Return how long workers go on after the newest answered ping: until the silence is noticed, no other coordinator
    has been found, and they have had time to save and leave.
    """
    return coordinator_silence_s(silence_s) + search_s(silence_s) + grace_s + END_S


def lost_s(silence_s: float, grace_s: float) -> float:
    """Return after how much silence of a host none of its workers is running any more."""
    return lease_s(silence_s, grace_s) + MARGIN_S


class UnreachableHosts:
    """Lost hosts whose workers may still be running, by unique host index."""

    def __init__(self, hosts: Collection[int]) -> None:
        """`hosts` are those of the first generation's members."""
        self._generations = [frozenset(hosts)]  # the members' hosts of each generation that may take steps
        self._gone_by: dict[int, float] = {}

    def to_json(self) -> list[list[int]]:
        """Return plain data for `from_json`: nothing of lost hosts, of which the next coordinator knows as little."""
        return [sorted(hosts) for hosts in self._generations]

    @classmethod
    def from_json(cls, data: Sequence[Collection[int]]) -> UnreachableHosts:
        """Read what `to_json` returned; raise TypeError or ValueError if it is something else."""
        hosts = cls(())
        hosts._generations = [frozenset(map(int, one)) for one in data]
        return hosts

    def told(self, hosts: Collection[int]) -> None:
        """Another generation is announced to workers on these hosts."""
        self._generations.append(frozenset(hosts))

    def formed(self) -> None:
        """All members have joined the newest generation, so no earlier generation can take a step any more."""
        del self._generations[:-1]

    def lost(self, host: int, *, gone_by: float) -> None:
        """A host is lost; its workers have ended by `gone_by`."""
        self._gone_by[host] = gone_by

    def busy_until(self, *, anywhere: bool = False) -> float:
        """Return until when steps may be committed on lost hosts; -inf if none can be.

        `anywhere`: also by parameter servers, which need no complete generation.
        """
        gone_by = self._gone_by
        if anywhere:
            return max(gone_by.values(), default=-math.inf)
        alone = [hosts for hosts in self._generations if hosts <= gone_by.keys()]
        return max((min(gone_by[host] for host in hosts) for hosts in alone), default=-math.inf)
