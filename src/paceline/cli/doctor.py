"""`paceline doctor`: measure the cluster that a run would have, say what is wrong, and write it as a cluster file."""

from __future__ import annotations

import argparse
import re
import shutil
import time
from pathlib import Path

from paceline import config
from paceline.cli import run as run_command
from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError
from paceline.plan.job import NO_CLUSTER

__all__ = ["add", "run"]

PROGRAM = Path(__file__).parent.parent / "doctor" / "doctor.py"
CLUSTER_FILE = "cluster.toml"
EXAMPLES = """\
  paceline doctor --workers 2                              this machine, as two workers see it
  paceline doctor --workers 16 --hosts 2 --head node1:29500 --token-file token
                                                           the same command on each of 2 hosts
  paceline doctor --on slurm --hosts 4 --workers 32 --out cluster.toml
  paceline plan train.py --cluster cluster.toml            what a step costs there

All workers measure at the same time, as they would train: matrix products by precision, attention, memory, all-reduces,
each pair of hosts once, the disk of the run's directory. Each test takes --seconds; the whole about ten times that."""


def add(commands: Commands) -> None:
    """Declare the command, which takes the options of `paceline run`."""
    parser = add_command(
        commands,
        "doctor",
        summary="measure a cluster, say what is wrong with it, and write it as a cluster file",
        description="Measure what workers can compute and move, on this machine or on any cluster that takes jobs; say "
        "what is slower than it should be, and what to do; and write a cluster file for paceline plan --cluster.",
        usage="paceline doctor [--out FILE] [--seconds S] [--name NAME] [options of paceline run]",
        examples=EXAMPLES,
    )
    parser.add_argument("--out", metavar="FILE", help="the cluster file (default: cluster.toml in the run's directory)")
    parser.add_argument("--seconds", metavar="S", default="0.5", help="of each test (default: 0.5)")
    parser.add_argument("--name", metavar="NAME", default="", help="of the cluster (default: the first host's name)")
    parser.add_argument("--on", metavar="ENGINE", help="have an engine start it on its hosts, as for paceline run")
    run_command.add_job_options(parser, without=("cluster",))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start the examination as a run; returns its exit status."""
    seconds = config.parse_value(arguments.seconds, float, path="--seconds")
    if not 0.01 <= seconds <= 600:
        raise PlanError(f"--seconds is {arguments.seconds}; give 0.01 to 600 seconds for each test.")
    if arguments.name and not re.fullmatch(r"[\w.-]+", arguments.name):
        raise PlanError(f"--name is {arguments.name!r}; use letters, digits, '-', '_' and '.'.")
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and (out.suffix != ".toml" or not out.parent.is_dir()):
        raise PlanError(f"--out is {out}; name a file that ends in .toml, in a folder that is there.")
    if arguments.run_dir is None:
        arguments.run_dir = f"runs/doctor-{time.strftime('%Y%m%d-%H%M%S')}"
    arguments.program, arguments.plan, arguments.overrides = str(PROGRAM), None, []
    arguments.dry_run = arguments.detach = False
    arguments.script_args = ("--seconds", str(seconds), *(("--name", arguments.name) if arguments.name else ()))
    arguments.tensorboard = arguments.tensorboard or "false"
    arguments.cluster = NO_CLUSTER  # there is no model to be predicted
    status = run_command.run(arguments)
    found = Path(arguments.run_dir) / CLUSTER_FILE
    if status != 0:
        return status
    if out is not None and found.is_file():
        shutil.copyfile(found, out)
        found = out
    if found.is_file():
        print(f"cluster  {found}: paceline plan SCRIPT --cluster {found}")
    else:
        print(f"cluster  {CLUSTER_FILE} is in the run's directory on worker 0's host, whose console has the findings")
    return status
