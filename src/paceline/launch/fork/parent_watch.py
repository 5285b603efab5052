"""Whether the warm parent still answers while it owes its supervisor a report: a stopped one is continued, and one that
does not answer then is killed, which the supervisor handles as any loss of it.

The question is {"op": "ping"}, so that a slow worker is not taken for a silent warm parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from paceline.processes import process_state

__all__ = ["ParentWatch"]

ANSWER_S = 2.0  # without an answer for so long, its state is looked at; so long again, after it was continued
LIMIT_S = 30.0  # one that runs, and does not answer for so long, hangs: a fork takes less
TURN_S = 1.0  # most that counts between two looks: this process may have been stopped, too


class ParentWatch:
    """Asks one warm parent, the process `pid`, whether it is there. Call `tick` in each turn of the loop."""

    def __init__(self, pid: int, ask: Callable[[], None]) -> None:
        self._pid, self._ask = pid, ask
        self._is_asked = self._was_continued = self._is_killed = False
        self._silent_s = 0.0  # since it was asked
        self._looked_at: float | None = None
        self._ask_at = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether it was asked and has not answered at once."""
        return self._silent_s > ANSWER_S / 4

    def answered(self) -> None:
        self._is_asked = self._was_continued = False
        self._silent_s = 0.0

    def tick(self, now: float, *, owes: bool, is_ready: bool, say: Callable[[str], None]) -> None:
        """Ask it where it `owes` a report. One that is not ready answers only after its imports, which have no limit:
        it is only continued where it is stopped.
        """
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, TURN_S)
        self._looked_at = now
        if self._is_killed or not (self._is_asked or (owes and now >= self._ask_at)):
            return
        if not self._is_asked:
            self._is_asked, self._ask_at = True, now + TURN_S
            self._ask()
            return
        self._silent_s += passed_s
        if not is_ready:  # what its imports take does not count, once they are done
            self._silent_s = min(self._silent_s, 2 * ANSWER_S)
        if self._silent_s < ANSWER_S * (2 if self._was_continued else 1):
            return
        about = f"the process that workers are forked from (paceline-warm, pid {self._pid})"
        stopped = process_state(self._pid) == "stopped"
        if stopped and not self._was_continued:
            self._was_continued, self._silent_s = True, ANSWER_S
            say(f"{about} is stopped (SIGSTOP, or a debugger), and workers wait for it: it is continued")
            self._signal(signal.SIGCONT)
        elif stopped or (is_ready and self._silent_s >= LIMIT_S):
            self._is_killed = True
            what = "is stopped again" if stopped else f"has not answered for {LIMIT_S:.0f} s"
            say(f"{about} {what}: it is killed")
            self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(self._pid, signum)
