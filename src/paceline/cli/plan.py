"""`paceline plan`: shows what a plan means on so many workers, and every rule that it breaks."""

from __future__ import annotations

import argparse
import sys

from paceline import config
from paceline.cli.arguments import Commands, add_command
from paceline.plan import Batch, Plan
from paceline.schedule.share import deal

__all__ = ["add", "run"]

EXAMPLES = """\
  paceline plan                                            the plan of defaults
  paceline plan "replicas=4+cast(dtype=bf16)"
  paceline plan "batch(size=64,micro=4)" --workers 3 --set plan.compute.precision=bf16

The text is parts joined by "+", defaults left out:
  replicas=N                                               as many copies of the model (default: one for each worker)
  allreduce(bucket_bytes=N)                                how they agree
  raw | cast(dtype=bf16) | cast(dtype=fp16)                what travels between them
  batch(size=N,micro=N,shuffle=true,drop_last=false,seed=N)  the global batch, and the micro-batches it is cut into
  compute(precision=fp32|bf16|fp64,recompute=none|blocks,compile=false)
Exit status 2: the plan breaks a rule."""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "plan",
        summary="show what a plan means, and which rules it breaks",
        description="Show what a plan means on so many workers, as text and as Python, and every rule that it breaks.",
        examples=EXAMPLES,
    )
    parser.add_argument("text", metavar="TEXT", nargs="?", default="default", help="the plan, as one line of text")
    parser.add_argument("--workers", metavar="N", help="workers of the job (default: the plan's replicas, or 1)")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set one value, for example plan.batch.size=64",
    )
    parser.add_argument("--check", action="store_true", help="say only what is wrong")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and its broken rules; returns 2 when there are any."""
    plan = config.apply(Plan.parse(arguments.text), *arguments.overrides)
    workers = _workers(arguments.workers) or plan.layout.workers or 1
    broken = plan.check(workers=workers)
    if not arguments.check:
        resolved = plan.resolve(workers)
        print(f"plan     {resolved}")
        print(f"python   {resolved!r}")
        print(f"workers  {workers}")
        print(f"batch    {_batch_text(resolved.batch, workers)}")
    for rule in broken:
        print(f"paceline: {rule.says} {rule.fix}", file=sys.stderr)
    return 2 if broken else 0


def _workers(text: str | None) -> int | None:
    if text is None:
        return None
    workers = config.parse_value(text, int, path="--workers")
    if workers < 1:
        raise config.PlanError(f"--workers is {workers}; it must be at least 1.")
    return workers


def _batch_text(batch: Batch, workers: int) -> str:
    shares = sorted({len(share) for share in deal(batch.num_micro, workers)})
    return (
        f"{batch.size} samples a step, {batch.num_micro} micro-batches of {batch.resolved_micro}"
        f"{'' if batch.size % batch.resolved_micro == 0 else f' (the last of {batch.size % batch.resolved_micro})'}; "
        f"each worker runs {' or '.join(map(str, shares))}"
    )
