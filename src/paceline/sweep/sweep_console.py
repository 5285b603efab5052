"""What `paceline sweep` shows: on a terminal a table that is redrawn in place, elsewhere a line for what happens."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.sweep.space import value_text
from paceline.sweep.sweep_record import SweepRecord, TrialRow
from paceline.units import printable

__all__ = ["SweepConsole", "sweep_table"]

MOST_ROWS = 30  # on a terminal
COLOURS = {"running": "green", "finished": "cyan", "pruned": "yellow", "failed": "bold red", "paused": "magenta"}
PRESENT = ("running", "paused", "waiting")


class SweepConsole:
    """Shows a sweep on a stream; `close()` leaves the last table there."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = (
            Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            if stream.isatty()
            else None
        )

    def say(self, text: str) -> None:
        """A line for what has happened."""
        self._console.print(printable(f"paceline: {text}"), soft_wrap=True)

    def show(self, record: SweepRecord) -> None:
        """Draw the table anew, on a terminal."""
        if self._live is None:
            return
        if not self._live.is_started:
            self._live.start()
        self._live.update(sweep_table(record, most=MOST_ROWS), refresh=True)

    def close(self) -> None:
        if self._live is not None and self._live.is_started:
            self._live.stop()


def sweep_table(record: SweepRecord, *, most: int | None = None) -> Group:
    """The trials as a table below one line. `most` rows: those that are there now, then the best, then the last."""
    rows = list(record.trials) if most is None else _chosen(record, most)
    names = list(dict.fromkeys(name for row in rows for name in row.parameters))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("trial", "right"), ("state", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]  # a Literal
    for name in names:
        table.add_column(Text(printable(name)), justify="right")
    for name in (record.objective, "step", "replicas"):
        table.add_column(Text(printable(name)), justify="right", no_wrap=True)
    if any(row.why for row in rows):
        table.add_column("why", overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, names, is_best=row.number == record.best))
    return Group(Text(_head(record, len(rows))), table)


def _head(record: SweepRecord, num_shown: int) -> str:
    count: dict[str, int] = {}
    for row in record.trials:
        count[row.state] = count.get(row.state, 0) + 1
    states = ", ".join(f"{number} {state}" for state, number in count.items()) or "none yet"
    wanted = "" if record.wanted is None else f" of {record.wanted}"
    hidden = len(record.trials) - num_shown
    left_out = f"; {hidden} are not shown" if hidden else ""
    return printable(f"{record.name}: {record.state_now}, {len(record.trials)}{wanted} trials: {states}{left_out}")


def _chosen(record: SweepRecord, most: int) -> list[TrialRow]:
    sign = 1 if record.direction == "minimize" else -1
    ended = [row for row in record.trials if row.state == "finished" and row.value is not None]
    best = sorted(ended, key=lambda row: sign * (row.value or 0.0))[: most // 3]
    order = [row for row in record.trials if row.state in PRESENT] + best + list(reversed(record.trials))
    chosen = {row.number: row for row in order}
    kept = sorted(list(chosen)[:most])
    return [chosen[number] for number in kept]


def _cells(row: TrialRow, names: list[str], *, is_best: bool) -> list[Text]:
    state = Text(row.state, style=COLOURS.get(row.state, ""))
    values = [value_text(_short(row.parameters[name])) if name in row.parameters else "" for name in names]
    number = f"{'* ' if is_best else ''}{row.number}"
    step = f"{row.step:,}" + (f" of {row.last_step:,}" if row.last_step else "")
    shown = "" if row.value is None else f"{row.value:.5g}"
    replicas = str(row.replicas) if row.replicas else ""
    return [Text(number), state, *map(Text, map(printable, [*values, shown, step, replicas, row.why]))]


def _short(value: str | int | float | bool) -> str | int | float | bool:
    return float(f"{value:.4g}") if isinstance(value, float) else value
