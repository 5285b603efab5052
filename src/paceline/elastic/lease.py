"""How long workers of another host may go on without the head, and where steps may still be committed without it.

Each word of a host's supervisor is answered by the head. Workers of that host end by themselves when the newest word
that was answered is `lease_s` old, whatever they are doing, and whether their supervisor does anything or not. The head
heard that word after it was said. So, `lost_s` after the last word that it has heard, no worker is at work there any
more, whatever the network does: all that is asked of the clocks is that they go equally fast.

A step is committed when all members of a generation have voted. So only where all members of one are on hosts that were
lost, steps may be committed that the head does not hear of; nobody may begin again before that is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection

__all__ = ["UnreachableHosts", "clock", "head_silence_s", "lease_s", "lost_s"]

END_S = 3.0  # from SIGTERM to SIGKILL
MARGIN_S = 2.0  # for clocks, and for what happens between looking at one and being gone
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    """Seconds since this host was started, for all of its processes; it goes on while the machine sleeps."""
    return time.clock_gettime(CLOCK)


def head_silence_s(silence_s: float) -> float:
    """After so long without a word of the head a host takes it for lost, and its workers save and leave, if they can.
    The head has given up a host that it does not hear any more before that."""
    return 1.5 * silence_s


def lease_s(silence_s: float, grace_s: float) -> float:
    """How long workers go on after the newest word of their host that the head has answered: until the head's silence
    is noticed, and until they have had the time to save and leave."""
    return head_silence_s(silence_s) + grace_s + END_S


def lost_s(silence_s: float, grace_s: float) -> float:
    """After so long without a word of a host none of its workers goes on."""
    return lease_s(silence_s, grace_s) + MARGIN_S


class UnreachableHosts:
    """Hosts that were lost, and may be at work, by numbers that none of them shares with another one."""

    def __init__(self, hosts: Collection[int]) -> None:
        """`hosts`: on which the members of the first generation are."""
        self._generations = [frozenset(hosts)]  # where the members are of each that may take steps
        self._gone_by: dict[int, float] = {}

    def told(self, hosts: Collection[int]) -> None:
        """Workers are told of one more generation, whose members are on these hosts."""
        self._generations.append(frozenset(hosts))

    def formed(self) -> None:
        """All members have joined the newest generation. Whoever has its state has come to it by way of all before, so
        none of those can take a step."""
        del self._generations[:-1]

    def lost(self, host: int, *, gone_by: float) -> None:
        """Nothing is heard of a host any more; its workers have ended by then."""
        self._gone_by[host] = gone_by

    def busy_until(self, *, anywhere: bool = False) -> float:
        """Until when steps may be committed there; -inf: they cannot be.

        `anywhere`: by servers, for which the members of a generation need not be complete.
        """
        gone_by = self._gone_by
        if anywhere:
            return max(gone_by.values(), default=-math.inf)
        alone = [hosts for hosts in self._generations if hosts <= gone_by.keys()]
        return max((min(gone_by[host] for host in hosts) for hosts in alone), default=-math.inf)
