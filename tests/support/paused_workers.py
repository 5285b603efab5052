"""Workers that stand still until something has come, and those that hear SIGTERM, for tests without a common step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
from paceline.plan.job import Assignment
from paceline.worker.membership.clean_exit import CleanExit
from paceline.worker.membership.preemption import PreemptionNotice
from paceline.worker.session import run_worker

__all__ = ["live_noticing", "wait_for"]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + forked.LIMIT_S / 2
    while not path.exists():
        if time.monotonic() > deadline:
            raise AssertionError(f"{path.name} never came")
        time.sleep(0.005)  # another process makes the file: nothing to wait on


def live_noticing(function: Callable[[Any], Any], assignment: Assignment, **more: Any) -> Any:
    """As in a world that somebody else started; the value of who leaves is its exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with PreemptionNotice(grace_s=forked.LIMIT_S) as notice:
            return run_worker(function, assignment, notice=notice, **more)
    except CleanExit as leaving:
        return leaving.code
