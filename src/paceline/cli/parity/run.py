"""Runs a script under every plan and number of workers that `paceline parity` was asked for, and compares them.

Each run is an ordinary one: the same launcher, the same script, a run directory of its own. A configuration differs
from its reference in the layout alone, and in the wire: the reference's gradients travel whole. So both run the same
micro-batches of the same global batches. Every run gets the same number of threads, because the rounding of a matrix
product depends on how threads divide it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline import clock, environment, settings
from paceline.cli.parity.compare import CaptureReader, compare
from paceline.cli.parity.metrics import reported_metrics
from paceline.cli.parity.report import (
    BARE,
    FAILED,
    REFUSED,
    FailedTrial,
    ParityVerdict,
    Tolerance,
    later_parts,
    print_report,
    with_steady_metrics,
)
from paceline.cli.parity.request import ParityRequest
from paceline.cli.parity.where import ask_for_modules, find_departure
from paceline.config import to_word
from paceline.errors import PlanError, WorkerError
from paceline.events import WorkerStarted, decode
from paceline.launch.fork.warm_parent_client import WarmParent
from paceline.logs.log_reader import lines_of
from paceline.plan import CommandPlan, Job, Plan
from paceline.plan.compute import defaults_but_of
from paceline.runs.attempt import Attempt
from paceline.runs.attempt_failures import error_from_failures

__all__ = ["ParityTrial", "main_parity", "trials"]

# The names that paceline.worker.record.parity_capture, which needs torch, looks for.
BARE_LOOP, DRAWS_BY_UNIT = "bare_loop", "draws_by_unit"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParityTrial:
    """One run: a plan (None: the script's own) on so many workers."""

    name: str  # of its directory
    plan: Plan | None
    workers: int
    is_reference: bool
    is_bare: bool = False  # steps are taken by a plain torch loop
    draws_by_unit: bool = False  # each unit draws the random numbers that it draws under stages

    def overrides(self, *, float64: bool) -> tuple[str, ...]:
        """What is changed in the plan, be it from the command or the script."""
        # As many replicas as the workers make, of as many workers as the plan says.
        changed = ["plan.layout.replicas=none"]
        if self.is_reference or self.is_bare:
            changed = ["plan.layout=layout(replicas=1)", "plan.wire=raw"]
        if float64:
            changed.append("plan.compute.precision=fp64")
            changed += [f"plan.compute.{name}={to_word(value)}" for name, value in defaults_but_of("fp64").items()]
        return tuple(changed)

    @property
    def label(self) -> str:
        """What runs, in words."""
        if self.is_bare:
            return BARE
        if self.is_reference and self.draws_by_unit:
            return "one process, random numbers as under stages (reference)"
        if self.is_reference:
            return "one process (reference)"
        return f"{self.workers} worker{'s' * (self.workers > 1)}"

    def reference_key(self, *, float64: bool) -> str:
        """What a reference runs; of other trials, and of the script's own plan, their name."""
        if self.plan is None or not self.is_reference:
            return self.name
        return str(settings.apply(self.plan, *self.overrides(float64=float64)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FinishedTrial:
    """What a run left behind."""

    capture: CaptureReader
    plan: Plan  # resolved
    device: str  # "cpu", "cuda"


def main_parity(request: ParityRequest) -> int:
    """Run everything, print the table; returns 0 where parity holds, 1 where it does not.

    A plan that cannot work, or a run that fails, is reported and does not keep the others from being compared. Where
    there is nothing to compare at all, PlanError is raised where no plan can work, WorkerError where the script fails.
    """
    planned, refused = trials(request)
    judged: list[ParityVerdict] = []
    failed = [FailedTrial(label="all", plan=plan, error=error) for plan, error in refused]
    lost: dict[str, WorkerError | PlanError] = {}  # references that failed, by what they ran
    # By what they run: plans that differ in what a reference has not share one.
    references: dict[str, FinishedTrial] = {}
    drawn_by_unit: dict[Path, FinishedTrial] = {}  # by the captures of their references
    with _directory(request.keep) as directory, contextlib.ExitStack() as stack:
        warm = stack.enter_context(WarmParent.start())
        reference: FinishedTrial | None = None
        num_runs = len({trial.reference_key(float64=request.float64) for trial in planned})
        numbers = itertools.count(1)
        for trial in planned:
            key = trial.reference_key(float64=request.float64)
            if trial.is_reference:
                reference = references.get(key)
                if reference is not None or key in lost:
                    failed += [FailedTrial(label="all", plan=trial.plan, error=lost[key])] if key in lost else []
                    continue
            elif reference is None:  # it failed
                continue
            number = next(numbers)
            _say(f"{number}/{num_runs}  {_label(trial)}, {request.steps} steps")
            current = warm
            if number < num_runs:  # imports torch while this run computes
                warm = stack.enter_context(WarmParent.start())
            try:
                ended = _run(trial, request, directory, current)
                if trial.plan is None and trial.is_reference:
                    _require(ended.plan, request)
            except (WorkerError, PlanError) as error:
                _say(f"that is {REFUSED if isinstance(error, PlanError) else FAILED}")
                if trial.is_reference:
                    lost[key] = error
                failed.append(
                    FailedTrial(label="all" if trial.is_reference else trial.label, plan=trial.plan, error=error)
                )
                continue
            if reference is None:
                reference = references[key] = ended
            else:
                verdict, against = _judged(trial, ended, reference, request), reference
                if ended.plan.layout.stages > 1 and not (verdict.holds or verdict.is_rounding_of_wire):
                    against = drawn_by_unit.get(reference.capture.directory) or _drawn_by_unit(
                        trial, reference, request, directory
                    )
                    drawn_by_unit[reference.capture.directory] = against
                    if against is not reference:
                        verdict = dataclasses.replace(_judged(trial, ended, against, request), draws_by_unit=True)
                if request.where and trial.workers > 1 and not (verdict.holds or verdict.is_rounding_of_wire):
                    verdict = _located(verdict, trial, ended, against, request, directory)
                judged.append(verdict)
                if request.keep is None:
                    shutil.rmtree(directory / trial.name)  # gradients of every step are many bytes
    if not judged:
        raise failed[0].error
    judged = with_steady_metrics(judged)
    print_report(judged, failed, as_json=request.json)
    return 0 if all(row.holds for row in judged) and not failed else 1


def trials(request: ParityRequest) -> tuple[list[ParityTrial], list[tuple[Plan, PlanError]]]:
    """The runs, a reference before what is compared with it, and the plans that cannot work, with the reasons.

    Numbers of workers that a layout does not take are left out where it takes another one. PlanError where no plan can
    work.
    """
    plans: Sequence[Plan | None] = request.plans or (None,)
    found: list[ParityTrial] = []
    refused: list[tuple[Plan, PlanError]] = []
    for number, plan in enumerate(plans, start=1):
        part = f"plan_{number}_" if len(plans) > 1 else ""
        rows = [ParityTrial(name=f"{part}reference", plan=plan, workers=1, is_reference=True)]
        if request.bare:
            rows.append(ParityTrial(name=f"{part}bare", plan=plan, workers=1, is_reference=False, is_bare=True))
        rows += [
            ParityTrial(name=f"{part}workers_{workers}", plan=plan, workers=workers, is_reference=False)
            for workers in _fitting(plan, request.workers)
        ]
        if plan is not None:  # the script's own is not known yet
            try:
                for trial in rows:
                    changed = settings.apply(plan, *trial.overrides(float64=request.float64))
                    changed.resolve(trial.workers).require(workers=trial.workers)
            except PlanError as error:
                refused.append((plan, error))
                continue
        found += rows
    if not found:
        raise refused[0][1]
    return found, refused


def _fitting(plan: Plan | None, counts: Sequence[int]) -> Sequence[int]:
    """The numbers of workers that a plan's layout takes; all of them where it takes none, which is refused then."""
    if plan is None:
        return counts
    layout = dataclasses.replace(plan.layout, replicas=None)
    return [workers for workers in counts if layout.takes(workers)] or counts


def _require(plan: Plan, request: ParityRequest) -> None:
    """Raise PlanError where a plan that only the script knew cannot work on all the numbers of workers."""
    for workers in request.workers:
        settings.apply(plan, "plan.layout=layout()").resolve(workers).require(workers=workers)


def _run(trial: ParityTrial, request: ParityRequest, directory: Path, warm: WarmParent) -> FinishedTrial:
    """Run one trial to its end, without a word on the screen."""
    run_dir = directory / trial.name
    captured = run_dir / "captured"
    for is_asked, name in ((trial.is_bare, BARE_LOOP), (trial.draws_by_unit, DRAWS_BY_UNIT)):
        if is_asked:
            captured.mkdir(parents=True, exist_ok=True)
            (captured / name).touch()
    fields: dict[str, Any] = {
        "program": str(request.script),
        "args": request.args,
        "workers": trial.workers,
        "run_dir": str(run_dir),
        "fresh": True,
        "save_every": None,
        "save_every_s": 0.0,
        "save_at_end": False,
        "remote_dir": None,
        "tensorboard": False,
        "metrics_port": None,
        "max_steps": request.steps,
        "capture_dir": str(captured.absolute()),
    }
    if request.device != "auto":
        fields["device"] = request.device
    threads = environment.default_threads(max(request.workers))
    job = Job(**fields, threads=threads)  # threads: not among what the command decides, the script's own number wins
    attempt = Attempt(
        job,
        plan=CommandPlan.of(trial.plan, trial.overrides(float64=request.float64)),
        given=tuple(fields),
        command_started=clock.now(),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        outcome = attempt.run(warm)
    if outcome.state == "stopped":
        raise KeyboardInterrupt(outcome.reason)
    if outcome.state == "failed":
        raise _error(trial, attempt)
    started = _started(attempt.directory / "worker_0" / "events.jsonl")
    capture = CaptureReader(captured, reported_metrics(attempt.directory))
    if not capture.losses:
        raise PlanError(
            f"{request.script} took no step: there is nothing to compare. Its loop is over worker.batches(...)."
        )
    return FinishedTrial(capture=capture, plan=Plan.parse(started.plan), device=started.device.partition(":")[0])


def _judged(
    trial: ParityTrial, ended: FinishedTrial, reference: FinishedTrial, request: ParityRequest
) -> ParityVerdict:
    capture, of_reference = ended.capture, reference.capture
    if trial.is_bare:  # it is the reference of the reference
        capture, of_reference = of_reference, capture
    return ParityVerdict(
        workers=trial.workers,
        plan=reference.plan if trial.is_bare else ended.plan,
        device=ended.device,
        reference_device=reference.device,
        tolerance=Tolerance.of(request.tolerance, precision=ended.plan.compute.precision),
        found=compare(capture, of_reference),
        is_bare=trial.is_bare,
        later_parts=later_parts(reference.capture.options, num_steps=len(reference.capture.losses)),
    )


def _drawn_by_unit(
    trial: ParityTrial, reference: FinishedTrial, request: ParityRequest, directory: Path
) -> FinishedTrial:
    """Return a reference whose units draw the random numbers that stages draw, or `reference` where that has no effect
    on it."""
    name = f"{trial.name}_reference_by_unit"
    again = dataclasses.replace(trial, name=name, workers=1, is_reference=True, draws_by_unit=True)
    _say(f"{_label(trial)} differs: running {_label(again)}, {request.steps} steps")
    try:
        with WarmParent.start() as warm:
            ended = _run(again, request, directory, warm)
    except (WorkerError, PlanError) as error:
        _say(f"that failed: {error}")
        return reference
    has_effect = compare(ended.capture, reference.capture).loss.value > 0
    return ended if has_effect else reference


def _located(
    verdict: ParityVerdict,
    trial: ParityTrial,
    ended: FinishedTrial,
    reference: FinishedTrial,
    request: ParityRequest,
    directory: Path,
) -> ParityVerdict:
    """Add to a verdict where the configuration departs; where that cannot be found out, the verdict as it is."""
    _say(f"{_label(trial)} differs: running it and its reference again, to find out where")
    precision = verdict.plan.compute.precision

    def run(what: str, steps: int, perturbed: bool) -> Path:
        is_reference = what == "reference"
        name = f"{trial.name}_{what}{'_perturbed' * perturbed}_modules"
        again = dataclasses.replace(
            trial,
            name=name,
            is_reference=is_reference,
            workers=1 if is_reference else trial.workers,
            draws_by_unit=is_reference and verdict.draws_by_unit,
        )
        captured = directory / name / "captured"
        ask_for_modules(captured, steps=steps, perturbed_in=precision if perturbed else None)
        with WarmParent.start() as warm:
            _run(again, request, directory, warm)
        return captured

    try:
        departure = find_departure(
            run,
            capture=ended.capture,
            reference=reference.capture,
            tolerance=verdict.tolerance.numbers,
            precision=precision,
            reported=verdict.reported,
        )
    except (WorkerError, PlanError) as error:
        _say(f"that failed: {error}")
        return verdict
    finally:
        if request.keep is None:
            for path in directory.glob(f"{trial.name}_*_modules"):
                shutil.rmtree(path)
    return dataclasses.replace(verdict, departure=departure, is_located=True)


def _error(trial: ParityTrial, attempt: Attempt) -> WorkerError | PlanError:
    error = error_from_failures(attempt.failures)
    message = f"the run with {_label(trial)} failed, so there is nothing to compare.\n{error}"
    if isinstance(error, PlanError):
        return PlanError(message)
    return WorkerError(
        message,
        worker=error.worker,
        host=error.host,
        step=error.step,
        exit_code=error.exit_code,
        traceback=error.traceback,
    )


def _started(path: Path) -> WorkerStarted:
    for line in lines_of(path):
        event = decode(line).event
        if isinstance(event, WorkerStarted):
            return event
    raise ValueError(f"{path} does not say how the worker started")


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """Where the runs go: a directory that is removed again, unless it is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="paceline-parity-") as name:
        yield Path(name)


def _label(trial: ParityTrial) -> str:
    return trial.label if trial.plan is None else f"{trial.label}, {trial.plan}"


def _say(text: str) -> None:
    print(f"parity: {text}", file=sys.stderr, flush=True)
