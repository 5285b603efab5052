"""Asks parts of runs to leave: to save and end. One that does not is asked again after a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.pool.pool_state import RunEntry

__all__ = ["LEAVE_S", "RUN_ENDS_S", "LeaveRequests"]

LEAVE_S = 90.0  # in which a part saves and ends; then it is asked once more, which ends its workers at once
RUN_ENDS_S = 20.0  # in which a coordinator has told the other parts that the run ends; then each is asked


class LeaveRequests:
    """When parts were asked last, by run and node. How often is in their entries, which outlive the pool's process."""

    def __init__(self, say_once: Callable[[str], None]) -> None:
        self._say_once = say_once
        self._asked_at: dict[tuple[str, str], float] = {}

    def ask(self, name: str, entry: RunEntry, node: str) -> None:
        """Ask a part to leave, unless it has been asked."""
        part = entry.parts[node]
        part.leaves, part.asked = True, max(1, part.asked)
        self._asked_at[name, node] = time.monotonic()

    def ask_again(self, name: str, entry: RunEntry) -> None:
        """Ask those parts of a run again that should have left by now. After a pool was killed the time begins anew."""
        for node, part in entry.parts.items():
            if not part.leaves:
                continue
            limit_s = RUN_ENDS_S if entry.ends_run and entry.is_open and part.asked == 1 else LEAVE_S
            if time.monotonic() - self._asked_at.setdefault((name, node), time.monotonic()) > limit_s:
                if limit_s == LEAVE_S:
                    self._say_once(f"{name} has not ended {LEAVE_S:.0f} s after it was asked to: its workers are ended")
                part.asked += 1
                self._asked_at[name, node] = time.monotonic()

    def forget(self, name: str, node: str) -> None:
        """A part has left."""
        self._asked_at.pop((name, node), None)
