"""`paceline status`: how a run stands."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.arguments import Commands, add_command

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "status",
        summary="show how a run is doing: state, step, loss, workers",
        description="Show a run's state, step, loss and speed, and each worker's rank, host and process.",
        examples="  paceline status runs/train-20260101-120000\n  paceline status RUN --json",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the status; returns its exit status."""
    from paceline.monitor.status.status import main_status

    return main_status(arguments.run_dir, json=arguments.json)
