"""Handles repeated failures: which workers to blame for failed transfers, and how long to pause before restarts.

Replacements that keep failing are started again, at first soon, then with exponential backoff.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["RestartBackoff", "TransferFailures"]


class TransferFailures:
    """Counts failed transfers. Two members that cannot reach each other stop everyone, and both report it, so blame is
    only approximate.
    """

    def __init__(self) -> None:
        self._reports: dict[int, tuple[int, float]] = {}  # worker -> the generation of its report, and when
        self._attempts = 0  # in a row, of members that have the state
        self._join_attempts = 0  # in a row, of newcomers
        self._blamed: Counter[int] = Counter()  # workers, over the tries in a row

    def report(self, worker: int, generation: int, peer: int | None, now: float) -> None:
        """A worker reports that a transfer of a generation failed, and with which peer, if known."""
        if self._reports.get(worker, (-1, now))[0] >= generation:
            return
        self._reports[worker] = generation, now
        self._blamed[worker] += 1  # it is at one end of whatever broke
        if peer is not None:
            self._blamed[peer] += 2

    def forget(self, generation: int) -> None:
        """Drop reports about earlier generations: their connections are gone."""
        self._reports = {worker: told for worker, told in self._reports.items() if told[0] >= generation}

    def formed(self, generation: int, *, planned: bool) -> None:
        """All have joined a generation."""
        self.forget(generation)
        if planned:
            self._join_attempts = 0

    def committed(self) -> None:
        """A step was committed: all members reach each other."""
        self._attempts = 0
        if not self._join_attempts:
            self._blamed.clear()

    def is_overdue(self, now: float, patience_s: float) -> bool:
        """Return whether some worker has been stuck for this long."""
        return any(now - when >= patience_s for _, when in self._reports.values())

    def is_first_attempt(self, *, joining: bool) -> bool:
        """Count an attempt; return whether it is the first in a row. `joining`: a newcomer is being admitted."""
        if joining:
            self._join_attempts += 1
            return self._join_attempts == 1
        self._attempts += 1
        return self._attempts == 1

    def blame_on(self, workers: Iterable[int]) -> int:
        """Return how strongly the reports blame these workers: once for each report made, twice for each peer named."""
        return sum(self._blamed[worker] for worker in workers)


QUICK_STARTS = 3  # replacements in a row that failed before their first step; then there are pauses
PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


class RestartBackoff:
    """Pauses between restarts. The cause of the failures may pass, so no replica is given up."""

    def __init__(self) -> None:
        self._failed_starts = 0
        self._until: float | None = None

    def is_over(self, now: float) -> bool:
        """Return whether a replacement may be started."""
        return self._until is None or now >= self._until

    def failed(self, now: float) -> None:
        """Replacements failed before their first step, one or several for the same reason."""
        self._failed_starts += 1
        if self._failed_starts >= QUICK_STARTS:
            self._until = now + min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(8, self._failed_starts - QUICK_STARTS))

    def forgive(self) -> None:
        """A replacement took a step, or a user asked for more replicas: start without pauses again."""
        self._failed_starts, self._until = 0, None
