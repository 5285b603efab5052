"""The process that predicts a run while it goes on: it looks at the script, and writes `prediction.json`.

It takes only time that nothing else wants, and ends with the process that started it. `paceline.runs.run_predictor`
starts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import clock
from paceline.cli.plan_costs.subject import Subject
from paceline.errors import PacelineError
from paceline.launch.fork.process_lifetime import set_parent_death_signal
from paceline.plan import CommandPlan
from paceline.planner.named_cluster import NamedCluster, cluster_named
from paceline.planner.run_receipt import PREDICTION_FILE, PredictedStep, RunPrediction

__all__ = ["main", "predict_run"]

CPU_S = 300  # of this process, at most
NICEST = 19
FIRST_TO_GO = "1000"  # where memory is short: before any worker


def predict_run(
    script: Path, args: Sequence[str], *, plan: CommandPlan, workers: int, where: NamedCluster
) -> PredictedStep:
    """Return what a step of the run costs on its cluster. Raises PlanError where that cannot be said, and whatever the
    script raises.
    """
    from paceline.worker.script_inspection import inspect_script

    found = inspect_script(script, args=args, plan=plan, workers=workers, rank=None)
    subject = Subject.of(found).corrected(where)
    priced = subject.price(subject.plan, where.cluster, workers=subject.workers)
    return PredictedStep.of(
        subject.signature,
        priced,
        subject.correction(subject.plan, workers=subject.workers),
        wide=math.exp(priced.half_width),
        remarks=subject.remarks,
    )


def main(asked: Mapping[str, Any], words: Sequence[str]) -> int:
    """Predict, and write; an error becomes the prediction's `problem`. `words`: the script and its arguments."""
    _step_back(int(asked["parent"]))
    path, (script, *args) = Path(asked["run_dir"]) / PREDICTION_FILE, words
    made = RunPrediction(cluster=asked["cluster"], attempt=asked["attempt"])
    predicted, problem = None, ""
    try:
        where = cluster_named(asked["cluster"], asked["workers"])
        receipts = None if where.receipts is None else str(where.receipts.absolute())
        made = dataclasses.replace(made, receipts=receipts)
        plan = CommandPlan.from_table(asked["plan"])
        predicted = predict_run(Path(script), args, plan=plan, workers=asked["workers"], where=where)
    except PacelineError as error:
        problem = str(error)
    except SystemExit as left:
        problem = f"the script ended by itself (exit status {left.code}) when it was looked at"
    except Exception as error:  # the user's code, which runs here a second time
        problem = f"the script raised {type(error).__name__} when it was looked at: {error}".partition("\n")[0]
    line = " ".join(problem.split())
    dataclasses.replace(made, predicted=predicted, problem=line, made=clock.now()).write(path)
    return 0


def _step_back(parent: int) -> None:
    """End with the process that started this one, and leave time and memory to all others."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.nice(NICEST)
    with contextlib.suppress(OSError, AttributeError):  # not everywhere
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
