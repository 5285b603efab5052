"""When a checkpoint by time is due: every few minutes, and at the end of a loop; so seldom that saves take 1 % of the
time."""

from __future__ import annotations

import time

__all__ = ["SaveTimer"]

LARGEST_SHARE = 0.01  # of a run's time, in which its steps wait for saves
LEAST_S = 10.0  # what was trained in less than this is not worth a save of its own


class SaveTimer:
    """One worker's clock for saves by time.

    After a save that held up the steps for `cost_s`, the next one comes `cost_s / LARGEST_SHARE` seconds later, or
    after `every_s` where that is longer.

    Example::

        timer = SaveTimer(300.0)
        timer.begin()
        assert not timer.is_due
    """

    def __init__(self, every_s: float) -> None:
        """`every_s`: least seconds between two saves; 0: a save is never due."""
        self._every_s = every_s
        self._began = self._next = self._cost_s = 0.0

    def begin(self) -> None:
        """Steps begin: count from now. Later calls do nothing."""
        if not self._began:
            self._began = time.monotonic()
            self._next = self._began + self._every_s

    def saved(self, cost_s: float) -> None:
        """A checkpoint, of whatever kind, was saved now; the steps waited for `cost_s` seconds."""
        self._began, self._cost_s = time.monotonic(), cost_s
        self._next = self._began + max(self._every_s, cost_s / LARGEST_SHARE)

    @property
    def is_worth(self) -> bool:
        """Whether a save pays at a place that comes seldom, as the end of a loop does: there is no need to wait until
        it is due, if it takes little of the time since the last one."""
        since_s = time.monotonic() - self._began if self._began else 0.0
        return since_s >= max(LEAST_S, self._cost_s / LARGEST_SHARE)

    @property
    def is_due(self) -> bool:
        return bool(self._every_s and self._began) and time.monotonic() >= self._next

    @property
    def is_near(self) -> bool:
        """Whether half of the time to the next save is over, so that memory for it is worth having."""
        return bool(self._every_s and self._began) and time.monotonic() >= (self._began + self._next) / 2
