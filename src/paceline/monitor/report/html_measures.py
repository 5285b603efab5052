"""The cards of evaluations and reported metrics on a run's page: a table of their numbers, and a plot of each."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from paceline.monitor.console.progress import number_text
from paceline.monitor.report.measures import Measure
from paceline.monitor.report.svg_plots import PlotMark, line_plot, number_ticks

__all__ = ["measure_cards"]

MOST_PLOTS = 24  # of a card; the table has all
HEIGHT = 150


def measure_cards(measures: Sequence[Measure], marks: Sequence[PlotMark]) -> Iterator[tuple[str, str, str]]:
    """Yield title, subtitle and body of each card; none where nothing was evaluated or reported."""
    for title, about, is_evaluation in (
        ("Evaluations", "by worker.evaluate, over steps; exact over all workers", True),
        ("Reported metrics", "by worker.report, over steps: means over the workers that reported them", False),
    ):
        found = [one for one in measures if one.is_evaluation == is_evaluation]
        if found:
            yield title, about, _table(found) + "".join(_plot(one, marks) for one in found[:MOST_PLOTS])


def _table(measures: Sequence[Measure]) -> str:
    heads = "".join(f'<th class="n">{name}</th>' for name in ("values", "first", "least", "most", "last"))
    rows = "".join(
        f'<tr><td>{html.escape(one.name)}</td><td class="n">{one.num:,}</td>'
        + "".join(f'<td class="n">{number_text(value)}</td>' for value in (one.first, one.least, one.most, one.last))
        + "</tr>"
        for one in measures
    )
    return f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _plot(measure: Measure, marks: Sequence[PlotMark]) -> str:
    if len(measure.points) < 2:  # the table has its number
        return ""
    first, last = measure.points[0].x, measure.points[-1].x
    plot = line_plot(
        measure.points,
        x_ticks=number_ticks(first, last),
        x_range=(first, last if last > first else first + 1),
        x_name=lambda step: f"step {step:,.0f}",
        y_name=measure.name,
        height=HEIGHT,
        marks=[mark for mark in marks if first <= mark.x <= last],
        kind="speed" if measure.is_evaluation else "loss",
    )
    return f'<p class="measure">{html.escape(measure.name)}</p>{plot}'
