"""The door: `paceline.run(fn)` from a script or a notebook, and `start` for the command.

Whoever calls it, one of three things happens: this process is a worker already and becomes it; somebody else started a world (torchrun, srun, mpirun)
and this process joins it; or this process is the supervisor and starts the workers.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import config, environment
from paceline.attempt import Attempt, begin_record, error_of, watched_by_thread
from paceline.errors import PlanError
from paceline.launch.local import prestart
from paceline.plan import Job, Plan

if TYPE_CHECKING:
    from paceline.worker.worker import Worker
    from paceline.worlds import World

__all__ = ["run", "start"]

T = TypeVar("T")


def run(function: Callable[[Worker], T], *, plan: Plan | str | None = None, **job: Any) -> T:
    """Run `function(worker)` on every worker of a job and return worker 0's value.

    `plan` says what is computed; `job` are fields of `Job`: workers, run_dir, save_every, launcher, ... Inside a worker, and under torchrun, srun or
    mpirun, the call becomes that worker and returns its own value. Raises PlanError before anything starts, and what worker 0 (or whichever
    failed first) raised, as WorkerError.
    """
    fields = {name: value for name, value in job.items() if value is not None}
    if not callable(function):
        raise TypeError(f"paceline.run() needs a function of one argument, the worker, not a {type(function).__name__}")
    wanted = config.read(Job, fields)
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    own = environment.assignment()
    if own is not None:
        from paceline.worker.session import live  # inside a worker torch is there already

        return live(function, own, plan=chosen, fields=fields)
    world = environment.detect()
    if world is not None:
        return _join(world, function, wanted, chosen, fields)
    return _run_function(function, wanted, chosen, fields)


def start(
    job: Job,
    *,
    plan: Plan | None = None,
    overrides: Sequence[str] = (),
    given: Sequence[str] = (),
    command_started: float,
) -> int:
    """Run a script for the command; returns the exit status."""
    warm = prestart()
    try:
        settled = _settled(job, plan, overrides, script=Path(job.program))
        attempt = Attempt(settled, plan, overrides, given, command_started)
        outcome = attempt.run(warm)
    finally:
        warm.close()
    return outcome.exit_code


def _run_function(function: Callable[[Worker], T], job: Job, plan: Plan | None, fields: Mapping[str, Any]) -> T:
    """Be the supervisor of workers that run a function of this process."""
    started = time.time()
    with prestart() as warm:
        settled = _settled(job, plan, (), script=None)
        attempt = Attempt(settled, plan, (), (), started, function=(function, fields))
        outcome = attempt.run(warm)
    if outcome.state == "stopped":
        raise KeyboardInterrupt(outcome.reason)
    if outcome.state == "failed":
        raise error_of(attempt.failures)
    return attempt.value()


def _join(
    world: World, function: Callable[[Worker], T], job: Job, plan: Plan | None, fields: Mapping[str, Any]
) -> T:
    """Become a worker of a world that somebody else started; beside worker 0 a thread shows and records the run."""
    from paceline.worker.joined import joined, started_at
    from paceline.worker.session import live

    if job.workers not in (None, world.workers) and world.worker_rank == 0:
        print(f"paceline: workers={job.workers} is not used: {world.source} started {world.workers} workers", file=sys.stderr)

    def choose() -> tuple[Path, int]:
        settled = _settled(job, plan, (), script=Path(sys.argv[0]))
        directory = Path(str(settled.run_dir))
        return directory, begin_record(directory, settled, workers=world.workers, plan=plan).attempt

    with joined(world, job, run_dir=choose, command_started=started_at(), log=lambda text: print(text, file=sys.stderr)) as (own, store):
        environment.enter(own)
        with watched_by_thread(own, own.job) if own.rank == 0 else contextlib.nullcontext():
            return live(function, own, plan=plan, fields=fields, store=store)


def _settled(job: Job, plan: Plan | None, overrides: Sequence[str], *, script: Path | None) -> Job:
    """The job with its number of workers and its run directory filled in."""
    workers = job.workers
    if workers is None and plan is not None:
        workers = plan.layout.workers
    if workers is None and script is not None and job.program:
        workers = _workers_in_script(script)
    settled = dataclasses.replace(job, workers=workers or job.hosts)
    if plan is not None:
        resolved = config.apply(plan, *overrides) if overrides else plan
        resolved.require(workers=settled.workers)
    if settled.run_dir is None:
        settled = dataclasses.replace(settled, run_dir=str(_new_run_dir(script)))
    return settled


def _workers_in_script(script: Path) -> int | None:
    """The number in the script's own `paceline.run(..., workers=N)`, read without running it; None where it gives none."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):
        return None  # the worker that runs it tells the user, with the line
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("paceline.run", "run"):
            for keyword in node.keywords:
                if keyword.arg == "workers":
                    if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, int):
                        return keyword.value.value
                    raise PlanError(
                        f"{script} computes its number of workers ({ast.unparse(keyword)}): say it on the command line, --workers N."
                    )
    return None


def _new_run_dir(script: Path | None) -> Path:
    """A directory that is not there yet: runs/<program>-<date>-<time>."""
    name = f"{script.stem if script and script.stem else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path
