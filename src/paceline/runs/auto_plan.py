"""`plan="auto"`: the plan is chosen before the run begins, by the planner and by short runs on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import PlanError
from paceline.plan import Job, Plan

__all__ = ["TRIED", "choose_plan"]

LIMIT_S = 3600.0
CHOOSER = "paceline.cli.plan_costs.choose"
TRIED = "paceline tried "  # how its lines about plans begin


def choose_plan(
    script: Path | None,
    job: Job,
    *,
    base: Plan | None = None,
    overrides: Sequence[str] = (),
    args: Sequence[str],
    say: Callable[[str], None],
) -> Plan:
    """Return the fastest plan for this job's workers, with the batch and precision of `base` (None: of the script's own
    plan), which `overrides` ("plan.batch.size=64") change.

    A process of its own looks at the script, measures this machine, and runs the best plans for some steps. Raises
    PlanError where that cannot be: several hosts, no script that can be run again, no number of workers.
    """
    if job.hosts > 1:
        raise PlanError(
            f"plan='auto' runs plans on this machine, and the job has {job.hosts} hosts. Choose before: paceline plan "
            "SCRIPT --cluster FILE, with the file that paceline doctor makes of the cluster."
        )
    if script is None or not script.is_file():
        raise PlanError(
            "plan='auto' runs the script for some steps under several plans, and this run has no script (a notebook). "
            "Ask paceline.fits(...) what fits, and give a plan."
        )
    if job.workers is None:
        raise PlanError("plan='auto' needs the number of workers: workers=4, or --workers 4.")
    say(f"plan auto: looking at {script.name}, measuring this machine, trying plans on {job.workers} workers ...")
    asked = {"plan": None if base is None else str(base), "overrides": list(overrides), "workers": job.workers}
    words = [sys.executable, "-m", CHOOSER, json.dumps(asked), str(script), *args]
    answer = json.loads(_last_line(words, say))
    say(f"plan auto: {answer['plan']} ({answer['why']})")
    return Plan.parse(answer["plan"])


def _last_line(words: Sequence[str], say: Callable[[str], None]) -> str:
    """Run the process that chooses, pass on what it tells of plans that it has tried, and return the last line of its
    output. Raises PlanError where it fails, or does not end in its time."""
    last = ""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        limit = threading.Timer(LIMIT_S, process.terminate)
        limit.daemon = True
        limit.start()
        try:
            for line in process.stdout or ():
                if line.startswith(TRIED):
                    say(f"plan auto: {line.removeprefix(TRIED).strip()}")
                else:  # the script may have printed, too
                    last = line
            process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            limit.cancel()
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()] or ["no reason was given"]
    if process.returncode != 0:
        raise PlanError(f"plan='auto' found no plan: {lines[-1].removeprefix('paceline: ')}")
    return last
