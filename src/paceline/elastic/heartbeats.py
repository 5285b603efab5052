"""Tracks the workers' heartbeats: when each worker last sent something, and which have been silent for too long.

Time in which the coordinator did not listen does not count. After it was suspended for a minute (a laptop that slept),
the workers' messages from that time are still to be read.
"""

from __future__ import annotations

from paceline.elastic.membership_messages import Limits

__all__ = ["Heartbeats", "heartbeat_interval_s"]

ALIVE_S = 1.0


def heartbeat_interval_s(silence_s: float) -> float:
    """Return the interval of heartbeats for a sender that is lost after `silence_s` of silence: a few may be late on a
    busy machine.
    """
    return min(ALIVE_S, silence_s / 4)


class Heartbeats:
    """Follows workers from `expect` to `forget`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._expected: dict[int, float] = {}  # started at; not heard of yet
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._listened: float | None = None
        self._away_s = min(limits.silence_s, limits.starting_s) / 4  # a longer gap between two looks is an absence

    def expect(self, worker: int, now: float) -> None:
        """A worker is being started."""
        self.forget(worker)
        self._expected[worker] = now

    def heard(self, worker: int, now: float) -> None:
        """A worker has sent something; do nothing if it is not expected."""
        if self._expected.pop(worker, None) is not None:
            self._first[worker] = now
        elif worker not in self._last:
            return
        self._last[worker] = now

    def forget(self, worker: int) -> None:
        for times in (self._expected, self._first, self._last):
            times.pop(worker, None)

    def is_known_for(self, worker: int, seconds: float, now: float) -> bool:
        """Return whether a worker was first heard of at least this long ago."""
        return worker in self._first and now - self._first[worker] > seconds

    def silence(self, worker: int, now: float) -> float:
        """Return for how many seconds a worker has been silent."""
        return now - self._last.get(worker, self._expected.get(worker, now))

    def listen(self, now: float) -> float:
        """Note that the coordinator is listening; return for how long it was not."""
        gap = 0.0 if self._listened is None else now - self._listened
        self._listened = now
        if gap <= self._away_s:
            return 0.0
        for times in (self._expected, self._last):
            for worker in times:
                times[worker] = min(now, times[worker] + gap)
        return gap

    def silent(self, now: float) -> dict[int, str]:
        """Return the workers that have been silent for too long, each with a sentence about it."""
        silence_s, starting_s = self._limits.silence_s, self._limits.starting_s
        heard_by, started_by = now - silence_s, now - starting_s
        mute = {
            worker: f"worker {worker} said nothing for {silence_s:.0f} s"
            for worker, last in self._last.items()
            if last < heard_by
        }
        for worker, started in self._expected.items():
            if started < started_by:
                mute[worker] = f"worker {worker} was not heard of within {starting_s:.0f} s of its start"
        return mute
