"""Records Ctrl-C, SIGTERM and SIGHUP while a supervisor runs, so that it can end the job in good order. What they then
do is in `paceline.launch.coordinator.job_end` (`on_signal`).

A batch system's advance warning (`environment.notice_signals`, for example SIGUSR1 in a Slurm job) counts once as the
SIGTERM that it announces. That SIGTERM then counts as the second one.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from paceline import environment

__all__ = ["STOP_SIGNALS", "Interrupted", "StopSignals", "signal_text"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_text(signum: int) -> str:
    """Return "Ctrl-C", or another signal's name."""
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


class Interrupted(Exception):
    """A signal came before the workers were started."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum


class StopSignals:
    """A context manager that records Ctrl-C, SIGTERM and SIGHUP, and restores their earlier handlers at its end.

    Python sets signal handlers only in the main thread; in another thread nothing is recorded. A signal that is ignored
    (nohup, a shell's background job) stays ignored. SIGHUP counts once: a closed terminal shows itself in several ways.
    """

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._before: dict[int, Any] = {}
        self._warnings: tuple[int, ...] = ()
        self._is_warned = self._has_hung_up = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._warnings = environment.notice_signals()
            for signum in (*STOP_SIGNALS, *self._warnings):
                before = signal.getsignal(signum)
                if before not in (None, signal.SIG_IGN):  # None: not set by Python, so it could not be restored
                    self._before[signum] = before
                    signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signum, before = self._before.popitem()
            signal.signal(signum, before)

    def note(self, signum: int) -> None:
        """Record a signal as if it had come."""
        if signum == signal.SIGHUP and self._has_hung_up:
            return
        self._has_hung_up = self._has_hung_up or signum == signal.SIGHUP
        self._noted.append(signum)

    def take(self) -> list[int]:
        """Return the signals that have come since the last call, in order."""
        taken = self._noted[:]
        del self._noted[: len(taken)]
        return taken

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if taken := self.take():
            raise Interrupted(taken[0])

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum not in self._warnings:
            self.note(signum)
        elif not self._is_warned:
            self._is_warned = True
            self._noted.append(signal.SIGTERM)
