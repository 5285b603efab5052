"""The console as plain lines: one per interval, and one per event. For logs and pipes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection
from typing import TextIO

from paceline.events import Record, StreamOpened
from paceline.monitor.console.progress import ProgressInterval, RunTarget
from paceline.monitor.records.steps import Step

__all__ = ["PlainConsole", "SilentConsole", "detach", "is_terminal", "write_line"]

EVERY_S = 2.0


class PlainConsole:
    """Writes lines to a stream. When that is gone (a closed pipe) the run goes on; standard error says so once."""

    def __init__(self, stream: TextIO, *, max_steps: int | None = None, every_s: float = EVERY_S) -> None:
        self._stream, self._every_s = stream, every_s
        self._goal = RunTarget(max_steps)
        self._interval = ProgressInterval()
        self._due: float | None = None  # set when the first step has been shown
        self._told_step = 0
        self._is_lost = False

    def accept(self, item: Record | Step) -> None:
        if isinstance(item, Step):
            self._interval.add(item)
            if self._told_step == 0:
                self._tell()  # the first step always, whatever comes with it
        elif isinstance(item.event, StreamOpened):
            self._goal.accept(item.event)

    def show(self, text: str) -> None:
        """Write lines, as they are."""
        if self._is_lost:
            return
        try:
            write_line(self._stream, text)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._is_lost = True
            detach(self._stream, error)

    def follow(self, local: Collection[int]) -> None:
        """Lines name their workers, so nothing has to be prepared for workers that join later."""

    def poll(self, now: float) -> None:
        """Write a line of progress when one is due; `now` is monotonic, in seconds."""
        if self._due is None:
            self._due = now + self._every_s if self._told_step else None
        elif now >= self._due and self._has_news():
            self._due = now + self._every_s
            self._tell()

    def ended(self, state: str) -> None:
        """The closing table says it."""

    def close(self) -> None:
        """Write the line of the last step, if it was not shown yet."""
        if self._has_news():
            self._tell()

    def _has_news(self) -> bool:
        return self._interval.last is not None and self._interval.last.step != self._told_step

    def _tell(self) -> None:
        self.show(self._interval.line(self._goal, with_speed=self._told_step > 0))
        self._told_step = self._interval.last.step if self._interval.last else 0
        self._interval.restart()


class SilentConsole:
    """Says nothing: for runs that another process watches."""

    def accept(self, item: Record | Step) -> None:
        """Ignore it."""

    def show(self, text: str) -> None:
        """Ignore it."""

    def follow(self, local: Collection[int]) -> None:
        """Ignore it."""

    def poll(self, now: float) -> None:
        """Nothing is due."""

    def ended(self, state: str) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Nothing is open."""


def is_terminal(stream: TextIO) -> bool:
    """Say whether a stream is a terminal that can show more than ASCII (a notebook's is none)."""
    encoding = str(getattr(stream, "encoding", "") or "").lower()
    return bool(getattr(stream, "isatty", bool)()) and encoding.startswith("utf")


def write_line(stream: TextIO, text: str) -> None:
    """Write text and a newline at once; what the stream's encoding cannot say becomes "?"."""
    try:
        stream.write(text + "\n")
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")
    stream.flush()


def detach(stream: TextIO, error: Exception) -> None:
    """Say on standard error, if that goes anywhere, that `stream` is gone, and let what it still holds go nowhere.

    Without the second Python would fail on the same text when it exits, and change the exit code to 120.
    """
    with contextlib.suppress(OSError, ValueError):  # it has no file, or is closed already
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
    try:
        write_line(sys.stderr, f"paceline: the console is gone ({error}); the run goes on, and its files record it")
    except (OSError, ValueError):
        return  # the terminal is closed
