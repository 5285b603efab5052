"""`paceline.tune_trainable(fn)`: each trial of Ray Tune is a run on the hosts that the trial is given."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import functools
import importlib
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import config
from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, candidates, is_whole, read_commit_marker, step_of
from paceline.errors import LaunchError, PlanError
from paceline.launch.engines.ray import EXTRA, Ray
from paceline.launch.engines.submission import Submission
from paceline.plan import Job, Plan, read_plan
from paceline.plan.job import AUTO
from paceline.runs.run_on_engine import run_function_on_engine
from paceline.runs.submit import record_of, token_of

if TYPE_CHECKING:
    from paceline.worker.worker import Worker

__all__ = ["tune_trainable"]

RUN = "run"  # directory of the trial
LOOK_S = 1.0  # between two looks for checkpoints: steps may be fast
SAVE_S = 10.0  # a result of a step that is saved waits as long for its checkpoint (the run does not wait)
TAKEN = frozenset({"program", "args", "run_dir", "remote_dir", "fresh", "head", "slots", "launcher"})


def tune_trainable(
    function: Callable[[Worker, dict[str, Any]], Any],
    *,
    plan: Plan | str | Callable[[dict[str, Any]], Plan | str] | None = None,
    workers: int | None = None,
    hosts: int = 1,
    on: Ray | None = None,
    every: int = 1,
    **fields: Any,
) -> Any:
    """Return a trainable for `ray.tune.Tuner`: `function(worker, config)` on every worker of a run for each trial.

    A trial takes a bundle of Ray's for each host. What `metrics.jsonl` has of a step (the loss, what `worker.report`
    noted, "step") goes to Tune as a result, and what the function returns as the last one, if it is a dict. New
    checkpoints of the run go with the results where the trial's own node sees them, with `save_every` each with the
    result of its own step; so a trial that is paused, moved, or started again after a failure goes on from there, and
    one that takes over another's state goes on from that. Population based training asks a trial for the checkpoint
    of its newest result only: let its `perturbation_interval` be a multiple of `save_every` and of `every`, with
    `time_attr="step"`. A trial that Tune ends leaves at once.

    Example::

        def tune(train):
            from ray.tune import Tuner

            trainable = paceline.tune_trainable(train, workers=2, plan=lambda config: f"batch(size={config['batch']})")
            return Tuner(trainable, param_space={"batch": 64}).fit()

    :param plan: as of `paceline.run`, or a function of the trial's config that returns it.
    :param workers: of each trial, over all its hosts (those of a plan that is given as such, or 1 on each host).
    :param hosts: of each trial.
    :param on: what a host takes of its node, `paceline.Ray(gpus=1)` (a CPU for each worker).
    :param every: steps between two results.
    :param fields: other arguments of `paceline.run`, such as `save_every`.
    :raises PlanError: an argument cannot work.
    """
    try:
        tune: Any = importlib.import_module("ray.tune")
    except ImportError as error:
        raise PlanError(f"Ray Tune is not installed: {EXTRA}") from error
    if every < 1:
        raise PlanError(f"every is {every}; it must be at least 1.")
    if taken := sorted(TAKEN & fields.keys()):
        raise PlanError(f"tune_trainable() got {', '.join(taken)}, which each trial has of its own: leave it out.")
    job = config.read(Job, {**fields, "hosts": hosts, "workers": workers, "head": AUTO, "run_dir": RUN})
    fixed = None if plan is None or callable(plan) else read_plan(plan)
    if fixed is not None and workers is None:
        job = dataclasses.replace(job, workers=fixed.layout.workers)
    job = dataclasses.replace(job, workers=job.workers or hosts)
    engine = on or Ray(cpus=math.ceil((job.workers or 1) / hosts))
    chosen = plan if callable(plan) else fixed

    def trial(config: dict[str, Any]) -> None:
        _run_trial(config, function=function, plan=chosen, job=job, on=engine, every=every, fields=fields)

    trial.__name__ = getattr(function, "__name__", trial.__name__)  # by it Tune names the trials
    bundles = [{}, *([engine.bundle] * hosts)]  # the first is of the trial's own process, which only waits
    return tune.with_resources(trial, tune.PlacementGroupFactory(bundles, strategy=engine.strategy))


def _run_trial(
    config: dict[str, Any],
    *,
    function: Callable[..., Any],
    plan: Callable[[dict[str, Any]], Plan | str] | Plan | None,
    job: Job,
    on: Ray,
    every: int,
    fields: Mapping[str, Any],
) -> None:
    """Be one trial, in Tune's process for it."""
    tune: Any = importlib.import_module("ray.tune")
    directory = Path(tune.get_context().get_trial_dir())
    job = dataclasses.replace(job, run_dir=str(directory / RUN))
    _take_over(tune.get_checkpoint(), directory / RUN)
    reports = _Reports(tune, directory, every=every, save_every=job.save_every)
    chosen = plan(config) if callable(plan) else plan

    def start(submission: Submission) -> int:
        return on.run_in(
            importlib.import_module("ray").util.get_current_placement_group(),
            submission,
            record_of(on, submission),
            token=token_of(submission.job),
            say=_say,
            on_row=reports.take,
            shows=False,
        )

    try:
        value = run_function_on_engine(
            on,
            functools.partial(_call, function, config),
            job,
            plan=None if chosen is None else read_plan(chosen),
            fields=fields,
            given=tuple(fields),
            say=_say,
            start=start,
        )
    except KeyboardInterrupt as stopped:  # the hosts were told to leave: Tune may try the trial again
        raise LaunchError(str(stopped), is_accident=True) from None
    reports.finish(dict(value) if isinstance(value, Mapping) else None)


def _call(function: Callable[..., Any], settings: dict[str, Any], worker: Worker) -> Any:
    return function(worker, settings)


class _Reports:
    """A trial's results, with the checkpoints that are new: none that is of a later step than its result."""

    def __init__(self, tune: Any, directory: Path, *, every: int, save_every: int | None) -> None:
        self._tune, self._directory, self._every, self._save_every = tune, directory, every, save_every
        self._reported, self._looked_at = self._newest(), 0.0
        self._last: dict[str, Any] = {}

    def take(self, row: dict[str, Any]) -> None:
        """Report a step. Raises SystemExit where Tune ends the trial."""
        self._last = {name: value for name, value in row.items() if value is not None}
        step = row["step"]
        if step % self._every:
            return
        if self._save_every and step % self._save_every == 0:
            self._report(self._last, self._checkpoint_of(step))
        elif self._save_every or time.monotonic() - self._looked_at < LOOK_S:
            self._report(self._last)
        else:
            self._looked_at = time.monotonic()
            self._report(self._last, self._newest(up_to=step))

    def finish(self, value: dict[str, Any] | None) -> None:
        """Report what the function returned, and the last checkpoint."""
        newest = self._newest()
        if value is not None or newest != self._reported:
            self._report(self._last | (value or {}), newest)

    def _checkpoint_of(self, step: int) -> Path | None:
        """Files are written behind the steps. The first checkpoint that does not come ends the waiting: this node may
        not see them."""
        until = time.monotonic() + SAVE_S
        while (newest := self._newest(up_to=step)) is None or step_of(newest) < step:
            if time.monotonic() >= until:
                self._save_every = None
                break
            time.sleep(0.05)
        return newest

    def _newest(self, up_to: float = math.inf) -> Path | None:
        found = [path for path in candidates(self._directory / RUN / "checkpoints") if not path.suffix]
        return next((path for path in reversed(found) if step_of(path) <= up_to and is_whole(path)), None)

    def _report(self, result: dict[str, Any], checkpoint: Path | None = None) -> None:
        if checkpoint is None or checkpoint == self._reported:
            self._tune.report(result)
            return
        with _kept(checkpoint) as copy:
            if copy is None:
                self._tune.report(result)
            else:
                self._reported = checkpoint
                self._tune.report(result, checkpoint=self._tune.Checkpoint.from_directory(copy))


@contextlib.contextmanager
def _kept(checkpoint: Path) -> Iterator[Path | None]:
    """A second name for the files of a checkpoint: the run may remove it before Tune has copied it. None: it has."""
    copy = checkpoint.parent.parent / f"for-tune-{secrets.token_hex(4)}"
    try:
        try:
            shutil.copytree(checkpoint, copy, copy_function=os.link)
        except (FileNotFoundError, shutil.Error):
            if checkpoint.exists():
                raise
            yield None
        else:
            yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _take_over(checkpoint: Any, run_dir: Path) -> None:
    """Have the run go on from a checkpoint that Tune has given the trial, unless it is the run's own: then it goes on
    from its newest."""
    if checkpoint is None:
        return
    with checkpoint.as_directory() as given:
        step = read_commit_marker(Path(given)).step
        place = run_dir / "checkpoints" / f"step_{step:08d}"
        if (place / COMMIT_MARKER).exists() and filecmp.cmp(
            place / COMMIT_MARKER, Path(given) / COMMIT_MARKER, shallow=False
        ):
            return
        if run_dir.exists():
            run_dir.rename(run_dir.with_name(f"{run_dir.name}-{secrets.token_hex(4)}"))
        shutil.copytree(given, place)


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
