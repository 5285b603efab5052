"""Gives a job to an engine, and follows it: `paceline run --on slurm`, `paceline.run(fn, on="slurm")`."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline import clock, environment
from paceline.errors import PlanError
from paceline.launch.engines.catalog import read_engine, refusals, settings_of
from paceline.launch.engines.engine import Engine
from paceline.launch.engines.engine_record import EngineRecord
from paceline.launch.engines.sent_function import SentFunction
from paceline.launch.engines.submission import Submission
from paceline.plan import CommandPlan, Job
from paceline.plan.layout import Layout
from paceline.plan.program_tasks import asked_workers, settled_tasks
from paceline.plan.script_scan import layout_of_script, workers_of_script
from paceline.runs.run_directory import new_run_dir
from paceline.units import shell_text

__all__ = ["prepare", "record_of", "settled", "show", "submit", "token_of"]


def prepare(
    engine: Engine,
    job: Job,
    *,
    plan: CommandPlan,
    given: Sequence[str],
    detach: bool = False,
    function: SentFunction | None = None,
) -> Submission:
    """Return what is to be sent: `function`, or the job's script. `job` has its workers and its run directory. Raises
    PlanError, with every reason, where the engine cannot run it."""
    if plan.whole is not None:
        plan.whole.require(workers=job.workers)
        layout = plan.whole.layout
    elif function is not None or job.run_for is not None:
        layout = Layout()
    else:
        layout = layout_of_script(Path(job.program), plan.settings) or Layout()
    if job.workers is None or job.workers < job.hosts:
        raise PlanError(f"{job.workers} workers cannot fill {job.hosts} hosts: use --workers {job.hosts} or more.")
    folder = Path.cwd()
    submission = Submission(
        job=dataclasses.replace(job, program=_absolute(folder, job.program), run_dir=_absolute(folder, job.run_dir)),
        plan=plan,
        given=tuple(given),
        folder=folder,
        python=sys.executable,
        least_hosts=job.hosts if engine.begins_with_all else _least_hosts(layout, workers=job.workers, hosts=job.hosts),
        workers_each=layout.workers_each,
        function=function,
    )
    found = [str(refusal) for refusal in refusals(engine, submission, detach=detach)]
    if found:
        raise PlanError("\n".join([f"{engine.title} cannot run this job:", *found]) if len(found) > 1 else found[0])
    return submission


def settled(engine: Engine, job: Job, plan: CommandPlan, *, script: Path | None) -> Job:
    """Return a job for an engine with its workers and its run directory, as far as they can be known here."""
    if job.run_for is not None:
        places = getattr(engine, "workers", None)  # of all hosts, where each is told its number
        if job.workers is None and places is not None:
            job = dataclasses.replace(job, workers=asked_workers(places, job.servers))
        return dataclasses.replace(settled_tasks(job), run_dir=job.run_dir or str(new_run_dir(script)))
    workers = job.workers or getattr(engine, "workers", None)  # some engines are told the workers of each host
    if workers is None and plan.whole is not None:
        workers = plan.whole.layout.workers
    if workers is None and script is not None:
        workers = workers_of_script(script, plan.settings, args=job.args, say=lambda text: print(f"paceline: {text}"))
    return dataclasses.replace(job, workers=workers or job.hosts, run_dir=job.run_dir or str(new_run_dir(script)))


def show(engine: Engine, submission: Submission) -> str:
    """Return what would be sent, as a user could send it by hand."""
    return "\n".join(f"--- {document.name}\n{document.text.rstrip()}\n" for document in engine.render(submission))


def submit(engine: Engine, submission: Submission, *, say: Callable[[str], None], detach: bool = False) -> int:
    """Send it, and follow the run to its end unless `detach`; return its exit status. Raises LaunchError where the
    engine does not take it."""
    before = EngineRecord.load(submission.run_dir)
    if before is not None:
        other = read_engine(before.engine)
        state = other.state(before)
        if state.phase != "ended":
            name = shell_text(os.path.relpath(submission.run_dir))
            raise PlanError(
                f"{name} is in use: {state.says}. Stop it first (paceline stop {name}), or use another --run-dir."
            )
    record, token = record_of(engine, submission), token_of(submission.job)
    try:
        return engine.start(submission, record, token=token, say=say, detach=detach)
    except KeyboardInterrupt:
        if not engine.may_detach:
            raise
        name = shell_text(os.path.relpath(submission.run_dir))
        say(
            f"no longer followed: the run goes on. See it with `paceline status {name}` or `paceline logs -f {name}`, "
            f"and end it with `paceline stop {name}`"
        )
        return 130


def token_of(job: Job) -> str:
    """Return the token that the job was given, or a new one."""
    return environment.token(job).decode() if environment.has_token(job) else secrets.token_hex(32)


def record_of(engine: Engine, submission: Submission) -> EngineRecord:
    """Return a new record of a run; it is not written yet."""
    return EngineRecord(
        run_dir=submission.run_dir,
        engine=settings_of(engine),
        run_dir_there=str(submission.run_dir),
        folder=str(submission.folder),
        python=str(getattr(engine, "python", None) or submission.python),
        hosts=submission.job.hosts,
        workers=submission.job.workers or 1,
        slots=submission.slots,
        workers_each=submission.workers_each,
        least_hosts=submission.least_hosts,
        grace_s=submission.job.grace_s,
        submitted=clock.now(),
    )


def _least_hosts(layout: Layout, *, workers: int, hosts: int) -> int:
    """With how many hosts the run can begin; all, unless its plan lets replicas come and go."""
    slots, extra = divmod(workers, hosts)
    replicas = layout.replicas
    if not isinstance(replicas, tuple) or extra or slots % layout.workers_each:
        return hosts
    return max(1, min(hosts, math.ceil(replicas[0] * layout.workers_each / slots)))


def _absolute(folder: Path, path: str | None) -> str:
    return os.path.normpath(folder / str(path))
