"""`paceline report`: where a run's time went, as a table and as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.arguments import Commands, add_command

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "report",
        summary="show where a run's time went, and what each incident cost",
        description="Book every second of a run: useful steps, waiting, saves, incidents, idle time. Print the table, "
        "and write a page with plots of loss, speed, workers and time that needs nothing but a browser.",
        examples="  paceline report RUN\n  paceline report RUN --html run.html\n"
        "  paceline report RUN --json --no-html\n\n"
        "exit status: 0 printed; 1 the page cannot be written; 2 there is no such run",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--html", metavar="PATH", type=Path, help="where to write the page (default: RUN/report.html)")
    page.add_argument("--no-html", action="store_true", help="write no page")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report and write the page; returns the exit status."""
    from paceline.monitor.report.command import main_report

    page: Path | None = None if arguments.no_html else arguments.html or arguments.run_dir / "report.html"
    return main_report(arguments.run_dir, json=arguments.json, page=page)
