"""The loop of one host's supervisor: one thread, no torch, until the job has an outcome.

The crew starts and ends workers, the side (head or member) decides; the supervisor turns the loop, passes signals on
and lets the observer look about five times a second. Whatever happens, it leaves no process behind.
"""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.errors import LaunchError
from paceline.events import Event
from paceline.launch.again import Again
from paceline.launch.carrying import At
from paceline.launch.crew import Crew
from paceline.launch.head import Head
from paceline.launch.loop import Loop
from paceline.launch.member import Member
from paceline.launch.outcome import Outcome, interrupted
from paceline.launch.parent import WarmParent
from paceline.launch.signals import Signals
from paceline.launch.vaults import Vaults
from paceline.plan.job import Assignment

__all__ = ["Observer", "Supervisor", "Witness"]

OBSERVE_S = 0.2
TERMINAL_GONE = (errno.EIO, errno.EPIPE)  # EPIPE: the reader of `paceline run ... | head` has ended


class Observer(Protocol):
    """Who shows the run to the user."""

    def poll(self) -> None:
        """Look at what has happened; called about five times a second."""

    def say(self, text: str) -> None:
        """Show one sentence."""

    def emit(self, event: Event) -> None:
        """Take down what has happened."""


class Witness:
    """An observer for whom a terminal that is gone is a SIGHUP: writing to it may fail before the signal comes."""

    def __init__(self, observer: Observer, signals: Signals) -> None:
        self._observer, self._signals = observer, signals
        self._blind = False

    def poll(self) -> None:
        self._try(self._observer.poll)

    def say(self, text: str) -> None:
        self._try(lambda: self._observer.say(text))

    def emit(self, event: Event) -> None:
        self._observer.emit(event)

    def _try(self, look: Callable[[], None]) -> None:
        if self._blind:
            return
        try:
            look()
        except OSError as error:
            if error.errno not in TERMINAL_GONE:
                raise
            self._blind = True
            self._signals.note(signal.SIGHUP)


class Supervisor:
    """Runs one host's workers to the job's end."""

    def __init__(
        self,
        assignments: Sequence[Assignment],
        *,
        template: Assignment,
        side: Head | Member,
        parent: WarmParent | None,
        loop: Loop,
        observer: Observer,
        signals: Signals,
        vaults: Vaults | None = None,
        again: Again | None = None,
    ) -> None:
        """`again`: the workers begin with what is in `vaults`, here or on other hosts."""
        self._is_missing = ""  # what the workers were to begin with, and why it has not come
        self._carrying = side.carrying
        wanted = _wanted(side, again)
        self.crew = Crew(
            assignments,
            template=template,
            parent=parent,
            loop=loop,
            listener=side,
            say=observer.say,
            vaults=vaults,
            kept=None if self._carrying is None else self._carrying.kept,
            waits=bool(wanted),
        )
        if self._carrying is not None and again is not None and again.begins_at is not None and wanted:
            self._carrying.fetch(wanted, again.begins_at, done=self.crew.begin, failed=self._did_not_come)
        self._side, self._loop, self._observer, self._signals = side, loop, observer, signals
        self._observe_at = 0.0
        side.lead(self.crew, observer.emit)

    def run(self) -> Outcome:
        """Start the workers and return when the job has ended, on all hosts.

        Raises LaunchError where workers could not be started. Ends all processes on every path, but for the warm parent
        where all may begin again.
        """
        try:
            self.crew.start()
            while self._side.outcome is None:
                self._loop.turn(OBSERVE_S)
                self._observe()
                for signum in self._signals.take():
                    self._side.interrupted(signum)
                now = time.monotonic()
                self._side.tick(now)
                if self._carrying is not None:
                    self._carrying.tick(now)
                if self._is_missing:
                    raise LaunchError(self._is_missing)
                self.crew.tick(now)
            return self._side.outcome
        except LaunchError as error:
            signals = self._signals.take()
            self._side.abandon(str(error), signum=signals[0] if signals else None)
            if signals:  # to all processes at once, and the warm parent was faster
                return interrupted(signals[0], ())
            raise
        finally:
            outcome = self._side.outcome
            self.crew.close(keeps_parent=outcome is not None and outcome.may_begin_again)

    def _did_not_come(self, reason: str) -> None:
        self._is_missing = reason

    def _observe(self) -> None:
        now = time.monotonic()
        if now >= self._observe_at:
            self._observe_at = now + OBSERVE_S
            self._observer.poll()


def _wanted(side: Head | Member, again: Again | None) -> dict[At, list[int]]:
    """Whose states this host has to get, by the host that gives them."""
    found: dict[At, list[int]] = {}
    for errand in () if again is None else again.errands:
        if errand.to == side.host_index:
            found.setdefault(side.doors[errand.source], []).append(errand.worker)
    return found
