"""The sweep's loop: trials go from Optuna's storage into the pool, and what their runs report goes back.

A trial is in the storage before its run is queued, and it is told there before its run is taken out. So after kill -9
the next start has nothing to guess: a running trial without a run is queued, one with a run is followed, and a run
whose trial is over is taken out. All that a look does can be done twice.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from paceline import config, run_lock
from paceline.errors import PacelineError, PlanError
from paceline.monitor.records.run_record import RunRecord
from paceline.pool.pool_run import PoolRun, queued_runs
from paceline.pool.pool_state import PoolRecord, RunEntry
from paceline.pool.withdrawal import take_out
from paceline.private_files import make_run_directory
from paceline.processes import this_host
from paceline.sweep.own_pool import OwnPool
from paceline.sweep.run_metrics import RunMetrics
from paceline.sweep.space import value_text
from paceline.sweep.study_file import StudyFile
from paceline.sweep.sweep_progress import SweepProgress, former_record
from paceline.sweep.sweep_record import SweepRecord
from paceline.sweep.trial_end import error_of
from paceline.sweep.trial_run import check_commands, pool_run, run_name
from paceline.sweep.trial_store import REFUSED, USER, TrialStore, is_queued, parameters_of

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = ["FINISHED", "Sweep", "own_runs"]

LOOK_S = 0.5
FAILURES = 3  # trials of a start that fail, and none that does not: then it ends
ROOM_S = 10.0  # until a trial that is larger than the sweep's own pool has failed: nobody else makes that one larger
PARTING_S = 30.0  # in which runs that were taken out save and end, before the sweep does
FINISHED, STOPPED = "finished", "stopped"


class Sweep:
    """The sweep of one study file. `say` gets a line for what happens, `show` the record whenever it has changed."""

    def __init__(
        self, study: StudyFile, *, say: Callable[[str], None], show: Callable[[SweepRecord], None] = lambda record: None
    ) -> None:
        """Take the study's folder and storage; raises PlanError where another process has it, or they do not fit."""
        self._study, self._say = study, say
        self._num_asked = 0  # by Ctrl-C or SIGTERM, to end
        check_commands(study)
        make_run_directory(study.folder)
        if not run_lock.hold(study.folder):
            raise PlanError(
                f"{study.folder} is in use: another process runs this sweep. See paceline sweep {study.path} --show."
            )
        try:
            _check_former_host(study, former_record(study.folder))
            self._store = TrialStore(study)
            self._own_pool = (
                OwnPool(study.pool, slots=study.settings.slots, say=say, num_asked=lambda: self._num_asked)
                if study.has_own_pool
                else None
            )
            self._queued: dict[str, PoolRun] = {}
            self._check_pool()
        except BaseException:
            run_lock.release(study.folder)
            raise
        self._followed: dict[int, RunMetrics] = {}
        self._in_pool: set[int] = set()  # trials whose run this process has seen there
        self._pool_file, self._pool_record = PoolRecord.file(study.pool), PoolRecord()
        self._began = time.monotonic()
        self._num_good = self._num_failed = 0  # trials that ended in this start
        self._told: set[str] = set()
        self._too_large_since: dict[int, float] = {}  # trials that have no room in the pool, as it is
        self._parting: list[PoolRun] = []  # taken out, and perhaps still saving
        self.signal: int | None = None  # that ended it
        self._progress = SweepProgress(study, self._store, show=show, say=self._say_once)
        for note in self._store.notes:
            say(note)

    def run(self) -> SweepRecord:
        """Run until all trials are over, or Ctrl-C or SIGTERM; returns how it stands then. The second one ends the wait
        for runs that save.

        Raises PlanError where runs do not report the objective, and PacelineError where all trials fail.
        """
        from optuna.exceptions import StorageInternalError

        before = {number: signal.signal(number, self._asked_to_end) for number in (signal.SIGTERM, signal.SIGINT)}
        state = STOPPED
        try:
            if self._own_pool is not None:
                self._own_pool.start()
            while not self._num_asked:
                if self.look():
                    state = FINISHED
                    break
                time.sleep(LOOK_S)
        except StorageInternalError as error:
            raise PacelineError(
                f"Optuna's storage has failed, and the sweep ends; trials are kept, and the same command goes on with "
                f"them. {error}"
            ) from error
        finally:
            self._end(state)
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._progress.record

    def _asked_to_end(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._num_asked += 1

    def _end(self, state: str) -> None:
        from optuna.exceptions import StorageInternalError

        try:
            deadline = time.monotonic() + PARTING_S
            while any(map(_is_there, self._parting)) and time.monotonic() < deadline and self._num_asked < 2:
                time.sleep(LOOK_S)
            if self._own_pool is not None:
                if state != FINISHED and self._in_pool:
                    self._say("running trials save and end; they go on when the sweep is started again")
                self._own_pool.end()
            with contextlib.suppress(StorageInternalError):  # it is on its way, where it is why the sweep ends
                self._progress.note(state, self._pool_record.runs)
        finally:
            for metrics in self._followed.values():
                metrics.close()
            run_lock.release(self._study.folder)

    def look(self) -> bool:
        """Do what is due; returns whether all trials are over."""
        self._read_pool()
        self._store.refresh()
        for trial in self._store.running():
            if run_name(self._study, trial.number) in self._queued:
                self._follow(trial)
            else:
                self._queue(trial)
        self._take_out_ended()
        for number in self._store.enqueue_retries():
            self._say(f"trial {number} is tried again with the same parameters")
        self._start_trials()
        self._progress.note("running", self._pool_record.runs)
        return not self._store.running() and not self._is_more_wanted()

    def _read_pool(self) -> None:
        if self._own_pool is not None:
            self._own_pool.keep()
        self._queued = queued_runs(self._study.pool, known=self._queued, problem=self._say_once)
        self._pool_record = self._pool_file.read()
        if self._num_asked:
            return
        if not self._pool_record.is_alive(self._study.pool):
            self._say_once(
                f"the pool does not run, and trials wait for it: start it with `paceline pool {self._study.pool}`"
            )
        else:
            self._told = {text for text in self._told if not text.startswith("the pool does not run")}

    def _queue(self, trial: FrozenTrial) -> None:
        """Queue the run of a running trial, unless it was taken out of the pool while it was followed."""
        number = trial.number
        if number in self._in_pool:
            self._fail(trial, "its run was taken out of the pool", ended_by=USER)
            return
        run_dir = self._study.run_dir(number)
        if (run_dir / "run.json").exists() and not is_queued(trial):
            raise PlanError(
                f"{run_dir} has a run, and trial {number} is new: it is another study's, whose storage is gone. Move "
                f"{run_dir.parent} away, or give this study another folder."
            )
        if _is_alive(run_dir):
            return  # it was taken out, and is about to end
        trial = self._store.complete(trial)
        try:
            run = pool_run(self._study, number, parameters_of(self._study, trial))
            self._store.set_queued(trial, run.run_dir)
            run.add_to(self._study.pool)
        except PlanError as error:
            self._fail(trial, str(error))
            return
        self._queued[run.name] = run
        self._in_pool.add(number)
        values = parameters_of(self._study, trial)
        self._say(f"trial {number} is queued: {'  '.join(f'{name} {value_text(values[name])}' for name in values)}")

    def _has_no_room(self, trial: FrozenTrial) -> bool:
        """Whether a trial that waits has failed, as the sweep's own pool is too small for it. In another pool it waits,
        and that is said once: nodes may come, or be silent for a moment.
        """
        run, number = self._run(trial), trial.number
        needed, slots = run.least * run.workers_each, self._pool_record.slots
        if not self._pool_record.is_alive(self._study.pool) or not 0 < slots < needed:  # 0: it has just been started
            self._too_large_since.pop(number, None)
            return False
        remedy = f"it needs {needed} devices at least, and the pool has {slots}. Give `replicas` a smaller least, or "
        since = self._too_large_since.get(number)
        if since is None:
            self._too_large_since[number] = time.monotonic()
            self._say(f"trial {number} waits: {remedy}the pool more devices")
        elif self._own_pool is not None and time.monotonic() - since > ROOM_S:
            self._fail(trial, f"{remedy}more `slots`.")
            return True
        return False

    def _start_trials(self) -> None:
        while len(self._store.running()) < self._at_once() and self._is_more_wanted() and not self._num_asked:
            self._queue(self._store.ask())

    def _is_more_wanted(self) -> bool:
        timeout_s = self._study.settings.timeout_s
        if timeout_s is not None and time.monotonic() - self._began > timeout_s:
            return False
        return self._store.is_one_more_wanted()

    def _at_once(self) -> int:
        """How many trials are in the pool at the same time: by default as many as have room in it with their least."""
        if self._study.settings.at_once is not None:
            return self._study.settings.at_once
        if not self._pool_record.is_alive(self._study.pool):
            return 1
        least = min((run.least * run.workers_each for run in self._own().values()), default=1)
        return max(1, self._pool_record.slots // least)

    # A trial that runs.

    def _follow(self, trial: FrozenTrial) -> None:
        """Take what its run has reported, prune it, or conclude it."""
        self._in_pool.add(trial.number)
        entry = self._entry(trial)
        if entry.phase == "waiting" and self._has_no_room(trial):
            return
        is_over = entry.is_over  # before its files are read: they are whole then
        metrics = self._followed.get(trial.number)
        if metrics is None:
            metrics = RunMetrics(self._study.run_dir(trial.number), self._study.objective)
            self._followed[trial.number] = metrics
            if not is_over and self._prune(trial):  # an earlier start was killed before it asked
                return
        found = metrics.poll()
        self._progress.reach(trial.number, metrics.step)
        for one in found:
            if one.step <= self._store.values.reported(trial)[1]:
                continue  # by an earlier start
            self._store.values.report(trial, one.step, one.value)
            if not is_over and self._prune(trial):
                return
        if metrics.is_missing(is_over=entry.phase == "finished"):
            self._refuse_metric(trial, metrics)
        elif is_over:
            self._conclude(trial, entry, metrics)

    def _prune(self, trial: FrozenTrial) -> bool:
        """Prune it, if the pruner says so of its last value; returns whether it did."""
        if not self._store.values.should_prune(trial):
            return False
        self._store.prune(trial)
        step, value = self._store.values.last(trial)
        self._num_good += 1
        self._over(trial, f"pruned at step {step} with {self._objective_text(value)}")
        return True

    def _conclude(self, trial: FrozenTrial, entry: RunEntry, metrics: RunMetrics) -> None:
        if entry.phase == "failed":
            self._fail(trial, error_of(self._study.pool, self._run(trial), entry))
            return
        if entry.phase == "stopped":
            self._fail(trial, f"its run was stopped at step {entry.step}", ended_by=USER)
            return
        last = metrics.final()
        value = math.nan if last is None else last.value
        if self._study.objective.value == "best":
            value = self._store.values.best(trial, value)
        if not math.isfinite(value):
            self._fail(trial, f"{self._study.objective.metric} is {value} at its end")
            return
        self._store.finish(trial, value)
        self._num_good += 1
        self._over(trial, f"finished with {self._objective_text(value)}")

    def _refuse_metric(self, trial: FrozenTrial, metrics: RunMetrics) -> None:
        """The run does not report the objective: no trial will, unless one has."""
        metric, names = self._study.objective.metric, sorted(metrics.names)
        near = config.suggest(metric, names) or next(
            (f" Did you mean {name!r}?" for name in names if name.rpartition("/")[2] == metric.rpartition("/")[2]), ""
        )
        text = f"its run does not report {metric!r}.{near} It reports: {', '.join(names) or 'nothing'}."
        if any(one.intermediate_values or one.state.name == "COMPLETE" for one in self._store.trials()):
            self._fail(trial, text)
            return
        for one in self._store.running():
            self._fail(one, text, ended_by=REFUSED)
        raise PlanError(f"{self._study.path}: objective.metric: {text}")

    def _fail(self, trial: FrozenTrial, error: str, *, ended_by: str | None = None) -> None:
        self._store.fail(trial, error, ended_by=ended_by)
        self._over(trial, f"failed: {error}")
        if ended_by is not None:
            return
        self._num_failed += 1
        if self._num_failed >= FAILURES and not self._num_good:
            raise PacelineError(
                f"The first {FAILURES} trials of this start have failed, so the sweep ends. The last one: {error}"
            )

    def _over(self, trial: FrozenTrial, text: str) -> None:
        """It is told in the storage: its run leaves the pool."""
        self._say(f"trial {trial.number} {text}")
        metrics = self._followed.pop(trial.number, None)
        if metrics is not None:
            metrics.close()
        self._in_pool.discard(trial.number)
        self._too_large_since.pop(trial.number, None)
        run = self._queued.get(run_name(self._study, trial.number))
        if run is not None:
            self._take_out(run)

    def _take_out_ended(self) -> None:
        """Take out runs whose trials are over: an earlier start was killed before it did, or others ended the trial."""
        running = {trial.number for trial in self._store.running()}
        run_dirs = set(map(self._study.run_dir, running))
        for run in self._own().values():
            if Path(run.run_dir) not in run_dirs:
                self._take_out(run)
        for number in self._followed.keys() - running:
            self._followed.pop(number).close()

    def _take_out(self, run: PoolRun) -> None:
        take_out(run, pool=self._study.pool)
        self._queued.pop(run.name, None)
        self._parting.append(run)

    # What it knows of the pool.

    def _own(self) -> dict[str, PoolRun]:
        return {name: run for name, run in self._queued.items() if _is_own(self._study, run)}

    def _run(self, trial: FrozenTrial) -> PoolRun:
        return self._queued[run_name(self._study, trial.number)]

    def _entry(self, trial: FrozenTrial) -> RunEntry:
        return self._pool_record.runs.get(run_name(self._study, trial.number), RunEntry())

    def _check_pool(self) -> None:
        """Refuse a pool that does not run, and another one than that in which trials are."""
        pool, before = self._study.pool, self._store.pool
        if before is not None and before != str(pool) and own_runs(self._study, Path(before)):
            raise PlanError(
                f"{self._study.path}: trials are in the pool {before}, and pool is {pool} now. Name the old one, or "
                f"take them out: paceline sweep {self._study.path} --cancel, with the old line."
            )
        if not self._study.has_own_pool and not PoolRecord.load(pool).is_alive(pool):
            raise PlanError(
                f"{self._study.path}: the pool {pool} does not run. Start it with `paceline pool {pool}`, or leave the "
                "line out: then the sweep has a pool of its own."
            )
        for run in queued_runs(pool, known={}, problem=lambda text: None).values():
            if run.name.startswith(run_name(self._study, 0)[:-4]) and not _is_own(self._study, run):
                raise PlanError(
                    f"{self._study.path}: the pool {pool} has the run {run.name} of another study with this name, in "
                    f"{Path(run.run_dir).parent.parent}. Give this one another name."
                )
        self._store.pool = str(pool)

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)

    # What it shows.

    def _objective_text(self, value: float) -> str:
        return f"{self._study.objective.metric} {value:.6g}"


def own_runs(study: StudyFile, pool: Path) -> list[PoolRun]:
    """Return the runs of a study's trials that are in a pool's queue."""
    return [run for run in queued_runs(pool, known={}, problem=lambda text: None).values() if _is_own(study, run)]


def _check_former_host(study: StudyFile, before: SweepRecord | None) -> None:
    """Refuse to go on with a sweep that may still run on another host, where the disk has no locks to see that by."""
    if before is None or before.state != "running" or before.host == this_host() or run_lock.is_held(study.folder):
        return
    raise PlanError(
        f"{study.path}: the sweep may still run on {before.host} (process {before.pid}), and the disk of "
        f"{study.folder} has no locks by which that could be seen. End it there. "
        f"If it is gone, remove {study.folder / 'sweep.json'}."
    )


def _is_alive(run_dir: Path) -> bool:
    try:
        return RunRecord.load(run_dir).is_alive()
    except ValueError:  # it has no record
        return False


def _is_there(run: PoolRun) -> bool:
    return _is_alive(Path(run.run_dir))


def _is_own(study: StudyFile, run: PoolRun) -> bool:
    return Path(run.run_dir).parent == study.folder / "trials"
