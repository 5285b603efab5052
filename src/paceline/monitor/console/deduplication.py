"""Shows each distinct text once, however many workers print it: `[worker 2] ...` or `[workers 0-3] ...`.

A text waits for a moment, so that equal texts of other workers join it. Later repetitions are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from paceline.units import workers_text

__all__ = ["Deduplicator", "tag"]

WAIT_S = 0.3
NUM_KNOWN = (
    20_000  # texts that are remembered; a program that says more distinct ones than this may see an old one again
)
# What torch and TensorFlow put before a line and differs without a difference: the rank, the time, and the thread
# ("[W1121 05:21:00.123456789 ", "W0000 00:00:1795870543.970920   15656 ").
VARYING = re.compile(
    r"^(\[rank\d+\]:\s*)?(\[[TIWEF]\d{4} \d\d:\d\d:\d\d[.\d]*\s|[IWEF]\d{4} \d\d:\d\d:\d+\.\d+\s+\d+\s)?"
)


class Deduplicator:
    """Collects texts of workers; calls `show(text, workers)` once for each distinct one, in the order of arrival."""

    def __init__(self, workers: Collection[int], show: Callable[[str, tuple[int, ...]], None]) -> None:
        self._workers, self._show = frozenset(workers), show
        self._known: dict[str, None] = {}
        self._waiting: dict[str, tuple[str, float, set[int]]] = {}

    def expect(self, workers: Collection[int]) -> None:
        """From now on a text that all of these have said waits no longer."""
        self._workers = frozenset(workers)

    def add(self, text: str, worker: int, now: float) -> None:
        """Take a text of a worker; `now` is monotonic, in seconds."""
        key = VARYING.sub("", text, count=1)
        if key in self._waiting:
            self._waiting[key][2].add(worker)
        elif key not in self._known:
            self._waiting[key] = (text, now, {worker})
            self._known[key] = None
            while len(self._known) > NUM_KNOWN:
                del self._known[next(iter(self._known))]

    def release(self, now: float, *, everything: bool = False) -> None:
        """Show what has waited long enough, or what all workers have said, never one before an earlier one."""
        while self._waiting:
            key, (text, since, said_by) = next(iter(self._waiting.items()))
            if not (everything or now - since >= WAIT_S or self._workers <= said_by):
                return
            del self._waiting[key]
            self._show(text, tuple(sorted(said_by)))


def tag(workers: Iterable[int], names: Sequence[str] = ()) -> str:
    """Return "[worker 2]" or "[workers 0-3, 5]"; with `names`, by rank, "[chief, server 0]"."""
    if names:
        return f"[{', '.join(names[worker] for worker in sorted(set(workers)))}]"
    return f"[{workers_text(workers)}]"
