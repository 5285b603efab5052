"""Where run directories are read: in one thread, or at once where that takes less than handing it over.

No two readings are done at the same time, so that looks at the same run do not come into each other's way.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["Reader"]

T = TypeVar("T")

AT_ONCE_S = 0.02  # a reading that took less is done without the thread next time
FORGETTING = 0.95  # of what a reading took, from each to the next: some of them read parts that take longer
MOST_KNOWN = 256  # readings of which it is known how long they took


class Reader:
    """Call its methods from the loop that serves."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-ui")
        self._is_reading = threading.Lock()
        self._took_s: dict[Hashable, float] = {}

    async def read(self, *calls: Callable[[], Any]) -> Any:
        """Do these readings in the thread, one after the other; returns what the last one returns."""

        def do() -> Any:
            found = None
            with self._is_reading:
                for call in calls:
                    found = call()
            return found

        return await asyncio.get_running_loop().run_in_executor(self._thread, do)

    async def read_often(self, what: Hashable, call: Callable[[], T]) -> T:
        """Do a reading that comes again and again, by the name `what`. Where it has taken little lately, and the
        thread reads nothing, it is done at once: to wake a thread, which wakes the loop, takes as long again of the
        cores that train."""

        def timed() -> T:
            began_s = time.perf_counter()
            found = call()
            if len(self._took_s) >= MOST_KNOWN:
                self._took_s.clear()
            self._took_s[what] = max(time.perf_counter() - began_s, FORGETTING * self._took_s.get(what, 0.0))
            return found

        if self._took_s.get(what, AT_ONCE_S) < AT_ONCE_S and self._is_reading.acquire(blocking=False):
            try:
                return timed()
            finally:
                self._is_reading.release()
        found: T = await self.read(timed)
        return found

    def close(self) -> None:
        """End the thread; waits for the reading that it does, which takes a fraction of a second."""
        self._thread.shutdown(wait=True, cancel_futures=True)
