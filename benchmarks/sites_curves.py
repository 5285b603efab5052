"""Draws what `benchmarks/sites.py` has kept: losses by step, by bytes and by time, for each sync and wire.

    python benchmarks/sites_curves.py [FILE] [--into docs/_static]

makes sites_held_out.svg: a row for each sync, a colour for each wire, DDP behind them. Time on a slow link is that of
the steps that were taken there; where they were few, the loss is the first link's at the same step, and the time is
drawn on by the mean of a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from driving.courses import DDP, Course, Matrix, by_chance, link_name
from driving.options import options_of

KEPT = Path("runs/sites.json")
QUICK = Path("runs/sites_quick.json")  # what `sites.py --quick` has kept; the picture of the docs stays
COLOURS = ("#222222", "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866")  # Tol's "bright"
STYLE: dict[Any, Any] = {  # matplotlib types its names
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.title_fontsize": 10,
    "svg.fonttype": "none",  # text, not its outlines
    "svg.hashsalt": "paceline",  # the same picture from the same numbers
}

Points = list[tuple[float, float]]
Look = dict[str, Any]  # how a line is drawn, in matplotlib's words


def held_out(course: Course) -> Points:
    """Steps, and the loss of held-out files."""
    return [(step, loss) for step, loss in sorted(course.held_out.items())]


def drawn(matrix: Matrix, path: Path) -> None:
    """Draw the losses: a row for each sync; by step, by bytes, and by time on each link."""
    whole = next(iter(matrix.courses.values()))
    rows = _rows(whole)
    colours = dict(zip(dict.fromkeys(wire for row in rows.values() for wire in row), COLOURS, strict=False))
    heads = ["steps", "MB that a site has sent", *(f"seconds, {link_name(link)}" for link in matrix.courses)]
    with rc_context(STYLE):
        figure = Figure(figsize=(2.7 * len(heads), 1.75 * len(rows) + 1.0), layout="constrained")
        grid = figure.subplots(len(rows), len(heads), sharex="col", sharey=True, squeeze=False)
        for (sync, wires), places in zip(rows.items(), grid, strict=True):
            places[0].set_ylabel("held-out loss, nats per byte", fontsize=7)
            places[0].set_title(sync, fontfamily="monospace", fontsize=9, fontweight="bold")
            for place in places:
                place.axhline(matrix.task.target, color="#888888", linewidth=0.8, linestyle=":", zorder=1)
            looks: dict[str, Look] = {DDP: {"color": "#cfcfcf", "linewidth": 4.0, "zorder": 1}}
            looks |= {f"{sync}+{wire}": {"color": colours[wire], "linewidth": 1.4} for wire in wires}
            for plan, look in looks.items():
                _curves(matrix, plan, look, places)
        for number, head in enumerate(heads):
            for place in grid[:, number]:
                if number:
                    _log(place, ticks=(1,) if number == 1 else (1, 3))  # bytes differ by more than times
            grid[-1][number].set_xlabel(head)
        handles = [Line2D([], [], color=colour, linewidth=3, label=wire) for wire, colour in colours.items()]
        handles.append(Line2D([], [], color="#cfcfcf", linewidth=4, label="DDP on gloo"))
        handles.append(Line2D([], [], color="#888888", linewidth=0.8, linestyle=":", label="the loss to be reached"))
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _rows(plans: Iterable[str]) -> dict[str, list[str]]:
    """The wires that were measured, by sync."""
    rows: dict[str, list[str]] = {}
    for plan in plans:
        if plan != DDP:
            sync, _, wire = plan.partition("+")
            rows.setdefault(sync, []).append(wire)
    return rows


def _curves(matrix: Matrix, plan: str, look: Look, places: Sequence[Axes]) -> None:
    """One plan's lines in a row."""
    by_step, by_bytes, *by_time = places
    whole = next(iter(matrix.courses.values())).get(plan)
    if whole is not None:
        points = held_out(whole)
        _line(by_step, look, points)
        _line(by_bytes, look, [(whole.bytes_at(step) / 1e6, loss) for step, loss in points])
    for place, courses in zip(by_time, matrix.courses.values(), strict=True):
        if (course := courses.get(plan)) is not None:
            points = held_out(course if whole is None or by_chance(plan) else whole)
            _line(place, look, [(course.seconds_at(step), loss) for step, loss in points])


def _line(axes: Axes, look: Look, points: Points) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), **look)


def _log(axes: Axes, *, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=ticks))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=KEPT)
    parser.add_argument("--into", type=Path, default=Path("docs/_static"))
    options = options_of(parser, takes="a few seconds", quick={"file": QUICK, "into": QUICK.parent})
    if not options.file.exists():
        raise SystemExit(f"{options.file} is not there: `python benchmarks/sites.py --out {options.file}` makes it")
    matrix = Matrix.read(options.file)
    path = options.into / "sites_held_out.svg"
    drawn(matrix, path)
    print(path)


if __name__ == "__main__":
    main()
