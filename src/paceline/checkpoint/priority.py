"""Threads that write checkpoints take what training leaves."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

__all__ = ["lower_priority"]

NICENESS = 10  # of the writing thread, added to the process's


def lower_priority() -> None:
    """On Linux a thread has a priority of its own; elsewhere the call would slow the whole process."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):  # a sandbox may forbid even this; saving works at any priority
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
