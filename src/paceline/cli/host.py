"""`paceline host`: what a driver starts on each host; people do not."""

from __future__ import annotations

import argparse

from paceline.cli.arguments import Commands, Parser

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command; it is not in the help."""
    parser: Parser = commands.add_parser("host", allow_abbrev=False)
    parser.set_defaults(run=_host)


def _host(arguments: argparse.Namespace) -> int:
    """Be one host of a driver's job; returns the exit status of its run."""
    from paceline.runs.host_process import run_host

    return run_host()
