"""The console on a terminal: a block at the bottom that is redrawn in place, lines above it.

Nothing runs beside the caller: the block is drawn when `poll` finds something new, at most twice a second, because
drawing takes milliseconds that the workers on the same cores would miss.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.events import (
    CheckpointSaved,
    Evaluated,
    Record,
    StreamOpened,
    WorkerFailed,
    WorkerFinished,
    WorkerStarted,
)
from paceline.monitor.console import give_up
from paceline.monitor.files import local_path
from paceline.monitor.steps import PHASES, Step
from paceline.monitor.wording import SHORT, Interval, number_text, rate_text

__all__ = ["LiveConsole"]

EVERY_S = 0.5  # between two drawings with news
IDLE_EVERY_S = 1.0  # between two drawings for the clock alone
BAR_WIDTH = 40
CURVE_WIDTH = 32
COLOURS: dict[str, str] = dict(zip(PHASES, ("yellow", "green", "magenta", "blue"), strict=True))
BLOCKS = "▁▂▃▄▅▆▇█"


class LiveConsole:
    """Draws a run on a terminal. `close()` takes the block away and leaves the lines."""

    def __init__(self, stream: TextIO, *, run_dir: Path, workers: int, max_steps: int | None) -> None:
        self._run, self._max_steps, self._num_workers = local_path(run_dir), max_steps, workers
        self._last_step = max_steps
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._stream = stream
        self._began = time.monotonic()
        self._drawn = 0.0
        self._is_new = True
        self._is_lost = False
        self._interval = Interval()
        self._speed: float | None = None
        self._speed_shares: dict[str, float] | None = None
        self._curve = _Curve()
        self._marks: dict[int, tuple[str, str]] = {}  # worker -> character, style
        self._plan = self._held_out = self._checkpoint = ""
        self._first: Step | None = None

    @property
    def can_draw(self) -> bool:
        """Whether the terminal understands cursor movements."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def accept(self, item: Record | Step) -> None:
        self._is_new = True
        if isinstance(item, Step):
            self._first = self._first or item
            self._interval.add(item)
            if item.loss is not None:
                self._curve.add(item.loss)
            return
        match item.event:
            case WorkerStarted(rank=worker, plan=plan):
                self._marks[worker], self._plan = ("●", "green"), plan
            case WorkerFinished(rank=worker):
                self._marks[worker] = ("✓", "cyan")
            case WorkerFailed(rank=worker):
                self._marks[worker] = ("✗", "bold red")
            case Evaluated(step=step, metrics=metrics):
                values = "  ".join(f"{name} {number_text(value)}" for name, value in metrics.items())
                self._held_out = f"{values}  at step {step}"
            case StreamOpened(last_step=last_step):
                known = [number for number in (self._max_steps, last_step) if number is not None]
                self._last_step = min(known) if known else None
            case CheckpointSaved(path=path):
                self._checkpoint = local_path(path)
            case _:
                pass

    def show(self, text: str) -> None:
        """Write lines above the block; colours of the program's own are kept."""
        lines = [line[line.rstrip("\r").rfind("\r") + 1 :] for line in text.split("\n")]
        whole = "\n".join(lines)
        self._print(Text.from_ansi(whole) if "\x1b" in whole else Text(whole))

    def poll(self, now: float) -> None:
        """Draw when it is time; `now` is monotonic, in seconds."""
        if not self._is_lost and now - self._drawn >= (EVERY_S if self._is_new else IDLE_EVERY_S):
            self._drawn, self._is_new = now, False
            try:
                if not self._live.is_started:
                    self._live.start()
                self._live.update(self._block(now), refresh=True)
            except OSError as error:
                self._lose(error)

    def close(self) -> None:
        """Take the block away and give the cursor back."""
        if self._live.is_started and not self._is_lost:
            try:
                self._live.stop()
            except OSError as error:
                self._lose(error)

    def _print(self, text: Text) -> None:
        if not self._is_lost:
            try:
                self._console.print(text, soft_wrap=True)
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self._is_lost = True
        give_up(self._stream, error)

    # -------------------------------------------------------------------------------------------------------- the block

    def _block(self, now: float) -> Text:
        rows = [
            self._title(now),
            self._progress(now),
            self._numbers(),
            self._time(),
            self._workers(),
            _row("held out", self._held_out),
            _row("checkpoint", self._checkpoint, "dim"),
        ]
        block = Text("\n").join(row for row in rows if row is not None)
        block.no_wrap, block.overflow = True, "ellipsis"
        return block

    def _title(self, now: float) -> Text:
        text = Text.assemble(("─── ", "dim"), ("paceline", "bold"), f"  {self._run}  ")
        return text.append(_clock(now - self._began), "bold").append(f"  {self._plan}", "dim")

    def _progress(self, now: float) -> Text | None:
        row = self._interval.last
        if row is None or self._first is None:
            waits = len(self._marks) < self._num_workers
            return _row("", "starting the workers" if waits else "the first step is under way", "dim")
        text = _label("step")
        if not self._last_step:
            return text.append(f"{row.step}", "bold").append(f"  epoch {row.epoch}", "dim")
        share = min(1.0, row.step / self._last_step)
        done = round(share * BAR_WIDTH)
        text.append("━" * done, "green").append("━" * (BAR_WIDTH - done), "bright_black")
        text.append(f"  {row.step}", "bold").append(f" of {self._last_step}  {share:.0%}  epoch {row.epoch}")
        passed, num_steps = row.time - self._first.time, row.step - self._first.step
        if passed > 0 and num_steps:
            text.append(f"  {_clock(passed / num_steps * max(0, self._last_step - row.step))} left", "dim")
        return text

    def _numbers(self) -> Text | None:
        row = self._interval.last
        if row is None:
            return None
        text = _label("loss")
        if row.loss is not None:
            text.append(self._curve.draw(), "cyan").append("  " + number_text(row.loss), "bold")
        for name, value in row.metrics.items():
            text.append(f"  {name} ", "dim").append(number_text(value))
        return text

    def _time(self) -> Text | None:
        """Where the seconds go; over what happened since the last drawing."""
        if self._interval.samples_per_s is not None and self._interval.shares:
            self._speed, self._speed_shares = self._interval.samples_per_s, self._interval.shares
            self._interval.restart()
        if self._speed is None or self._speed_shares is None:
            return None
        text, place, share_before = _label("time"), 0, 0.0
        for phase, share in self._speed_shares.items():
            share_before += share
            end = min(BAR_WIDTH, round(share_before * BAR_WIDTH))
            text.append("█" * (end - place), COLOURS[phase])
            place = end
        text.append("█" * (BAR_WIDTH - place), "bright_black")
        text.append(f"  {rate_text(self._speed)}", "bold").append(" samples/s")
        for phase, share in self._speed_shares.items():
            text.append(f"  {SHORT[phase]} ", COLOURS[phase]).append(f"{share:.0%}")
        return text

    def _workers(self) -> Text:
        text = _label("workers")
        for worker in range(min(self._num_workers, BAR_WIDTH)):
            text.append(*self._marks.get(worker, ("○", "bright_black")))
        if self._num_workers > BAR_WIDTH:
            text.append(f" and {self._num_workers - BAR_WIDTH} more", "dim")
        ready = sum(character != "○" for character, _ in self._marks.values())
        return text.append(f"  {ready} of {self._num_workers}" if ready < self._num_workers else f"  {ready}", "dim")


class _Curve:
    """The loss so far in a few characters: means of equal stretches of steps, which grow as the run goes on."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._sum, self._count, self._stretch = 0.0, 0, 1

    def add(self, value: float) -> None:
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._stretch:
            self._means.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._means) == CURVE_WIDTH:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means, self._stretch = [(one + other) / 2 for one, other in pairs], 2 * self._stretch

    def draw(self) -> str:
        finite = [mean for mean in self._means if abs(mean) < float("inf")]
        if not finite:
            return " "
        least, scale = min(finite), (len(BLOCKS) - 1) / ((max(finite) - min(finite)) or 1.0)
        return "".join(BLOCKS[round((mean - least) * scale)] for mean in finite)


def _label(name: str) -> Text:
    return Text(f"{name:>10}  ", "dim")


def _row(name: str, value: str, style: str = "") -> Text | None:
    return _label(name).append(value, style) if value else None


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
