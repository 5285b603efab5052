"""A run's report as one HTML page: plots, tables and styles in one file that needs no network.

Time axes leave out the time between attempts. Incidents have the same numbers in all plots and in their table.
"""

from __future__ import annotations

import dataclasses
import html
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from paceline.monitor.console.progress import number_text, rate_text
from paceline.monitor.report.goodput import ACCOUNTS, USEFUL, Incident
from paceline.monitor.report.html_measures import measure_cards
from paceline.monitor.report.html_style import SCRIPT, STYLE
from paceline.monitor.report.predicted import ReportedReceipt, steps_text
from paceline.monitor.report.report import RunReport, clock_text, cost_text, elsewhere_text, incident_text
from paceline.monitor.report.svg_plots import (
    PlotMark,
    areas_plot,
    bar,
    line_plot,
    number_ticks,
    paired_bars,
    steps_plot,
    time_ticks,
)
from paceline.planner.receipt import ReceiptRow
from paceline.planner.run_receipt import RunReceipt
from paceline.units import duration_text

__all__ = ["page_html"]

LOG_FROM = 12.0  # a loss that falls by more than this factor is drawn on a logarithmic axis
MOST_ROWS = 500  # of the tables of incidents and workers


def page_html(report: RunReport) -> str:
    """Return the whole page."""
    name = html.escape(report.run_dir.resolve().name)
    cards = "".join(
        f'<section class="card"><h2>{title}</h2><p class="about">{about}</p>{body}</section>'
        for title, about, body in _cards(report)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: Paceline report</title><style>{STYLE}</style></head><body><main>"
        f"{_header(report, name)}{_tiles(report)}{cards}"
        f"<footer>Written by <code>paceline report</code>, {_date(time.time())}.</footer></main>"
        f'<div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def _header(report: RunReport, name: str) -> str:
    job = report.record.job
    state = html.escape(report.state)
    program = " ".join([str(job.get("program", "")), *map(str, job.get("args", ()))]).strip()
    about = [html.escape(text) for text in (program, report.plan or "") if text]
    said = " &nbsp;·&nbsp; ".join([*about, f'<span class="date">started {_date(report.ledger.began)}</span>'])
    return f'<header><h1>{name}<span class="state {state}">{state}</span></h1><p>{said}</p></header>'


def _tiles(report: RunReport) -> str:
    ledger, curves = report.ledger, report.curves
    tiles = [
        ("good", f"{ledger.goodput:.1%}", "goodput: time in useful steps"),
        ("", duration_text(ledger.duration_s), f"in {_count(len(ledger.attempts), 'attempt')}"),
        ("", "-" if report.last_step is None else f"{report.last_step:,}", "steps"),
    ]
    if curves.last_loss is not None:
        first = "" if curves.first_loss is None else f", from {number_text(curves.first_loss)}"
        tiles.append(("", number_text(curves.last_loss), f"loss{first}"))
    if curves.speed_mean is not None:
        tiles.append(("", rate_text(curves.speed_mean), "samples/s while it trained"))
    bad = "bad" if any(incident.kind != "left" for incident in ledger.incidents) else ""
    num = len(ledger.incidents)
    tiles.append((bad, str(num), f"incident{'s' * (num != 1)}, {_count(ledger.num_lost, 'worker')} lost"))
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile {kind}"><b>{value}</b><span>{name}</span></div>' for kind, value, name in tiles)
        + "</div>"
    )


def _cards(report: RunReport) -> Iterator[tuple[str, str, str]]:
    ledger, curves = report.ledger, report.curves
    duration = sum(book.wall_s for book in ledger.attempts)
    x_ticks, x_range = time_ticks(duration), (0.0, duration or 1.0)
    marks = _time_marks(report)
    attempts = [ledger.elapsed(book.began) for book in ledger.attempts[1:]]
    yield (
        "Where the time went",
        "Every second of every worker's place is in exactly one account; goodput is the share of the green ones."
        + (f" {html.escape(elsewhere_text(ledger)).capitalize()}." if ledger.elsewhere else ""),
        bar(ledger.wall_s, height=30) + _accounts_table(report),
    )
    yield (
        "As the run went on",
        "What the workers' time was spent on, from left to right" + _marks_note(ledger.incidents, len(attempts)),
        areas_plot(ledger.timeline.accounts, stretch_s=ledger.timeline.stretch_s, x_ticks=x_ticks, marks=marks),
    )
    if curves.loss:
        first, last = curves.loss[0].x, curves.loss[-1].x
        yield (
            "Loss",
            f"of the whole global batch, over steps{_thinned_note(curves.num_losses, len(curves.loss))}"
            + (f"; {_count(curves.num_broken, 'step')} without a finite loss" if curves.num_broken else ""),
            line_plot(
                curves.loss,
                x_ticks=number_ticks(first, last),
                x_range=(first, last if last > first else first + 1),
                x_name=lambda step: f"step {step:,.0f}",
                y_name="loss",
                height=280,
                log=_is_log(report),
                marks=_step_marks(ledger.incidents),
            ),
        )
    yield from measure_cards(report.measures, _step_marks(ledger.incidents))
    if curves.speed:
        yield (
            "Samples per second",
            f"over time, commit to commit{_thinned_note(curves.num_losses, len(curves.speed))}",
            line_plot(
                curves.speed,
                x_ticks=x_ticks,
                x_range=x_range,
                x_name=duration_text,
                y_name="samples/s",
                from_zero=True,
                marks=marks,
                breaks=attempts,
                kind="speed",
            ),
        )
    yield from _receipt_card(report.reported)
    members = [(ledger.elapsed(when), count) for when, count in ledger.members]
    yield "Workers", "that took part, over time", steps_plot(members, x_ticks=x_ticks, x_range=x_range, marks=marks)
    if ledger.incidents:
        yield "Incidents", "What happened, and what it cost in workers' time", _incidents_table(report)
    yield (
        "Workers' time",
        "One bar for each worker's place; the colours are those above",
        _workers_table(ledger.workers),
    )
    if len(ledger.attempts) > 1:
        yield "Attempts", "Each start of the run in this directory", _attempts_table(report)


def _receipt_card(reported: ReportedReceipt) -> Iterator[tuple[str, str, str]]:
    """Predicted beside measured; where there is no receipt, why, and how to have one."""
    receipt = reported.receipt
    if receipt is None:
        yield "Receipt", html.escape(_sentence(reported.why_none.removeprefix("none: "))), ""
        return
    rows = "".join(_receipt_row(row, receipt) for row in receipt.receipt.rows())
    head = f'<th></th><th class="n">{receipt.left}</th>'
    if receipt.corrected_by:
        head += '<th class="n">corrected</th>'
    head += '<th class="n">measured</th><th class="n">difference</th><th></th>'
    remarks = "".join(f'<p class="after">{html.escape(_sentence(remark))}</p>' for remark in receipt.remarks())
    about = (
        f"What a step was predicted to take on {html.escape(receipt.cluster)}, and the median of {steps_text(reported)}"
        "; grey bars are the prediction, blue ones what was measured"
    )
    yield "Receipt", about, _table(head, rows) + remarks


def _receipt_row(row: ReceiptRow, receipt: RunReceipt) -> str:
    """One quantity, with a bar for its prediction and one for what was measured; those of seconds have one scale."""
    name = {"step": "the whole step", "memory": "memory of the fullest worker"}.get(row.name, row.name)
    corrected = {"step": receipt.predicted_s, "memory": receipt.predicted_bytes}.get(row.name)
    before = row if corrected is None else dataclasses.replace(row, predicted=corrected)
    cells = f'<td class="n">{row.texts[0] if row.predicted else "-"}</td>'
    if receipt.corrected_by:
        cells += f'<td class="n">{before.texts[0] if corrected is not None else ""}</td>'
    cells += f'<td class="n">{row.texts[1]}</td><td class="n">{before.texts[2]}</td>'
    longest = max(row.predicted, row.measured) if row.name == "memory" else _scale(receipt)
    total = ' class="total"' if row.name in ("step", "memory") else ""
    bars = paired_bars(row.predicted, row.measured, longest)
    return f'<tr{total}><td>{name}</td>{cells}<td class="wide">{bars}</td></tr>'


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _scale(receipt: RunReceipt) -> float:
    """The longest bar of a receipt's seconds."""
    return max(receipt.receipt.predicted_s, receipt.receipt.measured_s)


def _accounts_table(report: RunReport) -> str:
    ledger = report.ledger
    whole = ledger.duration_s or 1.0
    rows = "".join(
        f'<tr><td><span class="key {name}"></span>{name.replace("_", "-")}</td>'
        f'<td class="n">{duration_text(ledger.wall_s[name])}</td><td class="n">{ledger.wall_s[name] / whole:.1%}</td>'
        f'<td class="n">{duration_text(seconds)}</td><td class="soft">{text}</td></tr>'
        for name, text in ACCOUNTS.items()
        if (seconds := ledger.worker_s[name]) >= 0.0005
    )
    total = (
        f'<tr class="total"><td>total</td><td class="n">{duration_text(ledger.duration_s)}</td>'
        f'<td class="n">100%</td><td class="n">{duration_text(sum(ledger.worker_s.values()))}</td>'
        '<td class="soft"></td></tr>'
    )
    head = '<th>account</th><th class="n">wall time</th><th class="n">share</th><th class="n">all workers</th>'
    return _table(head + '<th class="soft">what it is</th>', rows + total)


def _incidents_table(report: RunReport) -> str:
    ledger = report.ledger
    rows = "".join(
        f'<tr><td><span class="number">{place}</span></td>'
        f'<td class="n">{clock_text(ledger.elapsed(incident.began))}</td>'
        f"<td>{html.escape(incident_text(incident))}</td>"
        f'<td class="wide" style="width:28%">{html.escape(cost_text(incident))}</td></tr>'
        for place, incident in enumerate(ledger.incidents[:MOST_ROWS], 1)
    )
    table = _table('<th></th><th class="n">at</th><th>what happened</th><th>cost</th>', rows)
    return table + _more_note(len(ledger.incidents))


def _workers_table(workers: Mapping[int, Mapping[str, float]]) -> str:
    longest = max((sum(accounts.values()) for accounts in workers.values()), default=1.0)
    rows = "".join(_worker_row(worker, accounts, longest) for worker, accounts in list(workers.items())[:MOST_ROWS])
    head = "<th>worker</th>" + "".join(f'<th class="n">{name}</th>' for name in ("useful", "data", "waiting", "idle"))
    return _table(head + "<th></th>", rows) + _more_note(len(workers))


def _worker_row(worker: int, accounts: Mapping[str, float], longest: float) -> str:
    useful = sum(accounts[name] for name in USEFUL) / (sum(accounts.values()) or 1.0)
    numbers = [f"{useful:.1%}", *(duration_text(accounts[name]) for name in ("data", "communication", "idle"))]
    cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
    return f'<tr><td>{worker}</td>{cells}<td class="wide">{bar(accounts, height=16, whole=longest)}</td></tr>'


def _attempts_table(report: RunReport) -> str:
    rows = "".join(
        f"<tr><td>{book.attempt}</td><td>{html.escape(book.state)}</td><td>{_date(book.began)}</td>"
        f'<td class="n">{duration_text(book.wall_s)}</td>'
        f'<td class="n">{"-" if book.first_step is None else f"{book.first_step:,} to {book.last_step:,}"}</td>'
        f'<td class="wide">{bar(_summed(book.workers.values()), height=16)}</td></tr>'
        for book in report.ledger.attempts
    )
    head = '<th>attempt</th><th>state</th><th>began</th><th class="n">took</th><th class="n">steps</th><th></th>'
    return _table(head, rows)


def _table(head: str, rows: str) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _time_marks(report: RunReport) -> list[PlotMark]:
    ledger = report.ledger
    marks = [
        PlotMark(x=ledger.elapsed(book.began), label=f"attempt {book.attempt}", text=_date(book.began), kind="attempt")
        for book in ledger.attempts[1:]
    ]
    marks += [
        PlotMark(x=ledger.elapsed(incident.began), label=str(place), text=incident_text(incident))
        for place, incident in enumerate(ledger.incidents, 1)
    ]
    return marks


def _step_marks(incidents: Sequence[Incident]) -> list[PlotMark]:
    return [
        PlotMark(x=incident.at_step or incident.step, label=str(place), text=incident_text(incident))
        for place, incident in enumerate(incidents, 1)
    ]


def _marks_note(incidents: Sequence[Incident], num_later_attempts: int) -> str:
    parts = ["red marks are incidents"] if incidents else []
    parts += ["the time between attempts is left out"] if num_later_attempts else []
    return "; " + ", ".join(parts) if parts else ""


def _thinned_note(num_steps: int, num_points: int) -> str:
    return "; the band is from the least to the most" if num_points < num_steps else ""


def _is_log(report: RunReport) -> bool:
    points = report.curves.loss
    least = min(point.least for point in points)
    return least > 0 and max(point.mean for point in points) / least > LOG_FROM


def _summed(workers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    places = list(workers)
    return {account: sum(accounts[account] for accounts in places) for account in ACCOUNTS}


def _more_note(number: int) -> str:
    more = number - MOST_ROWS
    return f'<p class="about">and {more:,} more: paceline report RUN --json has all</p>' if more > 0 else ""


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _date(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
