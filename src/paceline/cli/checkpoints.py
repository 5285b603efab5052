"""`paceline checkpoints`: lists the checkpoints of a run, on its disk and in object storage."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError
from paceline.storage.address import check_address, plain_path

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "checkpoints",
        summary="list a run's checkpoints, on its disk and in object storage",
        description="List the checkpoints of a run: those on its disk, and those at its --remote-dir or at an address "
        "in object storage. For each its step, bytes and place, and why one is not complete. Exit status 1 where none "
        "is complete.",
        examples="  paceline checkpoints RUN\n  paceline checkpoints s3://bucket/runs/first --json",
    )
    parser.add_argument(
        "place", metavar="RUN|ADDRESS", type=Path, help="the run's directory, or its address (s3://bucket/path)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list; returns its exit status."""
    place: Path = arguments.place
    address = plain_path(place)
    from paceline.checkpoint.remote.listing import ListedCheckpoint, lines_of, listed_here, listed_remotely

    found: list[ListedCheckpoint] = []
    if address is None:
        if not place.is_dir():
            raise PlanError(f"There is no directory {place}. Name a run's, or an address such as s3://bucket/path.")
        found += listed_here(place / "checkpoints")
        address = _remote_dir(place)
    if address is not None:
        found += listed_remotely(check_address(address, option="paceline checkpoints"))
    if arguments.json:
        print(json.dumps([one.to_json() for one in found]))
    else:
        for line in lines_of(found):
            print(line)
    return 0 if any(one.problem is None for one in found) else 1


def _remote_dir(run_dir: Path) -> str | None:
    """Return the address that the run was started with last; None: none."""
    from paceline.monitor.records.run_record import RunRecord

    try:
        said = RunRecord.load(run_dir).job.get("remote_dir")
    except ValueError:
        return None
    return str(said) if said else None
