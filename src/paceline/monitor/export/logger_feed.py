"""Feeds a `RunLogger` from a thread of its own: the run's process never waits for a tracker while the run goes on.

Points wait in memory, 20,000 at most; beyond that new ones are left out. After an exception, or an end that takes too
long, the tracker gets nothing any more. Each of these is reported once. `metrics.jsonl` has every step in all cases.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
from typing import Any

from paceline.monitor.export.run_logger import LoggedRun, RunLogger, ScalarPoint

__all__ = ["LoggerFeed"]

MOST_WAITING = 20_000  # points
AT_ONCE = 500  # points in a call
MOST_RECENT = 50_000  # points; a rollback goes back fewer
EVERY_S = 1.0  # points are collected for so long before they are sent


class LoggerFeed:
    """The way of one run's points to one tracker; `name` is the tracker's in messages."""

    def __init__(self, name: str, logger: RunLogger) -> None:
        self.name = name
        self._logger = logger
        self._changed = threading.Condition()
        self._waiting: collections.deque[ScalarPoint | None] = (
            collections.deque()
        )  # None: steps come again from here on
        self._num_left_out = 0
        self._state: str | None = None  # how the run has ended
        self._said: list[str] = []
        self._has_failed = False
        self._thread: threading.Thread | None = None
        self._had: int | None = None  # steps until this one have been logged, and are not again

    def begin(self, run: LoggedRun) -> None:
        """Start the tracker's run, once; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._feed, args=(run,), name=f"log {self.name}", daemon=True)
            self._thread.start()

    def add(self, points: Sequence[ScalarPoint]) -> None:
        """Have points logged; returns at once."""
        with self._changed:
            room = max(0, MOST_WAITING - len(self._waiting))
            if len(points) > room and not self._num_left_out and not self._has_failed:
                self._said.append(
                    f"{self.name} is too slow: {MOST_WAITING:,} points wait for it, and more are left out. "
                    "metrics.jsonl has every step."
                )
            self._num_left_out += max(0, len(points) - room)
            if not self._has_failed:
                self._waiting += points[:room]

    def goes_back(self) -> None:
        """An attempt begins, and takes steps again: those that have been logged are left out."""
        with self._changed:
            self._waiting.append(None)

    def warnings(self) -> list[str]:
        """Return what the user is to know, each once."""
        with self._changed:
            said, self._said = self._said, []
        return said

    def end(self, state: str, *, limit_s: float) -> None:
        """End the tracker's run, and wait until it has everything, at most `limit_s` seconds."""
        if self._thread is None:
            return
        with self._changed:
            self._state = state
            self._changed.notify_all()
        self._thread.join(limit_s)
        abandon: Any = getattr(self._logger, "abandon", None)
        if self._thread.is_alive():
            self._fail(f"it has not taken the last points within {limit_s:.0f} s")
            if abandon is not None:
                abandon()
        elif abandon is not None:
            abandon()

    def _feed(self, run: LoggedRun) -> None:
        try:
            self._had = self._logger.start(run)
            newest, recent = self._had, _RecentPoints()
            while (batch := self._batch()) is not None:
                points: list[ScalarPoint] = []
                for each in batch:
                    if each is None:
                        self._had = newest
                    elif (self._had is None or each.step > self._had) and recent.is_new(each):
                        points.append(each)
                        newest = max(newest or 0, each.step)
                if points:
                    self._logger.log(points)
            self._logger.end(self._state or "failed")
        except Exception as error:  # of any tracker, and of users' own: it must not cost the run
            self._fail(str(error) or type(error).__name__)

    def _batch(self) -> list[ScalarPoint | None] | None:
        """Wait for points; None when the run has ended and all were given."""
        until = time.monotonic() + EVERY_S
        with self._changed:
            while self._state is None and (wait_s := until - time.monotonic()) > 0:
                self._changed.wait(wait_s)
            if self._state is not None and (self._has_failed or not self._waiting):
                return None
            return [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]

    def _fail(self, why: str) -> None:
        with self._changed:
            if not self._has_failed:
                self._said.append(
                    f"nothing more is logged to {self.name}: {why}. The run goes on; metrics.jsonl has every step."
                )
            self._has_failed = True
            self._waiting.clear()


class _RecentPoints:
    """Points that were logged lately: a rollback takes some steps again within an attempt. Replicas that take steps by
    themselves end them in any order, so that the newest step alone does not tell."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, str], None] = {}

    def is_new(self, point: ScalarPoint) -> bool:
        key = point.step, next(iter(point.values), "")
        if key in self._keys:
            return False
        self._keys[key] = None
        if len(self._keys) > MOST_RECENT:
            del self._keys[next(iter(self._keys))]
        return True
