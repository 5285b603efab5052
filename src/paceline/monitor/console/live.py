"""The console on a terminal: a block at the bottom that is redrawn in place, with lines above it.

No thread draws. `poll` redraws the block when it finds something new, at most twice a second, because drawing takes
milliseconds from workers on the same cores. Bars fill the room that the numbers leave. Numbers that do not fit on a
line continue on the next one; none is cut.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

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
from paceline.monitor.console.plain import detach
from paceline.monitor.console.progress import (
    SHORT_PHASES,
    ProgressInterval,
    RunTarget,
    idle_texts,
    number_text,
    rate_text,
)
from paceline.monitor.records.run_files import local_path
from paceline.monitor.records.steps import OTHER, PHASES, Step
from paceline.units import bytes_text, duration_text, printable

__all__ = ["LiveConsole"]

EVERY_S = 0.5  # between two drawings with news
IDLE_EVERY_S = 1.0  # between two drawings for the clock alone
LABEL_WIDTH = 12
LEAST_BAR, MOST_BAR = 10, 40
NUMBERS_WIDTH = 52  # beside a bar: the names and shares of all phases, or step, epoch and the time that is left
CURVE_WIDTH = 32
COLOURS: dict[str, str] = dict(
    zip((*PHASES, OTHER), ("yellow", "green", "magenta", "blue", "red", "bright_black"), strict=True)
)
BLOCKS = "▁▂▃▄▅▆▇█"
STARTING, AT_WORK, FINISHED, GONE = ("○", "bright_black"), ("●", "green"), ("✓", "cyan"), ("✗", "bold red")
JOINING = ("○", "yellow")  # a successor that has not taken part in a step yet
LEFT = ("·", "bright_black")  # the others go on without it


class LiveConsole:
    """Draws a run on a terminal. `close()` takes the block away and leaves the lines."""

    def __init__(
        self, stream: TextIO, *, run_dir: Path, workers: int, local: Collection[int], max_steps: int | None
    ) -> None:
        self._run, self._goal = local_path(run_dir), RunTarget(max_steps)
        self._num_workers, self._local = workers, sorted(local)  # of the job; those whose output this host shows
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._stream = stream
        self._began = time.monotonic()
        self._drawn = 0.0
        self._is_new = True
        self._is_lost = False
        self._interval = ProgressInterval()
        self._speed: float | None = None
        self._step_s: float | None = None
        self._shares: dict[str, float] = {}
        self._idle: dict[int, float] = {}
        self._curve = _Sparkline()
        self._marks: dict[int, tuple[str, str]] = {}  # worker -> character, style
        self._num_lost = 0
        self._plan = ""
        self._held_out: Evaluated | None = None
        self._checkpoint: CheckpointSaved | None = None
        self._first: Step | None = None

    @property
    def can_draw(self) -> bool:
        """Whether the terminal understands cursor movements."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def accept(self, item: Record | Step) -> None:
        self._is_new = True
        if isinstance(item, Step):
            self._interval.add(item)
            if self._first is None:
                self._first = item
                self._interval.restart()  # the speed of the first step says nothing about the others
            if item.loss is not None:
                self._curve.add(item.loss)
            for worker in item.workers:
                if self._marks.get(worker) == JOINING:
                    self._marks[worker] = AT_WORK
            return
        match item.event:
            case WorkerStarted(rank=worker, plan=plan):
                self._note_started(worker)
                self._plan = plan
            case WorkerJoined(rank=worker):
                self._marks[worker] = AT_WORK
            case WorkerLost(rank=worker):
                self._marks[worker] = GONE
                self._num_lost += 1
            case Regrouped(members=members):
                self._marks.update(dict.fromkeys(members, AT_WORK))
            case WorkerLeft(rank=worker):
                self._marks[worker] = LEFT
            case WorkerFinished(rank=worker) if self._marks.get(worker) != LEFT:  # files are read in turn
                self._marks[worker] = FINISHED
            case WorkerFailed(rank=worker):
                self._marks[worker] = GONE
            case Evaluated() as evaluated:
                self._held_out = evaluated
            case StreamOpened() as opened:
                self._goal.accept(opened)
            case CheckpointSaved() as saved:
                self._checkpoint = saved
            case _:
                pass

    def _note_started(self, worker: int) -> None:
        is_later = worker in self._marks or worker >= self._num_workers
        self._marks[worker] = JOINING if is_later else AT_WORK

    def follow(self, local: Collection[int]) -> None:
        """Tell of these workers of this host, too, where they came later."""
        new = sorted(set(local) - set(self._local))
        self._local += new
        self._num_workers += len(new)

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

    def ended(self, state: str) -> None:
        """The closing table says it."""

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
        detach(self._stream, error)

    # -------------------------------------------------------------------------------------------------------- the block

    def _block(self, now: float) -> Text:
        width = self._console.width
        bar_width = min(max(LEAST_BAR, width - LABEL_WIDTH - 2 - NUMBERS_WIDTH), MOST_BAR)
        rows = [
            self._title(now, width),
            *self._progress(width, bar_width),
            *self._losses(width, bar_width),
            *self._speeds(width),
            *self._times(width, bar_width),
            *self._workers(width),
            *self._idle_shares(width),
            *self._saved(width),
        ]
        block = Text("\n").join(rows)
        block.no_wrap, block.overflow = True, "ellipsis"
        return block

    def _title(self, now: float, width: int) -> Text:
        text = Text.assemble(
            ("─── ", "dim"), ("paceline", "bold"), "  ", (_clock(now - self._began), "bold"), f"  {self._run}"
        )
        plan = Text(f"  {self._plan}", "dim")
        return text.append_text(plan) if text.cell_len + plan.cell_len <= width else text

    def _progress(self, width: int, bar_width: int) -> list[Text]:
        row = self._interval.last
        if row is None or self._first is None:
            waits = any(worker not in self._marks for worker in self._local)
            text = "starting the workers" if waits else "the first step is under way"
            return _rows("", [Text(text, "dim")], width)
        epoch = Text(self._goal.epoch_text(row), "dim")
        last_step = self._goal.last_step
        if not last_step:
            return _rows("step", [Text(f"{row.step}", "bold"), epoch], width)
        share = min(1.0, row.step / last_step)
        done = int(share * bar_width)
        bar = Text.assemble(("━" * done, "green"), ("─" * (bar_width - done), "bright_black"))
        numbers = [Text.assemble((f"{row.step}", "bold"), f" of {last_step}"), Text(f"{share:.0%}"), epoch]
        passed, num_steps = row.time - self._first.time, row.step - self._first.step
        if passed > 0 and num_steps:
            numbers.append(Text(f"{_clock(passed / num_steps * max(0, last_step - row.step))} left", "dim"))
        return _rows("step", numbers, width, bar=bar)

    def _losses(self, width: int, bar_width: int) -> list[Text]:
        row = self._interval.last
        if row is None:
            return []
        metrics = [
            Text.assemble((f"{printable(name)} ", "dim"), number_text(value)) for name, value in row.metrics.items()
        ]
        if row.loss is None:
            return _rows("reported", metrics, width) if metrics else []
        curve = Text(self._curve.draw(bar_width).ljust(bar_width), "cyan")
        return _rows("loss", [Text(number_text(row.loss), "bold"), *metrics], width, bar=curve)

    def _speeds(self, width: int) -> list[Text]:
        """What was done since the last drawing, in a second and in a step."""
        interval = self._interval
        if interval.samples_per_s is not None and interval.shares:
            self._speed, self._step_s, self._shares = interval.samples_per_s, interval.step_s, interval.shares
            self._idle = interval.idle
            interval.restart()
        elif (own := interval.step_s) and interval.last is not None and not interval.last.num_samples:
            self._step_s = own
            interval.restart()
        if self._speed is None and self._step_s is not None:  # of a program's own loop samples are not known
            text = Text.assemble((rate_text(1 / self._step_s), "bold"), " steps/s")
            return _rows("speed", [text, Text(f"{duration_text(self._step_s)} a step", "dim")], width)
        if self._speed is None:
            return []
        numbers = [Text.assemble((rate_text(self._speed), "bold"), " samples/s")]
        if self._step_s is not None:
            numbers.append(Text(f"{duration_text(self._step_s)} a step", "dim"))
        return _rows("speed", numbers, width)

    def _times(self, width: int, bar_width: int) -> list[Text]:
        """Where the time of the same steps went."""
        bar, share_before = Text(), 0.0
        for phase, share in self._shares.items():
            share_before += share
            bar.append("█" * (round(share_before * bar_width) - len(bar)), COLOURS[phase])
        names = [
            Text.assemble((f"{SHORT_PHASES[phase]} ", COLOURS[phase]), f"{share:.0%}")
            for phase, share in self._shares.items()
        ]
        return _rows("time", names, width, bar=bar) if names else []

    def _workers(self, width: int) -> list[Text]:
        shown = self._local[: max(LEAST_BAR, min(MOST_BAR, width - LABEL_WIDTH - len("  and 9999 more")))]
        marks = Text()
        for worker in shown:
            marks.append(*self._marks.get(worker, STARTING))
        numbers = [Text(f"and {len(self._local) - len(shown)} more", "dim")] if len(shown) < len(self._local) else []
        left = {worker for worker in self._local if self._marks.get(worker) == LEFT}
        num_ready, num_here = len(self._marks.keys() & set(self._local) - left), len(self._local) - len(left)
        count = f"{num_ready} of {num_here}" if num_ready < num_here else f"{num_here}"
        in_all = self._num_workers - len(left)
        count += f" here, {in_all} in all" if num_here < in_all else ""
        count += f", {len(left)} ha{'s' if len(left) == 1 else 've'} left" if left else ""
        losses = [Text(f"{self._num_lost} lost so far", "dim")] if self._num_lost else []
        return _rows("workers", [*numbers, Text(count, "dim"), *losses], width, bar=marks)

    def _idle_shares(self, width: int) -> list[Text]:
        """Which share of the same steps each worker waited for the others."""
        texts = [Text(text, "dim") for text in idle_texts(self._idle)]
        return _rows("idle", texts, width) if texts else []

    def _saved(self, width: int) -> list[Text]:
        rows: list[Text] = []
        if self._held_out is not None:
            values = [
                Text.assemble((f"{printable(name)} ", "dim"), number_text(value))
                for name, value in self._held_out.metrics.items()
            ]
            rows += _rows("held out", [*values, Text(f"at step {self._held_out.step}", "dim")], width)
        if self._checkpoint is not None:
            about = [f"step {self._checkpoint.step}", bytes_text(self._checkpoint.num_bytes)]
            rows += _rows("checkpoint", [Text(text, "dim") for text in about], width)
        return rows


class _Sparkline:
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

    def draw(self, width: int) -> str:
        """Return at most `width` characters."""
        finite = [mean for mean in self._means if abs(mean) < float("inf")]
        if not finite:
            return ""
        stretch = -(-len(finite) // width)
        pieces = [finite[place : place + stretch] for place in range(0, len(finite), stretch)]
        finite = [sum(piece) / len(piece) for piece in pieces]
        least, scale = min(finite), (len(BLOCKS) - 1) / ((max(finite) - min(finite)) or 1.0)
        return "".join(BLOCKS[round((mean - least) * scale)] for mean in finite)


def _rows(label: str, numbers: Sequence[Text], width: int, *, bar: Text | None = None) -> list[Text]:
    """Return label, bar and numbers, on as many lines as they need: the numbers stand below each other, none is cut."""
    row = Text.assemble((label.rjust(LABEL_WIDTH - 2), "dim"), "  ")
    if bar is not None:
        row.append_text(bar).append("  ")
    begin, rows = row.cell_len, [row]
    for number in (number for number in numbers if number):
        if row.cell_len > begin and row.cell_len + 2 + number.cell_len > width:
            row = Text(" " * begin)
            rows.append(row)
        row.append("  " if row.cell_len > begin else "").append_text(number)
    return rows


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
