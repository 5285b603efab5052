"""`paceline stop`: ends a run cleanly."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.arguments import Commands, add_command

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "stop",
        summary="stop a run",
        description="Have a run on this host finish the step in hand, save, and end; wait until it has.",
        examples="  paceline stop RUN",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Stop the run; returns its exit status."""
    from paceline.monitor.status.stop import main_stop

    return main_stop(arguments.run_dir)
