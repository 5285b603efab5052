"""`paceline audit`: proves from a run's ledger that every sample was used exactly once, or lists what was not."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.arguments import Commands, add_command

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "audit",
        summary="prove that every sample of each epoch was used exactly once",
        description="Prove from a run's ledger that every sample of each finished epoch was used exactly once, "
        "or list what was not.",
        examples="  paceline audit RUN\n\nExit status 0: proved, or no epoch is finished yet; "
        "1: samples are missing or were used twice.",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Audit the run; returns its exit status."""
    from paceline.monitor.audit.audit import main_audit

    return main_audit(arguments.run_dir, json=arguments.json)
