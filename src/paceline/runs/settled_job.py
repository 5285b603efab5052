"""The job as it starts: with its number of workers and its run directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from paceline.plan import CommandPlan, Job
from paceline.plan.program_tasks import refuse_plan, settled_tasks
from paceline.plan.script_scan import workers_of_script
from paceline.runs.messages import tell
from paceline.runs.run_directory import new_run_dir

__all__ = ["settled_job"]


def settled_job(job: Job, plan: CommandPlan, *, script: Path | None) -> Job:
    """The job with its number of workers and its run directory filled in."""
    refuse_plan(job, plan)
    job = settled_tasks(job)
    workers = job.workers
    if workers is None and plan.whole is not None:
        workers = plan.whole.layout.workers
    if workers is None and script is not None and job.program:
        workers = workers_of_script(script, plan.settings, args=job.args, say=tell)
    settled = dataclasses.replace(job, workers=workers or job.hosts)
    if plan.whole is not None:
        plan.whole.require(workers=settled.workers)
    if settled.run_dir is None:
        settled = dataclasses.replace(settled, run_dir=str(new_run_dir(script)))
    return settled
