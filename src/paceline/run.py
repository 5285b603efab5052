"""The door: `paceline.run(fn)` from a script or a notebook, and `start` for the command.

Whoever calls it, one of three things happens: this process is a worker already and becomes it; somebody else started a
world (torchrun, srun, mpirun) and this process joins it; or this process is the supervisor and starts the workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import paceline
from paceline import config, environment
from paceline.elastic.membership_messages import TOO_FEW
from paceline.errors import PlanError, WorkerError, WorkersLostError
from paceline.launch.local import prestart
from paceline.plan import Job, Plan
from paceline.plan.script_scan import workers_of_script
from paceline.runs.attempt import Attempt, begin_record, error_from_failures, qualified_name, wait_for_orphans
from paceline.runs.monitor_thread import monitoring_thread, note_end, note_failure, note_left, reporting_thread
from paceline.runs.restart_loop import run_with_restarts

if TYPE_CHECKING:
    from paceline.plan.job import Assignment
    from paceline.worker.external_launch import JoinedWorld
    from paceline.worker.membership.preemption import PreemptionNotice
    from paceline.worker.worker import Worker
    from paceline.world_detection import World

__all__ = ["run", "start"]

T = TypeVar("T")


def run(function: Callable[[Worker], T], *, plan: Plan | str | None = None, **job: Any) -> T:
    """Run `function(worker)` on every worker of a job and return worker 0's value; of an elastic run, the value of the
    first of those who are there at its end.

    `plan` says what is computed; `job` are fields of `Job`: workers, run_dir, save_every, launcher, ... Inside a
    worker, and under torchrun, srun or mpirun, the call becomes that worker: it returns its own value, and exits where
    a peer has failed. On the other hosts of a job with several it returns None. Raises PlanError before anything
    starts, and what worker 0 (or whichever failed first) raised, as WorkerError; where workers were only taken away,
    a script gets a WorkersLostError, with which it ends with 76 unless it catches it.
    """
    fields = {name: value for name, value in job.items() if value is not None}
    if not callable(function):
        raise TypeError(f"paceline.run() needs a function of one argument, the worker, not a {type(function).__name__}")
    if not isinstance(plan, (Plan, str, type(None))):
        raise TypeError(f"paceline.run(plan={plan!r}): give a Plan, or its text")
    wanted = config.read(Job, fields)
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    own = environment.assignment()
    if own is not None:
        from paceline.worker.session import has_run, run_worker  # inside a worker torch is there already

        if has_run(own):
            raise PlanError(
                "The script calls paceline.run() a second time, but one run has one directory, one count of steps and "
                "one set of checkpoints. Start it with `python`, where each call is a run, or make it two scripts."
            )
        return run_worker(function, own, plan=chosen, fields=fields)
    world = environment.detect()
    if world is not None and not _is_for_each_host(world, wanted):
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
    world = environment.detect()
    if world is not None and world.workers > 1 and not _is_for_each_host(world, job):
        raise PlanError(
            f"{world.source} started this command {world.workers} times, and each would start workers of its own. Have "
            f"it start the script itself (... python {job.program}), or this command once on each host, with "
            f"--hosts {world.workers} and --head. To have {world.source} ignored, set PACELINE_WORLD=none."
        )
    # Where the import of this module has put the module: the program of a worker 0 in this process needs the function.
    paceline.run = run
    warm = prestart()
    try:
        settled = _settled(job, plan, overrides, script=Path(job.program))
        wait_for_orphans(settled, say=_tell)
        attempt = Attempt(
            settled,
            plan=plan,
            overrides=overrides,
            given=given,
            command_started=command_started,
            follow=job.run_dir is None,
        )
        _, outcome = run_with_restarts(attempt, warm)
    finally:
        warm.close()
    return outcome.exit_code


def _run_function(function: Callable[[Worker], T], job: Job, plan: Plan | None, fields: Mapping[str, Any]) -> T:
    """Be the supervisor of workers that run a function of this process."""
    started = time.time()
    with prestart() as warm:
        settled = _settled(job, plan, (), script=_own_script())
        wait_for_orphans(settled, say=_tell)
        attempt = Attempt(
            settled, plan=plan, command_started=started, follow=job.run_dir is None, function=(function, fields)
        )
        try:
            attempt, outcome = run_with_restarts(attempt, warm)
        finally:
            if job.launcher == "inline":
                environment.leave()  # this process was worker 0, and is no longer
    if outcome.state == "stopped":
        if outcome.exit_code == 128 + signal.SIGINT and _own_script() is None:
            raise KeyboardInterrupt(outcome.reason)
        raise SystemExit(outcome.exit_code)
    if outcome.state == "failed":
        error = error_from_failures(attempt.failures)
        if outcome.exit_code == TOO_FEW and isinstance(error, WorkerError) and _own_script() is not None:
            _tell(str(error))
            raise WorkersLostError.like(error, code=TOO_FEW)
        raise error
    return attempt.value(outcome)


def _join(world: World, function: Callable[[Worker], T], job: Job, plan: Plan | None, fields: Mapping[str, Any]) -> T:
    """Become a worker of a world that somebody else started; a thread beside worker 0 shows and records the run."""
    from paceline.worker.external_launch import await_records_closed, join_external_world, started_at
    from paceline.worker.membership.consensus import CleanExit

    if job.workers not in (None, world.workers) and world.worker_rank == 0:
        _tell(f"workers={job.workers} is not used: {world.source} started {world.workers} workers")

    def choose() -> tuple[Path, int]:
        settled = _settled(dataclasses.replace(job, workers=world.workers), plan, (), script=_own_script())
        directory = Path(str(settled.run_dir))
        return directory, begin_record(directory, settled, workers=world.workers, plan=plan).attempt

    with join_external_world(world, job, run_dir=choose, command_started=started_at(), log=_tell) as place:
        own = place.assignment
        watched: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if own.rank == 0:
            watched = monitoring_thread(
                own,
                own.job,
                hosts=place.hosts,
                store=place.store,
                program=qualified_name(function),
                launcher=world.source,
            )
        elif own.rank in {ranks[0] for ranks in place.hosts}:
            watched = reporting_thread(own, hosts=place.hosts, store=place.store)
        environment.enter(own)
        try:
            with _listening_for_preemption(own, world) as notice, watched:
                return _run_as_worker(function, place, plan=plan, fields=fields, notice=notice)
        except CleanExit:
            await_records_closed(place.store, own)  # an engine ends everybody when the first one's exit status is not 0
            raise
        finally:
            environment.leave()


def _run_as_worker(
    function: Callable[[Worker], T],
    place: JoinedWorld,
    *,
    plan: Plan | None,
    fields: Mapping[str, Any],
    notice: PreemptionNotice,
) -> T:
    """Be the worker, and note at once how it ended: what comes after may be cut short."""
    from paceline.worker.membership.consensus import CleanExit
    from paceline.worker.membership.preemption import TerminatedBySignal
    from paceline.worker.record.error_report import is_peer_failure
    from paceline.worker.session import run_worker

    own = place.assignment
    try:
        return run_worker(function, own, plan=plan, fields=fields, store=place.store, notice=notice)
    except CleanExit as leaving:
        note_left(own, int(str(leaving.code)))
        raise
    except TerminatedBySignal as stop:
        note_end(own, "stopped", int(str(stop.code)))
        raise
    except Exception as error:
        note_failure(own)
        if is_peer_failure(error):
            _tell(f"worker {own.rank} (host {own.host}) ended because a peer went away")
            raise SystemExit(1) from None
        raise
    finally:
        notice.hold()


def _listening_for_preemption(own: Assignment, world: World) -> PreemptionNotice:
    """What hears that this worker is asked to leave."""
    from paceline.worker.membership.preemption import PreemptionNotice

    def noticed(ends_at_once: bool) -> None:
        if own.rank == 0 and (ends_at_once or world.kills_soon):
            note_end(own, "stopped", 128 + signal.SIGTERM)

    return PreemptionNotice(grace_s=own.job.grace_s, more=environment.notice_signals(), on_notice=noticed)


def _is_for_each_host(world: World, job: Job) -> bool:
    """Whether the world was only started to have this job's command once on each of its hosts."""
    return job.hosts > 1 and (world.workers, world.local_workers) == (job.hosts, 1)


def _own_script() -> Path | None:
    """The script that this process runs; None in a notebook or an interpreter, or where it is read from a pipe."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    is_script = path is not None and path != "<stdin>" and "ipykernel" not in Path(path).parts
    return Path(path) if is_script and path is not None else None


def _tell(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _settled(job: Job, plan: Plan | None, overrides: Sequence[str], *, script: Path | None) -> Job:
    """The job with its number of workers and its run directory filled in."""
    workers = job.workers
    if workers is None and plan is not None:
        workers = plan.layout.workers
    if workers is None and script is not None and job.program:
        workers = workers_of_script(script, overrides, args=job.args, say=_tell)
    settled = dataclasses.replace(job, workers=workers or job.hosts)
    if plan is not None:
        resolved = config.apply(plan, *overrides) if overrides else plan
        resolved.require(workers=settled.workers)
    if settled.run_dir is None:
        settled = dataclasses.replace(settled, run_dir=str(_new_run_dir(script)))
    return settled


def _new_run_dir(script: Path | None) -> Path:
    """A directory that is not there yet: runs/<program>-<date>-<time>."""
    name = f"{script.stem if script and script.stem else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path
