"""One attempt of a run, seen from outside the workers: its directory, its record, who watches it, and how its failures are told."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PlanError, WorkerError
from paceline.events import EventLog, RunFinished, RunStarted
from paceline.launch.local import launch
from paceline.launch.outcome import Outcome, WorkerExit
from paceline.launch.parent import WarmParent
from paceline.monitor.failure import Failure, explain, root
from paceline.monitor.memory import memory_limit_bytes, oom_kills, oom_likely
from paceline.monitor.run_record import RunRecord
from paceline.monitor.watch import Watch
from paceline.plan import Job, Plan
from paceline.plan.job import Assignment

__all__ = ["Attempt", "begin_record", "error_of", "watched_by_thread"]

POLL_S = 0.1


class Attempt:
    """One attempt of a run, seen from the supervisor: its directory, its record, whoever watches it."""

    def __init__(
        self,
        job: Job,
        plan: Plan | None,
        overrides: Sequence[str],
        given: Sequence[str],
        command_started: float,
        *,
        function: tuple[Callable[[Any], Any], Mapping[str, Any]] | None = None,
    ) -> None:
        self.job = job
        self._plan, self._overrides, self._given = plan, tuple(overrides), tuple(given)
        self._command_started = command_started
        self._function = function
        self.run_dir = Path(str(job.run_dir))
        self.number = 0
        self.failures: tuple[Failure, ...] = ()

    @property
    def directory(self) -> Path:
        return self.run_dir / f"attempt_{self.number}"

    def run(self, warm: WarmParent) -> Outcome:
        """Start the workers, watch them to their end, and tell the user how it went."""
        job = self.job
        workers = job.workers or 1
        record = begin_record(self.run_dir, job, workers=workers, plan=self._plan)
        self.number = record.attempt
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._function is not None:
            self._write_function(*self._function)
        outcome = Outcome(state="failed", exit_code=1)
        kills_before = oom_kills()
        log = EventLog(self.directory / "events.jsonl", worker=None)
        watch = Watch(self.run_dir, self.number, workers, job=job)
        try:
            log.emit(run_started(job, self.run_dir, self.number))
            outcome = launch(
                job,
                plan=None if self._plan is None else str(self._plan),
                overrides=self._overrides,
                given=self._given,
                run_dir=self.run_dir,
                attempt=self.number,
                observer=watch,
                command_started=self._command_started,
                warm=warm,
            )
        finally:
            log.emit(
                RunFinished(
                    state=outcome.state, exit_code=outcome.exit_code, duration_s=round(time.time() - self._command_started, 3)
                )
            )
            log.close()
            self.failures = tuple(_seen(exit, oom_kills_before=kills_before) for exit in outcome.failures)
            watch.finish(outcome.state, outcome.exit_code, self.failures)
            record.end_attempt(outcome.state, outcome.exit_code)
        return outcome

    def value(self) -> Any:
        """What worker 0's function returned."""
        import cloudpickle  # only here: the command never needs it

        return cloudpickle.loads((self.directory / "worker_0" / "result.pkl").read_bytes())

    def _write_function(self, function: Callable[[Any], Any], fields: Mapping[str, Any]) -> None:
        import cloudpickle  # only here: the command never needs it

        (self.directory / "program.pkl").write_bytes(cloudpickle.dumps((function, self._plan, dict(fields))))


def begin_record(run_dir: Path, job: Job, *, workers: int, plan: Plan | None) -> RunRecord:
    """Note in the run directory that this process starts its next attempt; PlanError where the directory is in use."""
    try:
        return RunRecord.begin_attempt(
            run_dir, job=dataclasses.asdict(job), workers=workers, plan=None if plan is None else str(plan)
        )
    except ValueError as error:
        raise PlanError(str(error)) from error


@contextlib.contextmanager
def watched_by_thread(assignment: Assignment, job: Job) -> Iterator[None]:
    """Watch the run from a thread beside worker 0, where there is no supervisor: a world that somebody else started."""
    run_dir = Path(assignment.run_dir)
    log = EventLog(run_dir / f"attempt_{assignment.attempt}" / "events.jsonl", worker=None)
    log.emit(run_started(job, run_dir, assignment.attempt))
    watch = Watch(run_dir, assignment.attempt, assignment.workers, job=job, console="plain")
    over = threading.Event()

    def poll() -> None:
        while not over.wait(POLL_S):
            watch.poll()

    thread = threading.Thread(target=poll, name="paceline-watch", daemon=True)
    thread.start()
    state, exit_code = "failed", 1
    try:
        yield
        state, exit_code = "finished", 0
    finally:
        over.set()
        thread.join()
        duration_s = round(time.time() - assignment.command_started, 3)
        log.emit(RunFinished(state=state, exit_code=exit_code, duration_s=duration_s))
        log.close()
        watch.finish(state, exit_code)
        RunRecord.load(run_dir).end_attempt(state, exit_code)


def run_started(job: Job, run_dir: Path, attempt: int) -> RunStarted:
    return RunStarted(
        run_dir=str(run_dir),
        attempt=attempt,
        workers=job.workers or 1,
        hosts=job.hosts,
        program=job.program or "function",
        launcher=job.launcher,
    )


def error_of(failures: Sequence[Failure]) -> WorkerError | PlanError:
    """The exception that tells a caller in Python what went wrong."""
    first = root(failures)
    fields = first.error or {}
    if fields.get("usage"):
        return PlanError(str(fields.get("message", "")))
    return WorkerError(
        explain(failures),
        worker=first.worker,
        host=first.host,
        step=int(fields.get("step", 0)),
        exit_code=first.exit_code,
        traceback=str(fields.get("traceback", "")),
    )


def _seen(exit: WorkerExit, *, oom_kills_before: int | None) -> Failure:
    """A worker's end as the monitor tells it."""
    fields = exit.error or {}
    limit = memory_limit_bytes()
    return Failure(
        worker=exit.worker,
        host=exit.host,
        pid=exit.pid,
        exit_code=exit.exit_code,
        signal=exit.signal,
        error=exit.error,
        step=int(fields.get("step", 0)),
        peak_memory_bytes=exit.peak_memory_bytes,
        memory_limit_bytes=limit,
        oom_likely=oom_likely(
            exit.signal,
            peak_memory_bytes=exit.peak_memory_bytes,
            memory_limit_bytes=limit,
            oom_kills_before=oom_kills_before,
            oom_kills_after=oom_kills(),
        ),
        sent_by_us=exit.sent_by_us,
    )
