"""`paceline parity`: runs the same global batches under several plans and worker counts, and compares the numbers."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Literal

from paceline import config
from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError
from paceline.plan import Job, Plan

__all__ = ["Request", "add", "run"]

EXAMPLES = """\
  paceline parity train.py --workers 1,2,3,4
  paceline parity train.py --workers 2,4 --plan default --plan "cast(dtype=bf16)" --steps 5 --tolerance 1e-2
  paceline parity train.py --workers 1,2 --float64 -- --width 64

Each configuration is compared with one process that runs the same plan. Without --plan that is the script's own; the
number of replicas is always what --workers makes. How differences are measured, and what may differ: docs/parity.md.
Exit status 0: all differences are within the tolerance; 1: not, or a run failed, or one of several plans was refused;
2: the command cannot work, or no plan can."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to compare."""

    script: Path
    args: tuple[str, ...] = ()  # the script's own
    workers: tuple[int, ...] = (1, 2)
    plans: tuple[Plan, ...] = ()  # none: the script's own
    steps: int = 5
    float64: bool = False
    tolerance: float | None = None  # None: by precision
    device: Literal["auto", "cpu", "cuda"] = "auto"
    keep: Path | None = None  # directory for the runs; None: a temporary one
    json: bool = False


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
        help="a plan to compare; may be given many times (default: the script's own)",
    )
    parser.add_argument("--steps", metavar="N", default="5", help="steps to run under each (default: 5)")
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
        "--device", metavar="WHERE", default="auto", help="auto, cpu or cuda, as for `paceline run` (default: auto)"
    )
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep the runs and their captures in this directory")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print the table and the verdict; returns 1 where parity does not hold."""
    from paceline.cli.parity_run import main_parity

    return main_parity(request_of(arguments))


def request_of(arguments: argparse.Namespace) -> Request:
    """Read and check the options; PlanError where one cannot work."""
    script: Path = arguments.script
    if not script.is_file():
        raise PlanError(f"There is no file {script}. Name a Python script, for example: paceline parity train.py")
    counts: tuple[int, ...] = config.parse_value(arguments.workers, tuple[int, ...], path="--workers")
    steps: int = config.parse_value(arguments.steps, int, path="--steps")
    if not counts or min(counts) < 1 or steps < 1:
        raise PlanError(
            f"--workers {arguments.workers} and --steps {steps} must be at least 1 each, "
            "for example --workers 1,2,4 --steps 5."
        )
    tolerance = None if arguments.tolerance is None else _tolerance(arguments.tolerance)
    keep: Path | None = arguments.keep
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise PlanError(f"--keep {keep} is there already and not an empty directory. Name a new one.")
    return Request(
        script=script,
        args=arguments.script_args,
        workers=tuple(dict.fromkeys(counts)),
        plans=tuple(dict.fromkeys(Plan.parse(text) for text in arguments.plans)),
        steps=steps,
        float64=arguments.float64,
        tolerance=tolerance,
        device=config.parse_value(
            arguments.device, config.annotations_of(Job)["device"], path="--device", owner=Job, name="device"
        ),
        keep=keep,
        json=arguments.json,
    )


def _tolerance(text: str) -> float:
    value: float = config.parse_value(text, float, path="--tolerance")
    if not 0 < value < float("inf"):
        raise PlanError(f"--tolerance is {value}; it must be more than 0, for example 1e-5.")
    return value
