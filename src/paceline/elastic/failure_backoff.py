"""Transfers that failed though nobody died: what workers say of it, how often in a row, and whom that points at.

When replacements that keep dying are started again: soon at first, then after longer and longer pauses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["RestartBackoff", "TransferFailures"]


class TransferFailures:
    """Two members that cannot reach each other stop all, and each says so. Who is to blame is known only roughly."""

    def __init__(self) -> None:
        self._reports: dict[int, tuple[int, float]] = {}  # worker -> of which generation, and when
        self._tries = 0  # in a row, of members that have the state
        self._joins = 0  # in a row, of newcomers
        self._blamed: Counter[int] = Counter()  # workers, over the tries in a row

    def report(self, worker: int, generation: int, peer: int | None, now: float) -> None:
        """A worker says that a transfer of a generation failed, and with whom, where it knows."""
        if self._reports.get(worker, (-1, now))[0] >= generation:
            return
        self._reports[worker] = generation, now
        self._blamed[worker] += 1  # it is at one end of whatever broke
        if peer is not None:
            self._blamed[peer] += 2

    def forget(self, generation: int) -> None:
        """A generation replaces the ones before, connections and all: what was said of those is of no interest."""
        self._reports = {worker: told for worker, told in self._reports.items() if told[0] >= generation}

    def formed(self, generation: int, *, planned: bool) -> None:
        """All have joined a generation."""
        self.forget(generation)
        if planned:
            self._joins = 0

    def committed(self) -> None:
        """A step was committed: all members reach each other."""
        self._tries = 0
        if not self._joins:
            self._blamed.clear()

    def is_overdue(self, now: float, patience_s: float) -> bool:
        """Whether somebody has been stuck for so long."""
        return any(now - when >= patience_s for _, when in self._reports.values())

    def is_first(self, *, joining: bool) -> bool:
        """Count a try; whether it is the first in a row. `joining`: a newcomer is being taken in."""
        if joining:
            self._joins += 1
            return self._joins == 1
        self._tries += 1
        return self._tries == 1

    def blame_on(self, workers: Iterable[int]) -> int:
        """How much points at these workers: each report at who made it, and twice as much at whom it names."""
        return sum(self._blamed[worker] for worker in workers)


QUICK_STARTS = 3  # replacements in a row that died before they took a step; then there are pauses
PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


class RestartBackoff:
    """Whatever kills them might pass, so nobody is given up."""

    def __init__(self) -> None:
        self._failed_starts = 0
        self._until: float | None = None

    def is_over(self, now: float) -> bool:
        """Whether one may be started."""
        return self._until is None or now >= self._until

    def failed(self, now: float) -> None:
        """One has died before it took a step, or several by the same cause."""
        self._failed_starts += 1
        if self._failed_starts >= QUICK_STARTS:
            self._until = now + min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(8, self._failed_starts - QUICK_STARTS))

    def forgive(self) -> None:
        """One has taken a step, or somebody asks for more: begin anew."""
        self._failed_starts, self._until = 0, None
