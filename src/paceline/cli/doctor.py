"""`paceline doctor`: measure the cluster that a run would have, say what is wrong, and write it as a cluster file."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from paceline import config
from paceline.cli import run as run_command
from paceline.cli.arguments import Commands, add_command
from paceline.errors import LaunchError, PlanError, writing
from paceline.plan import CommandPlan, Plan
from paceline.plan.job import NO_CLUSTER
from paceline.plan.script_scan import workers_of_script

__all__ = ["add", "run"]

PROGRAM = Path(__file__).parent.parent / "doctor" / "doctor.py"
CLUSTER_FILE = "cluster.toml"
BEGINS, ENDS = "# Measured by paceline doctor", "# end of the cluster file"  # on worker 0's console
EXAMPLES = """\
  paceline doctor --workers 2                              this machine, as two workers see it
  paceline doctor train.py --workers 2                     and whether the script's data comes fast enough
  paceline doctor --workers 16 --hosts 2 --head node1:29500 --token-file token
                                                           the same command on each of 2 hosts
  paceline doctor --on slurm --hosts 4 --workers 32 --out cluster.toml
  paceline plan train.py --cluster cluster.toml            what a step costs there

All workers measure at the same time, as they would train: matrix products by precision, attention, memory, all-reduces,
each pair of hosts once, the disk of the run's directory. Each test takes --seconds; the whole about ten times that.
With a script, each worker then runs it up to worker.batches() and reads its data as the call says; nothing trains."""


WITHOUT = ("cluster", "log", "remote_dir", "remote_wait_s", "run_as", "run_for", "servers", "restart_lost")


def add(commands: Commands) -> None:
    """Declare the command, which takes the options of `paceline run`."""
    parser = add_command(
        commands,
        "doctor",
        summary="measure a cluster, say what is wrong with it, and write it as a cluster file",
        description="Measure what workers can compute and move, on this machine or on any cluster that takes jobs; say "
        "what is slower than it should be, and what to do; and write a cluster file for paceline plan --cluster. With "
        "a script, also measure how fast its data is read, beside what its steps will take.",
        usage="paceline doctor [--out FILE] [--seconds S] [--name NAME] [options of paceline run] "
        "[SCRIPT.py [the script's arguments]]",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "script", metavar="SCRIPT.py", nargs="?", help="a script whose reading of data is measured, too"
    )
    parser.add_argument("--out", metavar="FILE", help="the cluster file (default: cluster.toml in the run's directory)")
    parser.add_argument("--seconds", metavar="S", default="0.5", help="of each test (default: 0.5)")
    parser.add_argument("--name", metavar="NAME", default="", help="of the cluster (default: the first host's name)")
    parser.add_argument("--plan", metavar="TEXT", help="the plan of the script's steps; wins over the script's own")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set one value of the script's plan (plan.batch.size=64), of the job (timeout_s=60) or of the engine "
        "(engine.partition=gpu); may be given many times",
    )
    parser.add_argument("--on", metavar="ENGINE", help="have an engine start it on its hosts, as for paceline run")
    run_command.add_job_options(parser, without=WITHOUT)
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
    own = ["--seconds", str(seconds), *(["--name", arguments.name] if arguments.name else [])]
    own += _about_script(arguments)
    if arguments.run_dir is None:
        arguments.run_dir = f"runs/doctor-{time.strftime('%Y%m%d-%H%M%S')}"
    arguments.program, arguments.plan = str(PROGRAM), None
    engine, _ = run_command.engine_of(arguments)
    if engine is not None and not engine.reads_ended:
        own.insert(0, "--tell")
    arguments.dry_run = arguments.detach = False
    arguments.script_args = tuple(own)
    arguments.tensorboard = arguments.tensorboard or "false"
    for name in WITHOUT:
        setattr(arguments, name, None)
    arguments.cluster = NO_CLUSTER  # there is no model to be predicted
    status = run_command.run(arguments)
    return status if status != 0 else _deliver(Path(arguments.run_dir), out)


def _about_script(arguments: argparse.Namespace) -> list[str]:
    """Return what the examination is told of the script, and leave what belongs to the job in `arguments`."""
    ours = [text for text in arguments.overrides if text.partition("=")[0].strip().partition(".")[0] == "plan"]
    arguments.overrides = [text for text in arguments.overrides if text not in ours]
    if arguments.script is None:
        if arguments.plan is not None or ours:
            what = "--plan" if arguments.plan is not None else f"--set {ours[0]}"
            raise PlanError(f"{what} is of a script's steps; name the script: paceline doctor train.py {what} ...")
        return []
    script = Path(arguments.script)
    if script.suffix != ".py" or not script.is_file():
        raise PlanError(f"{script} is no Python script that is here; name one, such as paceline doctor train.py.")
    if script.is_absolute() and script.is_relative_to(Path.cwd()):  # hosts may have our folder at another place
        script = script.relative_to(Path.cwd())
    whole = None if arguments.plan is None else Plan.parse(arguments.plan)
    plan = CommandPlan.of(whole, ours)
    if arguments.workers is None:
        own = plan.whole.layout.workers if plan.whole is not None else None
        own = own or workers_of_script(script, plan.settings, args=arguments.script_args, say=_say)
        arguments.workers = None if own is None else str(own)
    words = ["--script", str(script), "--plan", json.dumps(plan.to_table())]
    return [*words, "--", *arguments.script_args] if arguments.script_args else words


def _deliver(run_dir: Path, out: Path | None) -> int:
    """Bring the cluster file to where the user wants it, from the hosts if it has to be; return the exit status."""
    found = run_dir / CLUSTER_FILE
    if not found.is_file():
        _fetch(run_dir, found)
    if not found.is_file():
        print(f"cluster  {CLUSTER_FILE} is in the run's directory on worker 0's host, whose console has the findings")
        return 0
    if out is not None:
        with writing(out):
            shutil.copyfile(found, out)
        found = out
    print(f"cluster  {found}: paceline plan SCRIPT --cluster {found}")
    return 0


def _fetch(run_dir: Path, place: Path) -> None:
    """Get the file of a run whose directory is not on a disk that this machine sees: from the hosts, where the engine
    reaches those of an ended run, else from what worker 0 has printed.
    """
    from paceline.runs.submitted_run import SubmittedRun

    submitted = SubmittedRun.find(run_dir)
    if submitted is None:
        return
    if submitted.engine.reads_ended:
        try:
            submitted.fetch(CLUSTER_FILE, place)
        except LaunchError as error:
            _say(str(error))
        else:
            return
    text = told_file(_console(submitted))
    if text is not None:
        with writing(place):
            place.write_text(text, encoding="utf-8")


def _console(submitted: Any) -> str:
    console = submitted.engine.console(submitted.record)
    try:
        return "".join(iter(console.read, ""))
    finally:
        console.close()


def told_file(console: str) -> str | None:
    """Return the cluster file that stands in a console's text; None where it does not, or not whole."""
    begin = console.rfind(BEGINS)
    end = console.find(ENDS, begin)
    return None if begin < 0 or end < 0 else console[begin:end]


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
