"""Records and shows a run that another launcher started, and ends hangs, from a thread beside a worker.

Such a world has no supervisor. Worker 0's thread keeps the run's record and console, and is the hang monitor. On every
other host the thread of its first worker reports the activity of that host's workers through the world's store. On
request it makes workers write their stacks, or ends those that hold up the others:

    doing_k   activity of the workers on the host whose first worker has rank k, once a second
    ask_k     the workers whose stacks are wanted        end_k   the workers to be killed
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.comm.flight_recorder import FILE_NAME, STACK_SIGNAL, read_flight_record
from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW
from paceline.errors import PacelineError, writing
from paceline.events import EventLog, Warned
from paceline.monitor.attempt_end import AttemptEnd
from paceline.monitor.hang.hang_monitor import HangMonitor
from paceline.monitor.records.run_record import RUNNING, RunRecord
from paceline.monitor.watch import Watch
from paceline.plan.job import Assignment, Job
from paceline.private_files import make_run_directory
from paceline.runs.attempt_start import run_started
from paceline.runs.run_loggers import RunLoggers
from paceline.runs.run_uploads import RunUploads

__all__ = ["monitoring_thread", "note_end", "note_failure", "note_left", "reporting_thread"]

POLL_S = 0.1
LOOK_S = 1.0  # between two looks into the store
TELL_S = 1.0  # from the report to the kill: an engine passes on what its workers print, and ends all when one exits
LEAD_S = 10.0  # workers end by themselves when they have waited too long: what is known is reported before that

Hosts = Sequence[Sequence[int]]  # the ranks on each host, the first one's first


class SharedStore(Protocol):
    """The part of torch's Store that is used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@contextlib.contextmanager
def monitoring_thread(
    assignment: Assignment,
    job: Job,
    *,
    record: RunRecord,
    hosts: Hosts,
    store: SharedStore,
    program: str,
    launcher: str,
    loggers: RunLoggers,
    uploads: RunUploads,
) -> Iterator[None]:
    """Watch the run from a thread beside worker 0. `launcher` names what started the workers; `record` is what this
    process has begun.

    How the body ends is how the run ended, unless `note_end` or `note_left` has recorded it before.
    """
    run_dir = Path(assignment.run_dir)
    directory = run_dir / f"attempt_{assignment.attempt}"
    with writing(directory):
        make_run_directory(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        log = EventLog(directory / "events.jsonl", worker=None)
        log.emit(run_started(job, run_dir, assignment.attempt, program=program, launcher=launcher))
    local = _ranks_on_this_host(assignment, hosts)
    watch = Watch(
        run_dir,
        assignment.attempt,
        assignment.workers,
        job=job,
        console="plain",
        local=local,
        more=loggers.sinks(run_dir, assignment.attempt),
    )
    control = _WorkerAccess(directory, log, local=local, hosts=hosts, store=store)
    hang_monitor = HangMonitor(
        directory,
        host=assignment.host,
        local=local,
        control=control,
        say=lambda text: log.emit(Warned(text=text)),
        lead_s=min(LEAD_S, job.timeout_s / 2),
        may_balance=not job.balance,
    )

    def warn(text: str) -> None:
        watch.say(f"warning: {text}")

    def close(state: str, exit_code: int) -> None:
        now = record.now()
        if now.state != RUNNING:  # it is noted already, perhaps by another worker
            state, exit_code = now.state, now.exit_code or 0
        uploads.end(state, log.emit, poll=watch.poll)
        AttemptEnd(directory, log=log, watch=watch, record=now, since=assignment.command_started).close(
            state, exit_code
        )
        loggers.end(state, warn)

    def poll() -> None:
        now = time.monotonic()
        control.listen(hang_monitor, now)
        hang_monitor.poll(now)
        watch.poll()
        loggers.poll(warn)
        uploads.poll(log.emit)
        if control.is_due(now):
            is_doomed = assignment.rank in control.doomed  # this very process does not come to its end by itself
            control.doomed.discard(assignment.rank)
            control.end_doomed()
            if is_doomed:
                close("failed", 1)
                os._exit(1)

    state, exit_code = "failed", 1
    with _polling(poll) as stop:
        try:
            yield
            state, exit_code = "finished", 0
        except KeyboardInterrupt:
            state, exit_code = "stopped", 128 + signal.SIGINT
            raise
        except SystemExit as leaving:
            if not leaving.code:
                state, exit_code = "finished", 0
            elif leaving.code in (PREEMPTED, TOO_FEW):  # noted before, where the record could be read
                state, exit_code = "stopped", int(leaving.code)
            raise
        finally:
            stop()
            close(state, exit_code)


@contextlib.contextmanager
def reporting_thread(assignment: Assignment, *, hosts: Hosts, store: SharedStore) -> Iterator[None]:
    """Report the activity of this host's workers to worker 0, from a thread beside the first of them, and do what it
    asks.
    """
    directory = Path(assignment.run_dir) / f"attempt_{assignment.attempt}"
    local = _ranks_on_this_host(assignment, hosts)
    asked, doomed, doing = (f"{what}_{assignment.rank}" for what in ("ask", "end", "doing"))

    def tell(activities: Sequence[Mapping[str, Any]]) -> None:
        store.set(doing, json.dumps(activities))

    hang_monitor = HangMonitor(
        directory, host=assignment.host, local=local, control=None, say=lambda _: None, send=tell
    )
    seen: dict[str, bytes] = {}
    next_at = 0.0

    def heard(key: str) -> list[int]:
        """The ranks that are newly in the store under `key`."""
        text = store.get(key) if store.check([key]) else b"[]"
        if seen.get(key, b"[]") == text:
            return []
        seen[key] = text
        return [rank for rank in json.loads(text)["workers"] if rank in local]

    def poll() -> None:
        nonlocal next_at
        now = time.monotonic()
        with _store_may_be_gone():
            hang_monitor.poll(now)
            if now < next_at:
                return
            next_at = now + LOOK_S
            for worker in heard(asked):
                hang_monitor.stack_requested(worker)
                _signal(directory, worker, STACK_SIGNAL)
            for worker in heard(doomed):
                _signal(directory, worker, signal.SIGKILL)

    with _polling(poll):
        yield


def note_failure(assignment: Assignment) -> None:
    """Record that the run has failed, on behalf of worker 0, which may be ended before it can."""
    note_end(assignment, "failed", 1)


def note_end(assignment: Assignment, state: str, exit_code: int) -> None:
    """Record in run.json how the run ends, unless that is recorded already."""
    # ValueError: on another host's disk there is no record. OSError: worker 0 will find that out, too, and report it.
    with contextlib.suppress(ValueError, OSError):
        record = RunRecord.load(assignment.run_dir)
        if record.state == RUNNING and record.attempt == assignment.attempt:
            record.end_attempt(state, exit_code)


def note_left(assignment: Assignment, exit_code: int) -> None:
    """Record on worker 0 that all workers have saved and left; this replaces a signal recorded before."""
    if assignment.rank == 0:
        with contextlib.suppress(ValueError):  # removed, or damaged: it is written anew at the end
            record = RunRecord.load(assignment.run_dir)
            if record.attempt == assignment.attempt:
                record.end_attempt("stopped", exit_code)


class _WorkerAccess:
    """How the hang monitor reaches workers: on this host by signals, on others through the store."""

    def __init__(
        self, directory: Path, log: EventLog, *, local: Collection[int], hosts: Hosts, store: SharedStore
    ) -> None:
        self.doomed: set[int] = set()  # hold up the others for longer than they wait
        self._directory, self._log, self._local, self._store = directory, log, local, store
        self._first = {rank: ranks[0] for ranks in hosts for rank in ranks}
        self._others = [ranks[0] for ranks in hosts if ranks[0] not in local]
        self._heard: dict[int, bytes] = {}
        self._count = 0
        self._next_at = 0.0
        self._end_at: float | None = None

    def request_stacks(self, worker: int) -> None:
        if worker in self._local:
            _signal(self._directory, worker, STACK_SIGNAL)
        else:
            self._say("ask", [worker])

    def can_do_without(self, workers: Sequence[int]) -> bool:
        """Engines end a job when one of its workers ends."""
        return False

    def end_hung(self, workers: Sequence[int], error: Mapping[str, Any], *, goes_on: bool) -> None:
        if not self.doomed:
            self._log.emit(Warned(text=f"{error['message']}\n{error['stacks']}"))
            self.doomed.update(workers)
            self._end_at = time.monotonic() + TELL_S

    def is_due(self, now: float) -> bool:
        """Return whether some worker is to be ended and has received the reason."""
        return self._end_at is not None and now >= self._end_at

    def end_doomed(self) -> None:
        """Kill the workers that `end_hung` named; then the others and the engine's job end."""
        self._end_at = None
        for worker in self.doomed & set(self._local):
            _signal(self._directory, worker, signal.SIGKILL)
        others = sorted(self.doomed - set(self._local))
        if others:
            self._say("end", others)

    def listen(self, hang_monitor: HangMonitor, now: float) -> None:
        """Pass on the reports of the other hosts."""
        if now < self._next_at:
            return
        self._next_at = now + LOOK_S
        with _store_may_be_gone():
            for first in self._others:
                key = f"doing_{first}"
                text = self._store.get(key) if self._store.check([key]) else b"[]"
                if text != self._heard.get(first):
                    self._heard[first] = text
                    hang_monitor.receive(json.loads(text), now)

    def _say(self, what: str, workers: Sequence[int]) -> None:
        self._count += 1
        with _store_may_be_gone():
            for first in {self._first[worker] for worker in workers}:
                here = [worker for worker in workers if self._first[worker] == first]
                self._store.set(f"{what}_{first}", json.dumps({"number": self._count, "workers": here}))


@contextlib.contextmanager
def _polling(poll: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Call `poll` from a thread until the body has ended or has called the function that it is given."""
    is_over = threading.Event()

    def turn() -> None:
        while not is_over.wait(POLL_S):
            poll()

    thread = threading.Thread(target=turn, name="paceline-watch", daemon=True)

    def stop() -> None:
        is_over.set()
        thread.join()

    thread.start()
    try:
        yield stop
    finally:
        stop()


@contextlib.contextmanager
def _store_may_be_gone() -> Iterator[None]:
    """Ignore errors of a store whose server has ended: the workers that need it report that."""
    with contextlib.suppress(RuntimeError, PacelineError, ConnectionError):  # RuntimeError: of torch's own stores
        yield


def _signal(directory: Path, worker: int, signum: int) -> None:
    """Send a signal to a worker of this host, by the pid in its files."""
    image = read_flight_record(directory / f"worker_{worker}" / FILE_NAME, with_calls=False)
    if image is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(image.pid, signum)


def _ranks_on_this_host(assignment: Assignment, hosts: Hosts) -> tuple[int, ...]:
    """The ranks on this worker's host."""
    return next(tuple(ranks) for ranks in hosts if assignment.rank in ranks)
