"""When replacements that keep dying are started again: soon at first, then after longer and longer pauses."""

from __future__ import annotations

__all__ = ["Pauses"]

QUICK_STARTS = 3  # replacements in a row that died before they took a step; then there are pauses
PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


class Pauses:
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
