"""`paceline parity`: runs the same global batches under several plans and worker counts, and compares the numbers."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.arguments import Commands, add_command
from paceline.cli.parity.request import STEPS, parity_request

__all__ = ["add", "run"]

EXAMPLES = """\
  paceline parity train.py --workers 1,2,3,4
  paceline parity train.py --workers 2,4 --plan default --plan "cast(dtype=bf16)" --steps 5 --tolerance 1e-2
  paceline parity train.py --workers 1,2 --float64 -- --width 64
  paceline parity train.py --workers 1,2 --bare

Each configuration is compared with one process that runs the same plan. Without --plan that is the script's own; the
number of replicas is always what --workers makes.
How differences are measured, and what may differ: docs/reference/parity.md.
Exit status 0: all differences are within the tolerance; 1: not, or a run failed, or one of several plans was refused;
2: the command cannot work, or no plan can."""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "parity",
        summary="prove that the loss is the same on other numbers of workers and plans",
        description="Run the same global batches on several numbers of workers and under several plans, and print the "
        "largest relative differences against one process in loss, gradients, weights, buffers, optimizer state and "
        "reported values.",
        usage="paceline parity [options] SCRIPT.py [options] [the script's arguments] [-- more of them]",
        examples=EXAMPLES,
    )
    parser.add_argument("script", metavar="SCRIPT.py", type=Path, help="a Python script that calls paceline.run")
    parser.add_argument(
        "--workers", metavar="N,N,...", default="1,2", help="numbers of workers to compare (default: 1,2)"
    )
    parser.add_argument(
        "--plan",
        dest="plans",
        metavar="TEXT",
        action="append",
        default=[],
        help="a plan to compare; may be given many times (default: the script's own)",
    )
    parser.add_argument("--steps", metavar="N", default=str(STEPS), help=f"steps to run under each (default: {STEPS})")
    parser.add_argument(
        "--bare",
        action="store_true",
        help="compare one process also with a plain torch loop, which has none of Paceline's step code",
    )
    parser.add_argument(
        "--float64",
        action="store_true",
        help="compare in float64, where rounding is no excuse (default: the plan's precision)",
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        help="largest relative difference that passes (default: 1e-5, in float64 1e-9)",
    )
    parser.add_argument(
        "--device",
        metavar="WHERE",
        default="auto",
        help="auto, cpu, cuda or cuda-shared, as for `paceline run` (default: auto)",
    )
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep the runs and their captures in this directory")
    parser.add_argument(
        "--no-where",
        dest="where",
        action="store_false",
        help="do not run what differs again, to find the first module that departs",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print the table and the verdict; returns 1 where parity does not hold."""
    from paceline.cli.parity.run import main_parity

    return main_parity(parity_request(arguments))
