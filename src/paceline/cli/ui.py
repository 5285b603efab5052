"""`paceline ui`: a live page over a folder of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline import config
from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError

__all__ = ["add", "run"]

RUNS = "runs"


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "ui",
        summary="show all runs of a folder in a browser, live",
        description="Serve a page with all runs of a folder, until Ctrl-C: an overview, a page for each run that "
        "follows it while it goes on, pools and sweeps, and runs compared. It listens on this machine only, unless "
        "--host says otherwise, and changes nothing, unless --control says so.",
        examples="  paceline ui\n  paceline ui /data/runs --port 8080\n"
        "  paceline ui --host 0.0.0.0        others need the token in the printed address\n"
        "  paceline ui --control             runs can be stopped, resized and cancelled from the page",
    )
    parser.add_argument(
        "runs", metavar="RUNS", nargs="?", type=Path, help="folder of run directories, or one of them (default: runs)"
    )
    parser.add_argument("--port", metavar="PORT", help="port; 0: any free one (default: 7700, or any if that is taken)")
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    parser.add_argument("--token", action="store_true", help="need the printed token on this machine, too")
    parser.add_argument(
        "--control", action="store_true", help="let the page stop, resize and cancel runs; needs the token"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve the page; returns its exit status."""
    port = None if arguments.port is None else config.parse_value(arguments.port, int, path="--port")
    if port is not None and not 0 <= port <= 65535:
        raise PlanError(f"--port is {port}; it must be from 0 (any free port) to 65535.")
    if arguments.runs is not None and not arguments.runs.exists():
        raise PlanError(f"{str(arguments.runs)!r} does not exist: name the folder of the run directories.")
    from paceline.ui.command import main_ui

    return main_ui(
        arguments.runs or Path(RUNS),
        host=arguments.host,
        port=port,
        can_control=arguments.control,
        with_token=arguments.token,
        opens=arguments.open,
    )
