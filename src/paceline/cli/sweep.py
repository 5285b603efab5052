"""`paceline sweep`: trials of a study that Optuna proposes and prunes, run by a pool."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.arguments import Commands, add_command
from paceline.elastic.membership_messages import PREEMPTED
from paceline.errors import PlanError
from paceline.units import printable, shell_text

if TYPE_CHECKING:
    from paceline.sweep.study_file import StudyFile
    from paceline.sweep.sweep_record import SweepRecord

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "sweep",
        summary="search hyperparameters: Optuna proposes and prunes trials, a pool runs them",
        description="Run the trials of a study file: Optuna proposes parameters and prunes, and a pool runs each trial "
        "on the devices that are free. Ctrl-C ends the sweep; the second one does not wait for runs that save. The "
        "same command goes on with it, also after kill -9: no trial is lost, and none is run twice.",
        examples="  paceline sweep study.toml\n"
        "  paceline sweep study.toml --show\n"
        "  paceline sweep study.toml --cancel\n\n"
        "exit status: 0 all trials are over; 1 no trial finished, or the first ones have failed; 2 the study cannot "
        "work; 75 ended by SIGTERM, run it again; 130 interrupted",
    )
    parser.add_argument("study", metavar="STUDY.toml", type=Path, help="the study file")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="print the trials, and exit")
    what.add_argument("--json", action="store_true", help="the same as JSON for programs")
    what.add_argument(
        "--cancel",
        action="store_true",
        help="take the running trials out of the pool, and exit; the next start goes on with them",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    """Run the sweep, or show it, or take its trials out of the pool; returns the exit status."""
    from paceline.sweep.study_file import read_study_file

    study = read_study_file(arguments.study)
    if arguments.show or arguments.json:
        return _show(study, as_json=arguments.json)
    if arguments.cancel:
        return _cancel(study)
    from paceline.sweep.optuna_parts import require_optuna
    from paceline.sweep.sweep import FINISHED, Sweep
    from paceline.sweep.sweep_console import SweepConsole

    require_optuna()
    console = SweepConsole(sys.stdout)
    try:
        sweep = Sweep(study, say=console.say, show=console.show)
        console.say(f"{study.name} in {os.path.relpath(study.folder)}; Optuna's storage is {_without_password(study)}")
        record = sweep.run()
    finally:
        console.close()
    if record.state != FINISHED:
        _say_where_it_stands(study, record)
        return PREEMPTED if sweep.signal == signal.SIGTERM else 130
    return _tell_best(study, record)


def _show(study: StudyFile, *, as_json: bool) -> int:
    from paceline.sweep.sweep_console import sweep_table
    from paceline.sweep.sweep_record import SweepRecord

    record = SweepRecord.load(study.folder)
    if as_json:
        print(json.dumps({**record.table(), "is_alive": record.is_alive()}, indent=1))
        return 0
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 200)
    console.print(sweep_table(record))
    return 0


def _cancel(study: StudyFile) -> int:
    from paceline import run_lock
    from paceline.pool.withdrawal import take_out
    from paceline.sweep.sweep import own_runs

    if run_lock.is_held(study.folder):
        raise PlanError(f"The sweep in {study.folder} runs. End it first, by Ctrl-C; then cancel its trials.")
    runs = own_runs(study, study.pool)
    hosts = {run.run_dir: take_out(run, pool=study.pool) for run in runs}
    taken = ", ".join(Path(run.run_dir).name for run in runs) or "none"
    print(f"taken out of the pool: {taken}. Their files stay; the next start of the sweep goes on with them.")
    for run_dir, host in hosts.items():
        if host:
            there = shell_text("paceline", "stop", run_dir)
            print(
                f"{Path(run_dir).name} still runs: no pool is there to end it, and host {host} leads it. There: {there}"
            )
    return 0


def _say_where_it_stands(study: StudyFile, record: SweepRecord) -> None:
    names = [f"trial-{row.number:04}" for row in record.trials if row.state in ("running", "paused", "waiting")]
    again = shell_text("paceline", "sweep", os.path.relpath(study.path))
    if names and not study.has_own_pool:
        print(f"paceline: {', '.join(names)} stay in the pool {study.pool} and go on. {again} --cancel takes them out.")
    print(f"paceline: the sweep goes on with: {again}")


def _tell_best(study: StudyFile, record: SweepRecord) -> int:
    """Print the best trial; returns 1 where no trial has finished."""
    from paceline.checkpoint.checkpoint_dir import find
    from paceline.sweep.space import value_text
    from paceline.sweep.trial_run import command_anew

    if record.best is None:
        print("paceline: no trial has finished")
        return 1
    row = next(row for row in record.trials if row.number == record.best)
    values = "  ".join(f"{name} {value_text(value)}" for name, value in row.parameters.items())
    print(printable(f"best: trial {row.number} with {record.objective} {row.value:.6g}  ({values})"))
    run_dir = study.folder / row.run_dir
    found = find(run_dir / "checkpoints")
    if found.newest is not None:
        print(printable(f"  checkpoint: {os.path.relpath(found.newest)}"))
    print(printable(f"  run anew:   {command_anew(study, row.parameters)}"))
    print(printable(f"  all trials: {os.path.relpath(study.folder / 'trials.csv')}"))
    return 0


def _without_password(study: StudyFile) -> str:
    """The storage as the user may read it on a screen."""
    scheme, separator, rest = study.storage.partition("://")
    account, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{account.partition(':')[0]}{at}{place}" if at else study.storage
