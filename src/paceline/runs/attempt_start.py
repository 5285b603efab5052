"""How an attempt of a run begins: who may use the run's directory, and what its record says first."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import environment, run_lock
from paceline.errors import PlanError
from paceline.events import RunStarted
from paceline.launch.coordinator.head_register import HeadRegister
from paceline.launch.fork.worker_locks import wait_until_workers_ended
from paceline.monitor.records.run_record import RUNNING, RunRecord
from paceline.plan import Job, Plan

__all__ = ["begin_record", "is_led", "next_attempt", "qualified_name", "run_started", "wait_for_orphans"]

ORPHANS_END_S = 10.0  # beyond their grace time: until a worker that did not leave in time is killed


def next_attempt(run_dir: Path) -> int:
    """Return the number of the next attempt in this directory; PlanError if the directory is in use."""
    try:
        return RunRecord.next_attempt(run_dir)
    except ValueError as error:
        raise PlanError(str(error)) from error
    except OSError as error:
        raise _unusable(run_dir, error) from error


def is_led(job: Job) -> bool:
    """Whether a coordinator of the job's run is at work, by the run's directory, so that this host joins it."""
    run_dir = Path(str(job.run_dir))
    return job.head is not None and HeadRegister(run_dir).read() is not None and run_lock.is_held(run_dir)


def wait_for_orphans(job: Job, *, say: Callable[[str], None], limit_s: float | None = None) -> None:
    """Return when workers of an earlier start have ended: they may be saving the state from which this start is to go
    on.

    Raise LaunchError after `limit_s` seconds (None: their time to save and to be ended).
    """
    run_dir = Path(str(job.run_dir))
    if is_led(job):
        return  # they belong to the run that this host joins
    grace_s, is_elsewhere = job.grace_s, True
    with contextlib.suppress(ValueError):  # the record is another host's, or damaged: that is reported where it is used
        record = RunRecord.load(run_dir)
        if record.is_alive():
            return  # the directory is in use, which is reported as well
        grace_s = float(record.job.get("grace_s", job.grace_s))
        is_elsewhere = record.state_now() == RUNNING  # this host may come back to it
    limit_s = grace_s + ORPHANS_END_S if limit_s is None else limit_s
    wait_until_workers_ended(
        run_dir, limit_s=limit_s, say=say, on_this_host=is_elsewhere, unless=functools.partial(is_led, job)
    )


def begin_record(run_dir: Path, job: Job, *, workers: int, plan: Plan | None, first: int = 1) -> RunRecord:
    """Record in the run directory that this process starts its next attempt; PlanError if the directory is in use."""
    try:
        return RunRecord.begin_attempt(
            run_dir,
            job=dataclasses.asdict(job),
            workers=workers,
            plan=None if plan is None else str(plan),
            first=first,
            parameters=environment.trial_parameters(),
            pool=environment.pool(),
        )
    except ValueError as error:
        raise PlanError(str(error)) from error
    except OSError as error:
        raise _unusable(run_dir, error) from error


def _unusable(run_dir: Path, error: OSError) -> PlanError:
    return PlanError(
        f"cannot use {run_dir} as the run's directory: {error.strerror}. Choose another with run_dir (--run-dir)."
    )


def run_started(job: Job, run_dir: Path, attempt: int, *, program: str, launcher: str) -> RunStarted:
    return RunStarted(
        run_dir=str(run_dir),
        attempt=attempt,
        workers=job.workers or 1,
        hosts=job.hosts,
        program=program,
        launcher=launcher,
    )


def qualified_name(function: Callable[..., Any]) -> str:
    """The function's qualified name, with its module where that is not the program itself."""
    inner = function.func if isinstance(function, functools.partial) else function
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    module = getattr(inner, "__module__", "__main__")
    return name if module in ("__main__", "__mp_main__", None) else f"{module}.{name}"
