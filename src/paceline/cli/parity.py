"""`paceline parity`: runs the same global batches under several plans and worker counts, and compares the numbers."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline import config
from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError
from paceline.plan import Plan

__all__ = ["add", "run"]

EXAMPLES = """\
  paceline parity train.py --workers 1,2,3,4
  paceline parity train.py --workers 2,4 --plan default --plan "cast(dtype=bf16)" --steps 5 --tolerance 1e-2
  paceline parity train.py --workers 1,2 --float64 -- --width 64

Exit status 0: all differences are within the tolerance; 1: not."""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "parity",
        summary="prove that the loss is the same on other numbers of workers and plans",
        description="Run the same global batches on several numbers of workers and under several plans, and print the "
        "largest relative difference in loss, gradients and weights against one process.",
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
        help="a plan to compare; may be given many times",
    )
    parser.add_argument("--steps", metavar="N", default="5", help="steps to run under each (default: 5)")
    parser.add_argument(
        "--float64", action="store_true", help="compare in float64, where rounding is no excuse (default: float32)"
    )
    parser.add_argument(
        "--tolerance", metavar="X", help="largest relative difference that passes (default: by precision and wire)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print the table and the verdict; returns 1 where parity does not hold."""
    script: Path = arguments.script
    if not script.is_file():
        raise PlanError(f"There is no file {script}. Name a Python script, for example: paceline parity train.py")
    counts: tuple[int, ...] = config.parse_value(arguments.workers, tuple[int, ...], path="--workers")
    steps: int = config.parse_value(arguments.steps, int, path="--steps")
    tolerance: float | None = (
        config.parse_value(arguments.tolerance, float, path="--tolerance") if arguments.tolerance else None
    )
    plans = tuple(Plan.parse(text) for text in arguments.plans)
    if not counts or min(counts) < 1 or steps < 1:
        raise PlanError(
            f"--workers {arguments.workers} and --steps {steps} must be at least 1 each, "
            "for example --workers 1,2,4 --steps 5."
        )
    if tolerance is not None and not tolerance > 0:
        raise PlanError(f"--tolerance is {tolerance}; it must be more than 0, for example 1e-5.")

    from paceline.cli.parity_run import main_parity

    return main_parity(script, arguments.script_args, counts, plans, steps, arguments.float64, tolerance)
