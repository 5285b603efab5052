"""`paceline migrate --check`: what becomes of a program's distributed calls, without running it."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "migrate",
        summary="list a program's distributed calls, and what becomes of each here",
        description="Read a program of torch, Horovod, Keras, TensorFlow, DeepSpeed or Accelerate, and the modules "
        "beside it that it imports. List each distributed call: it works, has a counterpart, or is refused and why; "
        "then the lines to change, and the command that starts it. Nothing is run.",
        examples="  paceline migrate --check train.py\n  paceline migrate --check train.py --json",
    )
    parser.add_argument("--check", action="store_true", help="list the calls; nothing is changed")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="the program")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list; returns 1 where a call is refused."""
    if not arguments.check:
        raise PlanError(
            f"paceline migrate changes no program: paceline migrate --check {arguments.script} says what to change."
        )
    from paceline.compat.migrate.check import check_program_calls
    from paceline.compat.migrate.report import report_json, report_text

    report = check_program_calls(arguments.script)
    print(report_json(report) if arguments.json else report_text(report))
    return 1 if report.num_refused else 0
