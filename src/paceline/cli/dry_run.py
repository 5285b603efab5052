"""What `paceline run --dry-run` prints: the job, the plan as far as it is known, and what would be started."""

from __future__ import annotations

from pathlib import Path

from paceline import config
from paceline.plan import Job, Plan
from paceline.plan.script import workers_of_script

__all__ = ["show"]


def show(job: Job, *, plan: Plan | None, overrides: tuple[str, ...]) -> int:
    """Print it and return 0; raises PlanError where the plan cannot work on the job's workers."""
    print(f"job    {config.to_python(job)}")
    workers = job.workers
    if plan is None:
        print("plan   the script's own" + (f", with {', '.join(overrides)}" if overrides else ""))
        if workers is None:
            workers = workers_of_script(Path(job.program), overrides, args=job.args, say=print)
    else:
        plan = config.apply(plan, *overrides)
        workers = workers or plan.layout.workers or 1
        plan.require(workers=workers)
        plan = plan.resolve(workers)
        print(f"plan   {plan}")
        print(f"       {plan!r}")
    for line in _starts(job, workers):
        print(f"start  {line}")
    return 0


def _starts(job: Job, workers: int | None) -> list[str]:
    lines = [" ".join([job.program, *job.args])]
    if workers is None:
        lines.append("as many workers as the script asks for, or one on each host")
    elif job.hosts == 1:
        first = " (worker 0 in this process)" if job.launcher == "inline" else ""
        plural = "s" if workers > 1 else ""
        lines.append(f"{workers} worker{plural} on this host, forked from one process that has imported torch{first}")
    else:
        least, extra = divmod(workers, job.hosts)
        shares = f"{least}" if not extra else f"{least} or {least + 1}"
        lines.append(f"{workers} workers on {job.hosts} hosts that meet at {job.head}, {shares} on each")
    lines.append(
        f"run directory {job.run_dir or 'runs/<program>-<date>-<time>'}{', from the beginning' if job.fresh else ''}"
    )
    return lines
