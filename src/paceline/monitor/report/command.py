"""`paceline report RUN`: prints the report of a run, as text or JSON, and writes its HTML page."""

from __future__ import annotations

import dataclasses
import json as json_text
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import writing
from paceline.monitor.records.run_files import local_path, replace_text
from paceline.monitor.report.goodput import USEFUL
from paceline.monitor.report.report import RunReport, cost_text, incident_text, read_report, report_text
from paceline.planner.run_receipt import RunPrediction, RunReceipt
from paceline.units import printable

__all__ = ["main_report", "report_facts"]


def main_report(run_dir: Path | str, *others: Path | str, json: bool = False, page: Path | None = None) -> int:
    """Print a run's report and write its page, where one is asked for; returns 0, or 2 where there is no run.

    `others`: copies of the run's directories on other hosts.
    """
    try:
        report = read_report(run_dir, *others)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    if page is not None:
        from paceline.monitor.report.html_page import (
            page_html,
        )  # takes a third of the start, and the live page asks often

        with writing(page):
            replace_text(page, page_html(report))
    if json:
        print(json_text.dumps(report_facts(report) | {"page": None if page is None else str(page)}, indent=1))
    else:
        print(printable(report_text(report)) + (f"\n\npage  {local_path(page)}" if page is not None else ""))
    return 0


def report_facts(report: RunReport) -> dict[str, Any]:
    """Return what `--json` prints: seconds, unrounded in meaning but to a millisecond."""
    ledger = report.ledger
    return {
        "run_dir": str(report.run_dir),
        "state": report.state,
        "began": round(ledger.began, 3),
        "duration_s": round(ledger.duration_s, 3),
        "goodput": round(ledger.goodput, 4),
        "first_step": report.first_step,
        "last_step": report.last_step,
        "first_loss": report.curves.first_loss,
        "last_loss": report.curves.last_loss,
        "useful": list(USEFUL),
        "wall_s": _rounded(ledger.wall_s),
        "worker_s": _rounded(ledger.worker_s),
        "workers": {worker: _rounded(accounts) for worker, accounts in ledger.workers.items()},
        "attempts": [
            {
                "attempt": book.attempt,
                "state": book.state,
                "began": round(book.began, 3),
                "duration_s": round(book.wall_s, 3),
                "first_step": book.first_step,
                "last_step": book.last_step,
                "workers": {worker: _rounded(accounts) for worker, accounts in book.workers.items()},
            }
            for book in ledger.attempts
        ],
        "incidents": [
            dataclasses.asdict(incident) | {"text": incident_text(incident), "cost": cost_text(incident)}
            for incident in ledger.incidents
        ],
        "elsewhere": list(ledger.elsewhere),
        "memory": {worker: dataclasses.asdict(held) for worker, held in report.held.items()},
        "snapshots": None if report.kept is None else dataclasses.asdict(report.kept),
        "prediction": _table(report.reported.prediction),
        "receipt": _table(report.reported.receipt),
        "receipt_rows": [
            {"name": row.name, "predicted": row.predicted, "measured": row.measured}
            for row in (report.reported.receipt.receipt.rows() if report.reported.receipt is not None else ())
        ],
        "receipt_missing": report.reported.why_none,
        "measures": [
            {name: getattr(one, name) for name in ("name", "is_evaluation", "num", "first", "last", "least", "most")}
            for one in report.measures
        ],
        "presence": [dataclasses.asdict(stay) for stay in report.stays],
        "timeline": {
            "stretch_s": ledger.timeline.stretch_s,
            "accounts": {
                name: [round(one, 3) for one in seconds] for name, seconds in ledger.timeline.accounts.items()
            },
        },
        "members": [[round(when, 3), count] for when, count in ledger.members],
    }


def _table(found: RunPrediction | RunReceipt | None) -> dict[str, Any] | None:
    return None if found is None else dataclasses.asdict(found)


def _rounded(accounts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in accounts.items()}
