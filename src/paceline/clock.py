"""The time of day for records, which no change of the system's clock moves.

The system's clock is read once, when this is imported. From then on time passes as the kernel counts it. So two times
of one process, or of a process and its forks, differ by the time that has passed between them. Nothing waits by this
clock, and nothing expires by it: that is `time.monotonic`.
"""

from __future__ import annotations

import time

__all__ = ["now"]


def _passed_s() -> float:
    """Seconds since the machine was started, with the time in which it was suspended where the system counts that."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


_began = time.time() - _passed_s()


def now() -> float:
    """Return seconds since the epoch, as the clock was when this process, or the one that it is a fork of, began."""
    return _began + _passed_s()
