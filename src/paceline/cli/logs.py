"""`paceline logs`: prints what the workers of a run wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline import config
from paceline.cli.arguments import Commands, add_command

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "logs",
        summary="print what the workers of a run wrote",
        description="Print the standard output and standard error of a run's workers, of the newest attempt.",
        examples="  paceline logs RUN\n  paceline logs RUN --worker 2 --stream stderr --follow",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("--worker", metavar="K", help="only this worker's (default: all)")
    parser.add_argument("--stream", choices=("stdout", "stderr"), help="only this stream (default: both)")
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more until the run ends")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the logs; returns its exit status."""
    from paceline.monitor.status.logs import main_logs

    worker = None if arguments.worker is None else config.parse_value(arguments.worker, int, path="--worker")
    return main_logs(arguments.run_dir, worker=worker, stream=arguments.stream, follow=arguments.follow)
