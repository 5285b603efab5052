"""A run's receipt in its report: predicted beside measured, also of a run that goes on, or that was killed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from paceline.monitor.records.measured_run import measured_run, started_as, work_by_worker
from paceline.monitor.records.run_record import RUNNING, RunRecord
from paceline.plan.job import NO_CLUSTER
from paceline.planner.run_receipt import BEING_MADE, PREDICTION_FILE, RECEIPT_FILE, TOO_LATE, RunPrediction, RunReceipt
from paceline.planner.step_causes import WorkObserved

__all__ = ["ReportedReceipt", "read_reported_receipt", "receipt_lines", "steps_text"]

HOW_TO = (
    "none: the run has no cluster. Measure this one once (paceline doctor --workers N --out cluster.toml), or name one "
    "(--cluster), and each run is compared with its prediction"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportedReceipt:
    """`receipt` where there is one, otherwise `why_none`. `is_so_far`: the run has made none itself, because it goes on
    or was killed; what stands here is from its newest steps.
    """

    receipt: RunReceipt | None = None
    prediction: RunPrediction | None = None
    why_none: str = ""
    is_so_far: bool = False


def read_reported_receipt(record: RunRecord, *, peak: float | None) -> ReportedReceipt:
    """Read what a run's directory has of it. `peak`: bytes of its fullest worker, where they are known."""
    run_dir = record.run_dir
    is_running = record.state_now() == RUNNING
    receipt, made = RunReceipt.read(run_dir / RECEIPT_FILE), RunPrediction.read(run_dir / PREDICTION_FILE)
    if receipt is not None:
        return ReportedReceipt(receipt=receipt, prediction=made)
    if made is None:
        is_asked = record.job.get("cluster") not in (None, NO_CLUSTER)
        return ReportedReceipt(why_none="none: the run left no prediction" if is_asked else HOW_TO)
    if made.predicted is None:
        late = TOO_LATE if made.problem == BEING_MADE and not is_running else made.problem
        return ReportedReceipt(prediction=made, why_none=f"none: no prediction for {made.cluster}: {late}")
    return _so_far(run_dir, made, peak=peak, is_running=is_running)


def _so_far(run_dir: Path, made: RunPrediction, *, peak: float | None, is_running: bool) -> ReportedReceipt:
    predicted = made.predicted
    found = measured_run(run_dir, peak=peak, since=made.made)
    if found.step is None:
        found = measured_run(run_dir, peak=peak)
    started = started_as(run_dir, found.attempt)
    text = "" if predicted is None else f"predicted: {predicted.text}"
    if predicted is None or found.step is None or found.attempt < made.attempt:
        steps = "so far too few steps to compare" if is_running else "too few steps were taken to compare"
        return ReportedReceipt(prediction=made, why_none=f"{text}; {steps}")
    if started is not None and (started.plan, started.workers) != (predicted.plan, predicted.workers):
        ran = f"{started.plan} on {started.workers} workers"
        return ReportedReceipt(prediction=made, why_none=f"none: {predicted.plan} was predicted, and {ran} was run")
    seen = WorkObserved(work_s=work_by_worker(run_dir, found.attempt))
    blame = predicted.receipt(found.step).blame(seen)
    receipt = RunReceipt.of(made.cluster, found.attempt, predicted, found.step, blame=blame)
    return ReportedReceipt(receipt=receipt, prediction=made, is_so_far=True)


def receipt_lines(reported: ReportedReceipt) -> Iterator[str]:
    """The receipt as lines of the report's text, or one line on why there is none."""
    if reported.receipt is None:
        yield f"receipt  {reported.why_none}"
        return
    yield f"predicted for {reported.receipt.cluster}, and measured in {steps_text(reported)}"
    yield from reported.receipt.lines()


def steps_text(reported: ReportedReceipt) -> str:
    """Return "298 steps", and for a run that goes on, or was killed, "298 steps so far"."""
    steps = 0 if reported.receipt is None else reported.receipt.steps
    return f"{steps:,} step{'s' * (steps != 1)}{' so far' if reported.is_so_far else ''}"
