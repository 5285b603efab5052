"""The console in a notebook: one display that changes in place, with bar, curve, workers and the last lines.

It is HTML without scripts, with colors that suit light and dark pages, so JupyterLab, VS Code and Colab show it alike.
Front ends without HTML show its text. The last state stays below the cell, also where an attempt begins again.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from paceline.events import (
    CheckpointSaved,
    Evaluated,
    Record,
    Regrouped,
    StreamOpened,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.console.notebook_html import NotebookView, html_of
from paceline.monitor.console.progress import ProgressInterval, RunTarget
from paceline.monitor.records.run_files import local_path
from paceline.monitor.records.steps import Step

__all__ = ["Display", "NotebookConsole", "find_display"]

EVERY_S = 1.0  # between two updates with news
IDLE_EVERY_S = 10.0  # between two updates for the clock alone
MOST_LINES = 200  # of output; all of it is in the run's directory
CURVE_POINTS = 240


class Display(Protocol):
    """An output of a notebook's cell that can be replaced."""

    def update(self, html: str, text: str) -> None:
        """Show this; the first call makes the output."""
        ...


class _CellDisplay:
    """An output of the cell that IPython's kernel runs now."""

    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython
        self._handle: Any = None

    def update(self, html: str, text: str) -> None:
        data = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = self._ipython.display.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def find_display() -> Display | None:
    """Return the output of the notebook cell that runs in this process; None where there is no notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return None if shell is None or getattr(shell, "kernel", None) is None else _CellDisplay(ipython)


class NotebookConsole:
    """Shows a run, over all its attempts, in one output of a cell."""

    def __init__(
        self, display: Display, *, run_dir: Path, workers: int, local: Collection[int], max_steps: int | None
    ) -> None:
        self._display = display
        self._goal = RunTarget(max_steps)
        self._view = NotebookView(run=local_path(run_dir), workers=workers)
        self._lines: collections.deque[str] = collections.deque(maxlen=MOST_LINES)
        self._num_lines = 0
        self._curve = LossCurve(CURVE_POINTS)
        self._interval = ProgressInterval()
        self._first: Step | None = None
        self._began = time.monotonic()
        self._drawn, self._is_new = 0.0, True
        self._marks: dict[int, str] = dict.fromkeys(sorted(local), "starting")

    def accept(self, item: Record | Step) -> None:
        self._is_new = True
        if isinstance(item, Step):
            self._interval.add(item)
            if self._first is None:
                self._first = item
                self._interval.restart()  # the speed of the first step says nothing about the others
            if item.loss is not None:
                self._curve.add(item.step, item.loss)
            for worker in item.workers:
                if self._marks.get(worker) == "joining":
                    self._marks[worker] = "working"
            return
        match item.event:
            case WorkerStarted(rank=worker, plan=plan):
                self._marks[worker] = "working" if self._marks.get(worker, "") == "starting" else "joining"
                self._view.plan = plan
            case WorkerJoined(rank=worker):
                self._marks[worker] = "working"
            case WorkerLost(rank=worker) | WorkerFailed(rank=worker):
                self._marks[worker] = "lost"
            case Regrouped(members=members):
                self._marks.update(dict.fromkeys(members, "working"))
            case WorkerLeft(rank=worker):
                self._marks[worker] = "left"
            case WorkerFinished(rank=worker) if self._marks.get(worker) != "left":
                self._marks[worker] = "finished"
            case Evaluated() as evaluated:
                self._view.evaluated = evaluated
            case StreamOpened() as opened:
                self._goal.accept(opened)
            case CheckpointSaved(step=step):
                self._view.checkpoint_step = step
            case _:
                pass

    def show(self, text: str) -> None:
        """Add lines; those of an ended run are shown at once."""
        lines = text.split("\n")
        self._num_lines += len(lines)
        self._lines += lines
        self._is_new = True
        if self._view.state != "running":
            self._draw()

    def follow(self, local: Collection[int]) -> None:
        """Have a mark for each of these workers."""
        for worker in local:
            self._marks.setdefault(worker, "starting")

    def poll(self, now: float) -> None:
        """Update when it is time; `now` is monotonic, in seconds."""
        if now - self._drawn >= (EVERY_S if self._is_new else IDLE_EVERY_S):
            self._drawn = now
            self._draw()

    def ended(self, state: str) -> None:
        """The attempt has ended: "finished", "failed", "stopped", or "running" where the next one begins at once."""
        self._view.state = state
        if state == "running":
            self._marks = dict.fromkeys(self._marks, "starting")

    def close(self) -> None:
        """Show the last state, which stays."""
        self._draw()

    def _draw(self) -> None:
        view, interval = self._view, self._interval
        self._is_new = False
        if interval.samples_per_s is not None and interval.shares:
            view.samples_per_s, view.shares, view.idle = interval.samples_per_s, interval.shares, interval.idle
            view.text = interval.line(self._goal)
            interval.restart()
        row = view.row = interval.last
        if row is not None and self._first is not None:
            view.epoch, view.last_step = self._goal.epoch_text(row), self._goal.last_step
            passed, num_steps = row.time - self._first.time, row.step - self._first.step
            known = passed > 0 and num_steps > 0 and view.last_step is not None and view.state == "running"
            view.left_s = passed / num_steps * max(0, (view.last_step or 0) - row.step) if known else None
            view.text = view.text or interval.line(self._goal, with_speed=False)
        view.passed_s = time.monotonic() - self._began
        view.marks, view.curve = self._marks, self._curve.points
        view.lines = list(self._lines)
        view.num_lines_before = self._num_lines - len(view.lines)
        self._display.update(html_of(view), "\n".join([*view.lines, *filter(None, [view.text])]))


class LossCurve:
    """The loss over the steps: means of equal stretches of steps, which grow as the run goes on."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._done: list[tuple[float, float]] = []  # step, mean
        self._part: list[tuple[float, float]] = []
        self._stretch = 1

    def add(self, step: int, loss: float) -> None:
        if abs(loss) == float("inf") or loss != loss:
            return
        self._part.append((step, loss))
        if len(self._part) < self._stretch:
            return
        self._done.append(_mean(self._part))
        self._part = []
        if len(self._done) >= self._most:
            self._done = [_mean(self._done[place : place + 2]) for place in range(0, len(self._done), 2)]
            self._stretch *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """Steps and means, and in the end the stretch that is not whole yet."""
        return [*self._done, *([_mean(self._part)] if self._part else [])]


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(loss for _, loss in points) / len(points)
