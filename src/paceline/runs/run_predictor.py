"""Predicts a run's steps while it goes on, and makes its receipt at the end.

One process beside the run looks at the script as `paceline plan SCRIPT` does, and writes `prediction.json`. It has the
lowest priority, a limit, and this process as its owner: it is ended on every path out of the run. Whatever goes wrong
with it is a line in that file, and nothing to the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.environment import child_environment
from paceline.errors import PlanError
from paceline.monitor.records.measured_run import MeasuredRun, measured_run, work_by_worker
from paceline.monitor.records.run_files import local_path
from paceline.plan import CommandPlan, Job
from paceline.plan.job import NO_CLUSTER
from paceline.plan.script_scan import cluster_of_script
from paceline.planner.named_cluster import cluster_named
from paceline.planner.receipt import LEAST_STEPS, WARM_UP
from paceline.planner.run_receipt import (
    BEING_MADE,
    PREDICTION_FILE,
    RECEIPT_FILE,
    TOO_LATE,
    PredictedStep,
    RunPrediction,
    RunReceipt,
)
from paceline.planner.step_causes import WorkObserved
from paceline.runs.run_conditions import RunConditions
from paceline.units import shell_text

__all__ = ["CLUSTER_FILE", "RunPredictor", "run_predictor"]

CLUSTER_FILE = "cluster.toml"  # as `paceline doctor --out` is told to call it
LEAST_KEPT_STEPS = 20  # the first steps of a run are slower: a receipt of few would teach the next prediction that
LIMIT_S = 600.0  # it only has time that workers leave, and may have to wait for it
END_S = 10.0  # that the end of a run waits for it, and no longer than the run took
KILLED_S = 5.0  # until a killed process has ended
LOOK_S = 0.5  # between two looks at it, and at the workers' cores
MODULE = "paceline.cli.plan_costs.predict_run"
BOOTSTRAP = f"""
import json, os, sys
asked = json.loads(sys.argv[1])
sys.path[:] = asked["paths"]
from {MODULE} import main
os._exit(main(asked, sys.argv[2:]))  # what the script has left need not end in order
"""


def run_predictor(
    job: Job, plan: CommandPlan, *, script: Path | None, args: Sequence[str], drills: bool
) -> RunPredictor:
    """Return what predicts this run: of the job's cluster, of the one that its script's call writes out, or of
    `cluster.toml` here; one that does nothing where there is no cluster, and in a drill.

    Raises PlanError where a cluster that was asked for is not known, or has too few devices for the job.
    """
    asked = job.cluster or (None if script is None else cluster_of_script(script))
    found = asked or (CLUSTER_FILE if Path(CLUSTER_FILE).is_file() and not drills else None)
    if found in (None, NO_CLUSTER) or job.launcher == "inline":
        return RunPredictor(None)
    problem = ""
    try:
        cluster_named(found, job.workers or 1)
    except PlanError as error:
        is_elsewhere = job.hosts > 1 and not Path(found.partition(":")[0]).exists()
        if asked is not None and not is_elsewhere:
            raise PlanError(f"cluster={found!r}: {error}") from error
        problem = str(error)
    if script is None or not script.is_file():
        problem = problem or "the run has no script that could be looked at (a notebook, or a program from a pipe)"
    return RunPredictor(
        found, script=script, args=tuple(args), plan=plan, workers=job.workers or 1, problem=problem, tells=bool(asked)
    )


class RunPredictor:
    """The prediction of a run that begins here, through all its attempts. Close it on every path."""

    def __init__(
        self,
        cluster: str | None,
        *,
        script: Path | None = None,
        args: Sequence[str] = (),
        plan: CommandPlan | None = None,
        workers: int = 1,
        problem: str = "",
        tells: bool = False,
    ) -> None:
        """`cluster` None: nothing is predicted. `problem`: why it cannot be. `tells`: the user has asked for it, so why
        there is none is shown.
        """
        self._cluster, self._problem, self._tells = cluster, problem, tells
        self._script, self._args, self._plan = script, tuple(args), plan or CommandPlan()
        self._workers = workers
        self._run_dir: Path | None = None  # once it has begun
        self._process: subprocess.Popen[bytes] | None = None
        self._began = self._looked = 0.0
        self._conditions: RunConditions | None = None

    def __enter__(self) -> RunPredictor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._collected(late=TOO_LATE)

    @property
    def has_begun(self) -> bool:
        """Whether this run has a cluster, so that its steps are to be compared."""
        return self._run_dir is not None

    def conditions(self, workers: int) -> RunConditions:
        """Return the sink that the next attempt, of so many workers, is to have."""
        self._conditions = RunConditions(workers)
        return self._conditions

    def begin(self, run_dir: Path, attempt: int) -> None:
        """Start to predict; returns at once. What an earlier start has left in the directory is replaced."""
        if self._cluster is None:
            return
        self._run_dir, self._began = run_dir, time.monotonic()
        with contextlib.suppress(OSError):
            (run_dir / RECEIPT_FILE).unlink(missing_ok=True)
        made = RunPrediction(cluster=self._cluster, attempt=attempt, problem=self._problem or BEING_MADE)
        try:
            made.write(run_dir / PREDICTION_FILE)
            if not self._problem:
                self._process = self._start(run_dir, attempt)
        except OSError as error:  # no space, no process: the run has other things to say about that
            self._note(f"it could not be begun: {error.strerror}")

    def _start(self, run_dir: Path, attempt: int) -> subprocess.Popen[bytes]:
        asked = {
            "parent": os.getpid(),
            "paths": [path for path in sys.path if isinstance(path, str)],
            "run_dir": str(run_dir.absolute()),
            "attempt": attempt,
            "cluster": self._cluster,
            "plan": self._plan.to_table(),
            "workers": self._workers,
        }
        one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            [sys.executable, "-P", "-c", BOOTSTRAP, json.dumps(asked), str(self._script), *self._args],
            env=child_environment(**one),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal reaches only this process
        )

    def poll(self) -> str:
        """Look at the process, and at the workers; returns a line for the user when the prediction comes, else ""."""
        now = time.monotonic()
        if not self.has_begun or now - self._looked < LOOK_S:
            return ""
        self._looked = now
        if self._conditions is not None:
            self._conditions.poll()
        if self._process is None:
            return ""
        late = ""
        if not self._has_ended():
            if now - self._began <= LIMIT_S:
                return ""
            late = f"it took more than {LIMIT_S:g} s"
        made = self._collected(late=late)
        return "" if made.predicted is None else f"predicted on {made.cluster}: {made.predicted.text}"

    def rows(self, facts: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Make the receipt of the attempt that has ended, as its summary says; return it as a row of the closing table,
        none where there is no receipt.
        """
        run_dir = self._run_dir
        if run_dir is None or facts["steps"] < WARM_UP + LEAST_STEPS:
            return []
        if facts["state"] == "finished":
            self._wait(min(END_S, facts["duration_s"]))
        made = self._written()
        if made is None or made.predicted is None:
            problem = TOO_LATE if made is None or made.problem == BEING_MADE else made.problem
            return [("receipt", f"none: {problem}")] if self._tells else []
        receipt = self._receipt(run_dir, made, made.predicted, facts)
        if receipt is None:
            return []
        with contextlib.suppress(OSError):  # the table has it
            receipt.write(run_dir / RECEIPT_FILE)
        return [("receipt", f"{receipt.summary}: paceline report {shell_text(local_path(run_dir))}")]

    def _receipt(
        self, run_dir: Path, made: RunPrediction, predicted: PredictedStep, facts: Mapping[str, Any]
    ) -> RunReceipt | None:
        attempt = facts["attempt"]
        peak = facts["peak_memory_bytes"]
        found = measured_run(run_dir, attempt=attempt, peak=peak, since=made.made)
        is_undisturbed = found.step is not None
        if not is_undisturbed:
            found = measured_run(run_dir, attempt=attempt, peak=peak)
        if found.step is None or (facts["plan"], facts["workers"]) != (predicted.plan, predicted.workers):
            return None
        seen = WorkObserved(
            work_s=work_by_worker(run_dir, attempt),
            core_wait=None if self._conditions is None else self._conditions.core_wait,
        )
        blame = predicted.receipt(found.step).blame(seen)
        receipt = RunReceipt.of(made.cluster, attempt, predicted, found.step, blame=blame)
        reason = self._why_not_kept(made, predicted, facts, found)
        if not is_undisturbed:
            reason = reason or "its steps shared the machine with the process that predicted them: run for longer"
        if reason or made.receipts is None:
            return dataclasses.replace(receipt, not_kept=reason)
        try:
            receipt.receipt.append_to(Path(made.receipts))
        except OSError as error:
            return dataclasses.replace(receipt, not_kept=f"{made.receipts} cannot be written ({error.strerror})")
        return dataclasses.replace(receipt, kept=made.receipts)

    def _why_not_kept(
        self, made: RunPrediction, predicted: PredictedStep, facts: Mapping[str, Any], found: MeasuredRun
    ) -> str:
        """Why the next predictions are not to learn from this run; "" where they are."""
        devices = facts["devices"]
        if made.receipts is None:
            return f"{made.cluster} is of the catalogue; a cluster file of your own keeps receipts (paceline doctor)"
        if facts["state"] == "failed":
            return "the run has failed"
        if self._conditions is not None and self._conditions.change:
            return f"not all steps were alike: {self._conditions.change}"
        if 2 * found.disturbed > found.steps:
            return f"{found.disturbed} of {found.steps} steps were skipped, or held up by workers that came or went"
        if found.step is None or found.step.steps < LEAST_KEPT_STEPS:
            return f"a run's first steps are slower, and fewer than {LEAST_KEPT_STEPS} were measured"
        if devices and all(str(one).startswith("cpu") for one in devices) != predicted.is_cpu:
            return f"the run was on {', '.join(map(str, devices))}, which is not the cluster's device"
        return ""

    def _wait(self, limit_s: float) -> None:
        """Wait for the process, which has the machine to itself now."""
        until = time.monotonic() + limit_s
        while self._process is not None and not self._has_ended() and time.monotonic() < until:
            time.sleep(0.02)  # an end that must not be reaped cannot be waited for with a limit
        if self._process is not None and self._has_ended():
            self._collected()

    def _has_ended(self) -> bool:
        """Whether the process has ended; it is not reaped yet, so that its number is still its own."""
        if self._process is None:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, flags) is not None

    def _collected(self, *, late: str = "") -> RunPrediction:
        """End the process, and return what it has written before. `late`: why there is nothing if it was still busy."""
        process, has_ended = self._process, self._has_ended()
        self.close()
        made = self._written()
        if made is not None and made.problem != BEING_MADE:
            return made
        code = None if process is None else process.returncode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit status {code}"
        return self._note(f"the process that makes it {how}" if has_ended else late)

    def _note(self, problem: str) -> RunPrediction:
        """Record why there is no prediction."""
        before = self._written()
        attempt = 0 if before is None else before.attempt
        made = RunPrediction(cluster=str(self._cluster), attempt=attempt, problem=problem)
        if self._run_dir is not None:
            with contextlib.suppress(OSError):
                made.write(self._run_dir / PREDICTION_FILE)
        return made

    def _written(self) -> RunPrediction | None:
        return None if self._run_dir is None else RunPrediction.read(self._run_dir / PREDICTION_FILE)

    def close(self) -> None:
        """End the process, with all that the script may have started in it; safe to repeat."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in the system, which no signal ends
            process.wait(KILLED_S)
