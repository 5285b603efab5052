"""Plots as SVG text, for a page that needs nothing but a browser: lines with a band, steps, stacked areas and bars.

Colours and fonts are classes, which the page's style sheet defines for light and dark. A plot carries the numbers that
appear under the pointer as JSON in `data-hover`.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Callable, Mapping, Sequence

from paceline.monitor.console.progress import number_text
from paceline.monitor.report.curves import Point
from paceline.units import duration_text

__all__ = [
    "PlotMark",
    "areas_plot",
    "bar",
    "line_plot",
    "number_ticks",
    "paired_bars",
    "steps_plot",
    "time_ticks",
]

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 16, 26
MOST_NUMBERED = 24  # incidents; of more, each has a tick at the top only
TIME_STEPS = (
    *(base * 10**power for power in range(-6, 1) for base in (1, 2, 5)),
    10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
    *(86400 * base * 10**power for power in range(4) for base in (2, 5, 10)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotMark:
    """A moment on the x axis: an incident, or where an attempt began."""

    x: float
    label: str  # a number, or a word
    text: str  # shown under the pointer
    kind: str = "incident"  # incident | attempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotAxis:
    """Numbers to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, here = (self._scaled(each) for each in (self.low, self.high, max(value, self.low)))
        return self.start + (here - low) / ((high - low) or 1.0) * (self.stop - self.start)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value


def line_plot(
    points: Sequence[Point],
    *,
    x_ticks: Sequence[tuple[float, str]],
    x_range: tuple[float, float],
    x_name: Callable[[float], str],
    y_name: str,
    height: int = 240,
    log: bool = False,
    from_zero: bool = False,
    marks: Sequence[PlotMark] = (),
    breaks: Sequence[float] = (),
    kind: str = "loss",
) -> str:
    """Draw means as a line on the band between least and most; the line is cut at `breaks`."""
    low, high = _range(points, log=log, from_zero=from_zero)
    x = PlotAxis(low=x_range[0], high=x_range[1], start=LEFT, stop=WIDTH - RIGHT)
    y = PlotAxis(low=low, high=high, start=height - BOTTOM, stop=TOP, log=log)
    body = [_grid(x, y, x_ticks, _ticks(low, high, log=log), height)]
    for piece in _pieces(points, breaks):
        upper = [f"{x.at(point.x):.1f},{_clip(y, point.most):.1f}" for point in piece]
        lower = [f"{x.at(point.x):.1f},{_clip(y, point.least):.1f}" for point in reversed(piece)]
        if any(point.most > point.least for point in piece):
            body.append(f'<polygon class="band {kind}" points="{" ".join(upper + lower)}"/>')
        means = " ".join(f"{x.at(point.x):.1f},{_clip(y, point.mean):.1f}" for point in piece)
        dot = f'<circle class="dot {kind}" cx="{means.split(",")[0]}" cy="{means.split(",")[-1]}" r="2.5"/>'
        body.append(dot if len(piece) == 1 else f'<polyline class="line {kind}" points="{means}"/>')
    body.append(_marks(x, marks, height))
    hover = [[round(x.at(point.x), 1), _hover_text(x_name(point.x), point, y_name)] for point in points]
    return _svg(body, height, hover, label=y_name)


def steps_plot(
    counts: Sequence[tuple[float, int]],
    *,
    x_ticks: Sequence[tuple[float, str]],
    x_range: tuple[float, float],
    marks: Sequence[PlotMark] = (),
    height: int = 130,
) -> str:
    """Draw a number of workers that changes at moments."""
    most = max((count for _, count in counts), default=1)
    x = PlotAxis(low=x_range[0], high=x_range[1], start=LEFT, stop=WIDTH - RIGHT)
    y = PlotAxis(low=0, high=most * 1.12 or 1, start=height - BOTTOM, stop=TOP)
    path, before = "", 0
    for when, count in counts:
        here = f"{x.at(when):.1f}"
        path += f"H{here}V{y.at(count):.1f}" if path else f"M{here},{y.at(0):.1f}V{y.at(count):.1f}"
        before = count
    path += f"H{x.at(x_range[1]):.1f}" if path and before else ""
    ticks = sorted({round(most * share) for share in (0, 0.5, 1)})
    body = [
        _grid(x, y, x_ticks, [(tick, str(tick)) for tick in ticks], height),
        f'<path class="area workers" d="{path}V{y.at(0):.1f}Z"/><path class="line workers" d="{path}"/>'
        if path
        else "",
        _marks(x, marks, height),
    ]
    hover = [[round(x.at(when), 1), f"{duration_text(when)}: {count} workers"] for when, count in counts]
    return _svg(body, height, hover, label="workers")


def areas_plot(
    stretches: Mapping[str, Sequence[float]],
    *,
    stretch_s: float,
    x_ticks: Sequence[tuple[float, str]],
    marks: Sequence[PlotMark] = (),
    height: int = 210,
) -> str:
    """Draw shares of each stretch of time as columns stacked to 100 %, the first account at the bottom."""
    number = max((len(each) for each in stretches.values()), default=0)
    x = PlotAxis(low=0, high=number * stretch_s, start=LEFT, stop=WIDTH - RIGHT)
    y = PlotAxis(low=0, high=1, start=height - BOTTOM, stop=TOP)
    width = (WIDTH - RIGHT - LEFT) / (number or 1)
    paths = dict.fromkeys(stretches, "")  # one path for all columns of an account: no seams between them
    hover: list[list[float | str]] = []
    for place in range(number):
        whole = sum(each[place] for each in stretches.values())
        if whole <= 0:
            continue
        below, left, said = 0.0, LEFT + place * width, dict[str, float]()
        for account, each in stretches.items():
            share = each[place] / whole
            if share > 0:
                paths[account] += (
                    f"M{left:.2f},{y.at(below):.1f}v{y.at(share) - y.at(0):.1f}h{width:.2f}V{y.at(below):.1f}z"
                )
            said |= {account: share} if share >= 0.01 else {}
            below += share
        about = ", ".join(f"{account} {said[account]:.0%}" for account in sorted(said, key=lambda name: -said[name]))
        hover.append([round(left + width / 2, 1), f"{duration_text(place * stretch_s)}: {about}"])
    columns = [f'<path class="fill {account}" d="{path}"/>' for account, path in paths.items() if path]
    ticks = [(0.0, "0%"), (0.5, "50%"), (1.0, "100%")]
    body = [*columns, _grid(x, y, x_ticks, ticks, height), _marks(x, marks, height)]
    return _svg(body, height, hover, label="where the time went as the run went on")


def bar(shares: Mapping[str, float], *, height: int = 22, whole: float | None = None) -> str:
    """Return one stacked bar of a full line's width; `whole`: what a full bar stands for."""
    total = whole or sum(shares.values()) or 1.0
    pieces, place = [], 0.0
    for account, seconds in shares.items():
        width = seconds / total * 1000
        if width > 0.3:
            about = html.escape(f"{account}: {duration_text(seconds)}, {seconds / total:.1%}")
            pieces.append(
                f'<rect class="fill {account}" x="{place:.1f}" width="{width:.1f}" height="{height}">'
                f"<title>{about}</title></rect>"
            )
        place += width
    return (
        f'<svg class="bar" viewBox="0 0 1000 {height}" preserveAspectRatio="none" height="{height}" role="img">'
        f"{''.join(pieces)}</svg>"
    )


def paired_bars(predicted: float, measured: float, whole: float) -> str:
    """Return two thin bars, what was predicted above what was measured; `whole`: what a full bar stands for."""
    scale = 1000 / (whole or 1.0)
    return (
        '<svg class="pair" viewBox="0 0 1000 16" preserveAspectRatio="none" height="16" role="img">'
        f'<rect class="predicted" y="1" width="{predicted * scale:.1f}" height="6"><title>predicted</title></rect>'
        f'<rect class="measured" y="8" width="{measured * scale:.1f}" height="6"><title>measured</title></rect></svg>'
    )


def time_ticks(duration_s: float, *, most: int = 8) -> list[tuple[float, str]]:
    """Return moments at round distances, with their words."""
    step = next((step for step in TIME_STEPS if duration_s / step <= most), TIME_STEPS[-1])
    return [(place * step, _short_time(place * step)) for place in range(int(duration_s / step) + 1)]


def number_ticks(low: float, high: float, *, most: int = 8) -> list[tuple[float, str]]:
    """Return whole numbers at round distances, for an axis of steps."""
    return [(tick, f"{tick:,.0f}") for tick, _ in _ticks(low, high, log=False, most=most) if tick == int(tick)]


def _short_time(seconds: float) -> str:
    if seconds < 60 or seconds % 60:
        return duration_text(seconds) if seconds < 1 else f"{seconds:g} s" if seconds < 60 else _clock(seconds)
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:g} h" if seconds < 86400 else f"{seconds / 86400:g} d"


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02}"


def _ticks(low: float, high: float, *, log: bool, most: int = 5) -> list[tuple[float, str]]:
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        bases = (1, 2, 5) if len(powers) <= 3 else (1,)
        stride = max(1, len(powers) // 6)
        values = [base * 10.0**power for power in powers[::stride] for base in bases]
        return [(value, number_text(value)) for value in values if low <= value <= high]
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * base for base in (1, 2, 5, 10) if span / (step * base) <= most)
    first = math.ceil(low / step - 1e-9)
    values = [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]
    return [(value, f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}") for value in values]


def _range(points: Sequence[Point], *, log: bool, from_zero: bool) -> tuple[float, float]:
    low = min((point.least for point in points), default=0.0)
    high = max((point.most for point in points), default=1.0)
    # One stretch of wild values must not flatten the rest: they are cut off at the edge.
    middle = sorted(point.mean for point in points)
    if len(middle) > 20 and not log:
        typical = middle[int(len(middle) * 0.98)]
        high = min(high, max(typical * 2.5, middle[-1])) if typical > 0 else high
    if log:
        return low / 1.15, high * 1.15
    if from_zero:
        return 0.0, (high * 1.06) or 1.0
    pad = ((high - low) or abs(high) or 1.0) * 0.06
    return low - pad, high + pad


def _pieces(points: Sequence[Point], breaks: Sequence[float]) -> list[list[Point]]:
    pieces: list[list[Point]] = []
    edges = sorted(breaks)
    for point in points:
        if not pieces or any(pieces[-1][-1].x < edge <= point.x for edge in edges):
            pieces.append([])
        pieces[-1].append(point)
    return pieces


def _clip(axis: PlotAxis, value: float) -> float:
    return axis.at(min(max(value, axis.low), axis.high))


def _grid(
    x: PlotAxis, y: PlotAxis, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]], height: int
) -> str:
    lines = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.at(value):.1f}" y2="{y.at(value):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y.at(value) + 4:.1f}" text-anchor="end">{html.escape(text)}</text>'
        for value, text in y_ticks
    )
    below = "".join(
        f'<text class="tick" x="{x.at(value):.1f}" y="{height - 7}" text-anchor="middle">{html.escape(text)}</text>'
        f'<line class="notch" x1="{x.at(value):.1f}" x2="{x.at(value):.1f}" y1="{height - BOTTOM}" '
        f'y2="{height - BOTTOM + 4}"/>'
        for value, text in x_ticks
        if x.low <= value <= x.high
    )
    base = f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height - BOTTOM}" y2="{height - BOTTOM}"/>'
    return lines + below + base


def _marks(x: PlotAxis, marks: Sequence[PlotMark], height: int) -> str:
    numbered = sum(mark.kind == "incident" for mark in marks) <= MOST_NUMBERED
    pieces: list[str] = []
    drawn: set[int] = set()  # pixels that have a tick, where there are many
    for mark in marks:
        if not x.low <= mark.x <= x.high or (not numbered and mark.kind == "incident" and int(x.at(mark.x)) in drawn):
            continue
        drawn.add(int(x.at(mark.x)))
        here = f"{x.at(mark.x):.1f}"
        bottom = height - BOTTOM if mark.kind == "attempt" or numbered else TOP - 2
        line = f'<line x1="{here}" x2="{here}" y1="{TOP if bottom > TOP else TOP - 10}" y2="{bottom}"/>'
        label = ""
        if mark.kind == "attempt":
            label = f'<text x="{float(here) + 5:.1f}" y="{TOP + 10}">{html.escape(mark.label)}</text>'
        elif numbered:
            label = f'<circle cx="{here}" cy="8" r="7.5"/><text x="{here}" y="11.5">{html.escape(mark.label)}</text>'
        about = f"<title>{html.escape(mark.text)}</title>" if label else ""
        kind = mark.kind if label else "brief"
        pieces.append(f'<g class="mark {kind}">{about}{line}{label}</g>')
    return "".join(pieces)


def _hover_text(where: str, point: Point, name: str) -> str:
    spread = f" ({number_text(point.least)} to {number_text(point.most)})" if point.most > point.least else ""
    return f"{where}: {name} {number_text(point.mean)}{spread}"


def _svg(body: Sequence[str], height: int, hover: Sequence[Sequence[float | str]], *, label: str) -> str:
    numbers = html.escape(json.dumps(hover, separators=(",", ":"), ensure_ascii=False))
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(label)}" '
        f'data-hover="{numbers}">{"".join(body)}<line class="cursor" y1="{TOP}" y2="{height - BOTTOM}"/></svg>'
    )
