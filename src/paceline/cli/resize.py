"""`paceline resize`: changes the number of replicas of a run while it goes on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.cli.arguments import Commands, add_command

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "resize",
        summary="give a run more or fewer replicas while it goes on",
        description=(
            "Give an elastic run, Layout(replicas=(least, most)), another number of replicas. New ones join, and "
            "others leave, between two steps; the batch, and so the training, stays the same."
        ),
        examples="  paceline resize RUN 6",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("replicas", metavar="REPLICAS", type=int, help="how many it should have")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask the run's supervisor; returns 0 when it has agreed, 1 when it refuses, 2 where there is no such run."""
    from paceline.launch.coordinator.control_socket import send_command
    from paceline.monitor.records.run_files import local_path
    from paceline.monitor.records.run_record import RUNNING, RunRecord

    try:
        record = RunRecord.load(arguments.run_dir)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    name = local_path(record.run_dir)
    if record.state == RUNNING and not record.is_here():
        print(f"paceline: {name} runs on host {record.host}: use `paceline resize` there", file=sys.stderr)
        return 2
    if not record.is_alive():
        print(f"paceline: {name} does not run: it is {record.state_now()}", file=sys.stderr)
        return 2
    try:
        answer = send_command(record.pid, {"op": "resize", "replicas": arguments.replicas})
    except ConnectionError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    if "error" in answer:
        print(f"paceline: {answer['error']}", file=sys.stderr)
        return 1
    print(f"{name}: {answer['says']}")
    return 0
