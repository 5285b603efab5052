"""Draws what `benchmarks/sites.py` has kept: losses by step, by bytes and by time, for each sync and wire.

    python benchmarks/sites_curves.py [FILE] [--into docs/_static]

makes sites_held_out.svg and sites_training.svg. Colours tell wires apart, lines syncs. Time on a slow link is that of
the steps that were taken there; where they were few, the loss is the first link's at the same step, and the time is
drawn on by the mean of a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from driving.courses import DDP, Course, Matrix, by_chance, link_name

KEPT = Path("runs/sites.json")
COLOURS = ("#222222", "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866")  # Tol's "bright"
LINES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (10, 3)))
SMOOTHED = 8  # steps of the training loss in one point
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
    "svg.fonttype": "path",
    "svg.hashsalt": "paceline",  # the same picture from the same numbers
}

Points = list[tuple[float, float]]
Look = dict[str, Any]  # how a line is drawn, in matplotlib's words


def held_out(course: Course) -> Points:
    """Steps, and the loss of files that nobody has trained on."""
    return [(step, loss) for step, loss in sorted(course.held_out.items())]


def training(course: Course) -> Points:
    """Steps, and the mean loss of the last few of them."""
    steps = sorted(course.losses)
    groups = [steps[at : at + SMOOTHED] for at in range(0, len(steps) - SMOOTHED + 1, SMOOTHED)]
    return [(group[-1], sum(course.losses[step] for step in group) / SMOOTHED) for group in groups]


def drawn(matrix: Matrix, losses: Callable[[Course], Points], what: str, path: Path) -> None:
    """Draw one kind of loss: by step, by bytes, and by time on each link."""
    whole = next(iter(matrix.courses.values()))
    looks = _looks(list(whole))
    width = max(3, len(matrix.courses))
    with rc_context(STYLE):
        figure = Figure(figsize=(4 * width, 7.2), layout="constrained")
        grid = figure.subplots(2, width, sharey=True, squeeze=False)
        by_step, by_bytes, by_time = grid[0][0], grid[0][1], list(grid[1])
        _titled(by_step, "By step", "step")
        _titled(by_bytes, "By what a site has sent", "MB", log=True)
        for plan, course in whole.items():
            points = losses(course)
            _line(by_step, looks[plan], points)
            _line(by_bytes, looks[plan], [(course.bytes_at(step) / 1e6, loss) for step, loss in points])
        for place, (link, courses) in zip(by_time, matrix.courses.items(), strict=False):
            _titled(place, f"By time, {link_name(link)}", "seconds", log=True)
            place.sharex(by_time[0])
            for plan, course in courses.items():
                points = losses(course if by_chance(plan) else whole[plan])
                _line(place, looks[plan], [(course.seconds_at(step), loss) for step, loss in points])
        for place in (by_step, by_bytes, *by_time[: len(matrix.courses)]):
            place.axhline(matrix.task.target, color="#888888", linewidth=0.8, linestyle=":", zorder=1)
        for place in (*grid[0][2:], *by_time[len(matrix.courses) :]):
            place.axis("off")
        for place in (by_step, by_time[0]):
            place.set_ylabel(f"{what}, nats per byte")
        _legend(grid[0][2], looks)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _titled(axes: Axes, title: str, across: str, *, log: bool = False) -> None:
    axes.set_title(title)
    axes.set_xlabel(across)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())


def _line(axes: Axes, look: Look, points: Points) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), **look)


def _looks(plans: Sequence[str]) -> dict[str, Look]:
    """How each plan is drawn: its wire is its colour, its sync its line."""
    looks: dict[str, Look] = {}
    syncs, wires = list[str](), list[str]()
    for plan in plans:
        if plan == DDP:
            looks[plan] = {"color": "#c4c4c4", "linestyle": "-", "linewidth": 4.0, "label": "DDP on gloo"}
            continue
        sync, _, wire = plan.partition("+")
        for known, name in ((syncs, sync), (wires, wire)):
            if name not in known:
                known.append(name)
        colour, line = COLOURS[wires.index(wire) % len(COLOURS)], LINES[syncs.index(sync) % len(LINES)]
        looks[plan] = {"color": colour, "linestyle": line, "linewidth": 1.5, "label": plan}
    return looks


def _legend(axes: Axes, looks: dict[str, Look]) -> None:
    """Wires above, syncs below: what belongs to which."""
    wires = {plan.partition("+")[2]: look["color"] for plan, look in looks.items() if plan != DDP}
    syncs = {plan.partition("+")[0]: look["linestyle"] for plan, look in looks.items() if plan != DDP}
    upper = [Line2D([], [], color=colour, linewidth=3, label=wire) for wire, colour in wires.items()]
    lower = [Line2D([], [], color="#222222", linestyle=line, label=sync) for sync, line in syncs.items()]
    lower += [Line2D([], [], **look) for plan, look in looks.items() if plan == DDP]
    lower.append(Line2D([], [], color="#888888", linewidth=0.8, linestyle=":", label="the loss to be reached"))
    fixed: dict[str, Any] = {
        "frameon": False,
        "alignment": "left",
        "handlelength": 3.5,
        "labelspacing": 0.3,
        "fontsize": 8,
    }
    axes.add_artist(axes.legend(handles=upper, title="Wire", loc="upper left", **fixed))
    axes.legend(handles=lower, title="Sync", loc="lower left", **fixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=KEPT)
    parser.add_argument("--into", type=Path, default=Path("docs/_static"))
    options = parser.parse_args()
    if not options.file.exists():
        raise SystemExit(f"{options.file} is not there: `python benchmarks/sites.py --out {options.file}` makes it")
    matrix = Matrix.read(options.file)
    for losses, what, name in (
        (held_out, "held-out loss", "sites_held_out.svg"),
        (training, "training loss", "sites_training.svg"),
    ):
        drawn(matrix, losses, what, options.into / name)
        print(options.into / name)


if __name__ == "__main__":
    main()
