"""One attempt of a run, seen from outside the workers: its directory, its record, who watches it, how it failed.

A supervisor has an `Attempt`; in a world that somebody else started there is none, and worker 0 is `watched_by_thread`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.errors import LaunchError, PlanError, WorkerError, writing
from paceline.events import Event, EventLog, RunStarted, Warned
from paceline.launch.head import Head
from paceline.launch.local import launch
from paceline.launch.member import Member
from paceline.launch.outcome import Outcome, WorkerExit
from paceline.launch.parent import WarmParent
from paceline.launch.place import deal
from paceline.monitor.books import Books
from paceline.monitor.failure import Failure, explain, root
from paceline.monitor.lookout import Lookout, OwnReach
from paceline.monitor.memory import memory_limit_bytes, oom_kills, oom_likely
from paceline.monitor.process import this_host
from paceline.monitor.run_record import RUNNING, RunRecord
from paceline.monitor.watch import Watch
from paceline.plan import Job, Plan
from paceline.plan.job import Assignment

__all__ = ["Attempt", "begin_record", "error_of", "name_of", "note_failure", "watched_by_thread"]

POLL_S = 0.1
LEAD_S = 5.0  # where workers end by themselves when they have waited too long: what is known is told before that


class Attempt:
    """One attempt of a run, seen from the supervisor of one host: its directory, its record, whoever watches it.

    It is the observer of its own launch. Nothing is written before all hosts have met: only then is it known which of
    them is the head, which keeps the books of the whole run; the others follow its directory and its count.
    """

    def __init__(
        self,
        job: Job,
        *,
        plan: Plan | None,
        overrides: Sequence[str] = (),
        given: Sequence[str] = (),
        command_started: float,
        follow: bool = False,
        function: tuple[Callable[[Any], Any], Mapping[str, Any]] | None = None,
    ) -> None:
        """`job` has its workers and its run_dir; with `follow` the latter gives way to the head's.

        `function` is the function of `paceline.run(fn)` with the Job fields of that call.
        """
        self.job = job
        self._plan, self._overrides, self._given = plan, tuple(overrides), tuple(given)
        self._command_started = command_started
        self._follow, self._function = follow, function
        self.run_dir = Path(str(job.run_dir))
        self.number = 0
        self.is_head = True
        self.failures: tuple[Failure, ...] = ()
        self._record: RunRecord | None = None
        self._log: EventLog | None = None
        self._watch: Watch | None = None
        self._lookout: Lookout | None = None

    @property
    def directory(self) -> Path:
        return self.run_dir / f"attempt_{self.number}"

    def run(self, warm: WarmParent) -> Outcome:
        """Start the workers, watch them to their end, and tell the user how it went."""
        kills_before = oom_kills()
        outcome = Outcome(state="failed", exit_code=1)
        try:
            outcome = launch(
                self.job,
                plan=None if self._plan is None else str(self._plan),
                overrides=self._overrides,
                given=self._given,
                run_dir=self.run_dir,
                attempt=next_attempt(self.run_dir),
                observer=self,
                met=self._begin,
                command_started=self._command_started,
                warm=warm,
            )
        except (LaunchError, PlanError):
            outcome = dataclasses.replace(outcome, exit_code=2)
            raise
        finally:
            seen = tuple(_seen(exit, oom_kills_before=kills_before) for exit in outcome.failures)
            outcome = dataclasses.replace(outcome, exit_code=self._end(outcome, seen))
        return outcome

    def poll(self) -> None:
        """Take in what the workers have written (the launch calls it)."""
        if self._lookout is not None:
            self._lookout.poll(time.monotonic())
        if self._watch is not None:
            self._watch.poll()

    def say(self, text: str) -> None:
        """Show a sentence; while the hosts are still meeting there is no console yet."""
        if self._watch is not None:
            self._watch.say(text)
        else:
            print(f"paceline: {text}", flush=True)

    def emit(self, event: Event) -> None:
        """Take down what has happened; only the head keeps the run's record."""
        if self._log is not None:
            self._log.emit(event)

    def value(self) -> Any:
        """What worker 0's function returned; None on the other hosts, which do not have it."""
        if not self.is_head:
            return None
        import cloudpickle  # only here: the command never needs it

        return cloudpickle.loads((self.directory / "worker_0" / "result.pkl").read_bytes())

    def _begin(self, side: Head | Member) -> Path:
        """All hosts are there: open the books. Returns the run's directory on this host; RunFileError where it cannot
        be written."""
        self.number, self.is_head = side.attempt, side.host_index == 0
        if self._follow and not self.is_head:
            self.run_dir = Path(side.run_dir)
        workers = self.job.workers or 1
        if self.is_head:
            self._record = begin_record(self.run_dir, self.job, workers=workers, plan=self._plan)
            if self._record.attempt != self.number:
                raise PlanError(f"{str(self.run_dir)!r} was used by another run meanwhile: start the job again.")
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._function is not None:
                self._write_function(*self._function)
            if self.is_head:
                self._log = EventLog(self.directory / "events.jsonl", worker=None)
                self._log.emit(self._started())
        local = None if self.job.hosts == 1 else deal(workers, self.job.hosts)[side.host_index]
        self._watch = Watch(
            self.run_dir,
            self.number,
            workers,
            job=self.job,
            local=local,
            record=self.is_head,
            explains=self._function is None,  # otherwise the exception of `paceline.run(fn)` does
        )
        if self.job.launcher != "inline":  # there a debugger keeps everybody waiting, on purpose
            self._lookout = self._looking_out(side, local)
        return self.run_dir

    def _looking_out(self, side: Head | Member, local: Collection[int] | None) -> Lookout:
        """Whoever looks out for hangs: on the head; elsewhere it only tells the head what it sees."""

        def say(text: str) -> None:
            self.emit(Warned(text=text))

        if isinstance(side, Head):
            lookout = Lookout(self.directory, host=side.host, local=local, reach=side, say=say)
            side.heard_doing = lookout.heard
        else:
            lookout = Lookout(self.directory, host=side.host, local=local, reach=None, say=say, tell=side.tell_doing)
            side.before_stack = lookout.note_asked
        return lookout

    def _end(self, outcome: Outcome, failures: tuple[Failure, ...]) -> int:
        """Close the books, as far as they were opened; returns the exit status."""
        books = Books(
            self.directory, log=self._log, watch=self._watch, record=self._record, since=self._command_started
        )
        if self._lookout is not None:
            failures = self._lookout.explained(failures)
        exit_code = books.close(outcome.state, outcome.exit_code, failures)
        if self._watch is not None:
            self.failures = self._watch.failures
        return exit_code

    def _started(self) -> RunStarted:
        program = self.job.program
        if not program and self._function is not None:
            program = name_of(self._function[0])
        return run_started(self.job, self.run_dir, self.number, program=program, launcher=self.job.launcher)

    def _write_function(self, function: Callable[[Any], Any], fields: Mapping[str, Any]) -> None:
        import cloudpickle  # only here: the command never needs it

        program = self.directory / "program.pkl"
        temporary = program.with_name(f".{program.name}.{this_host()}.{os.getpid()}")  # hosts may share the directory
        temporary.write_bytes(cloudpickle.dumps((function, self._plan, dict(fields))))
        temporary.replace(program)


def next_attempt(run_dir: Path) -> int:
    """The number of the next attempt in this directory; PlanError where the directory is in use."""
    try:
        return RunRecord.next_attempt(run_dir)
    except ValueError as error:
        raise PlanError(str(error)) from error
    except OSError as error:
        raise _unusable(run_dir, error) from error


def begin_record(run_dir: Path, job: Job, *, workers: int, plan: Plan | None) -> RunRecord:
    """Note in the run directory that this process starts its next attempt; PlanError where the directory is in use."""
    try:
        return RunRecord.begin_attempt(
            run_dir, job=dataclasses.asdict(job), workers=workers, plan=None if plan is None else str(plan)
        )
    except ValueError as error:
        raise PlanError(str(error)) from error
    except OSError as error:
        raise _unusable(run_dir, error) from error


def _unusable(run_dir: Path, error: OSError) -> PlanError:
    return PlanError(
        f"cannot use {run_dir} as the run's directory: {error.strerror}. Choose another with run_dir (--run-dir)."
    )


@contextlib.contextmanager
def watched_by_thread(
    assignment: Assignment, job: Job, *, local: Collection[int], program: str, launcher: str
) -> Iterator[None]:
    """Watch the run from a thread beside worker 0, where there is no supervisor: a world that somebody else started.

    `local` are the workers of this host, `launcher` is who started them. SIGTERM ends the body with SystemExit, so that
    the books are closed, unless the program itself has a use for that signal.
    """
    run_dir = Path(assignment.run_dir)
    directory = run_dir / f"attempt_{assignment.attempt}"
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        log = EventLog(directory / "events.jsonl", worker=None)
        log.emit(run_started(job, run_dir, assignment.attempt, program=program, launcher=launcher))
    watch = Watch(run_dir, assignment.attempt, assignment.workers, job=job, console="plain", local=local)
    lookout = Lookout(
        directory,
        host=assignment.host,
        local=local,
        reach=OwnReach(directory, log),
        say=lambda text: log.emit(Warned(text=text)),
        lead_s=min(LEAD_S, job.timeout_s / 2),
    )
    state, exit_code = "failed", 1
    with _Sigterm() as sigterm:

        def poll() -> None:
            while not sigterm.is_over:
                if sigterm.wait(POLL_S):  # mpirun leaves a quarter of a second: what matters is noted at once
                    note_end(assignment, "stopped", 128 + signal.SIGTERM)
                lookout.poll(time.monotonic())
                watch.poll()

        thread = threading.Thread(target=poll, name="paceline-watch", daemon=True)
        thread.start()
        try:
            yield
            state, exit_code = "finished", 0
        except (KeyboardInterrupt, _Terminated) as stop:
            signum = signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT
            state, exit_code = "stopped", 128 + signum
            raise
        except SystemExit as leaving:
            if not leaving.code:
                state, exit_code = "finished", 0
            raise
        finally:
            sigterm.hold()
            thread.join()
            record = RunRecord.load(run_dir)
            if record.state != RUNNING:  # another worker has failed, and this one was ended because of it
                state, exit_code = record.state, record.exit_code or 0
            books = Books(directory, log=log, watch=watch, record=record, since=assignment.command_started)
            books.close(state, exit_code)


def note_failure(assignment: Assignment) -> None:
    """Note that the run has failed, on behalf of worker 0, which may be ended before it can."""
    note_end(assignment, "failed", 1)


def note_end(assignment: Assignment, state: str, exit_code: int) -> None:
    """Note in run.json how the run ends, where that is not noted already."""
    # ValueError: on another host's disk there is no record. OSError: worker 0 will find that out, too, and tell.
    with contextlib.suppress(ValueError, OSError):
        record = RunRecord.load(assignment.run_dir)
        if record.state == RUNNING and record.attempt == assignment.attempt:
            record.end_attempt(state, exit_code)


class _Terminated(SystemExit):
    """SIGTERM has come."""


class _Sigterm:
    """While entered, SIGTERM raises `_Terminated` in the main thread; after `hold`, it takes effect at the end.

    The main thread may be waiting for a peer, deep in a library. `wait`, in another thread, hears of the signal at
    once. Nothing is changed where the program has a use of its own for the signal, or outside of the main thread.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._ours = self._held = self._came = self.is_over = False
        self._heard, self._bell = socket.socketpair()  # Python writes the number of each signal to the bell
        self._bell.setblocking(False)

    def __enter__(self) -> _Sigterm:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._ours = in_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._ours:
            signal.signal(signal.SIGTERM, self._terminated)
            before = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
            if before != -1:  # an event loop of the program's is listening
                signal.set_wakeup_fd(before)
            os.register_at_fork(after_in_child=self._forget)  # a child's signals are its own
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._forget()
        self._bell.close()
        self._heard.close()
        if self._came:
            os.kill(os.getpid(), signal.SIGTERM)

    def hold(self) -> None:
        """From now on something is being done that must come to its end; `wait` returns at once."""
        self._held = self.is_over = True
        self._bell.send(b"\0")

    def wait(self, limit_s: float) -> bool:
        """Wait for a signal; return whether it was SIGTERM. For one thread that is not the main one."""
        ready, _, _ = select.select([self._heard], [], [], limit_s)
        return bool(ready) and signal.SIGTERM in self._heard.recv(4096)

    def _forget(self) -> None:
        """Hear no more signals."""
        if self._bell.fileno() == -1:
            return
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._bell.fileno()):
            signal.set_wakeup_fd(before)
        self._bell.close()

    def _terminated(self, signum: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked by the program: not a worker, and with nothing to close
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif self._held:
            self._came = True
        else:
            raise _Terminated(128 + signum)


def run_started(job: Job, run_dir: Path, attempt: int, *, program: str, launcher: str) -> RunStarted:
    return RunStarted(
        run_dir=str(run_dir),
        attempt=attempt,
        workers=job.workers or 1,
        hosts=job.hosts,
        program=program,
        launcher=launcher,
    )


def name_of(function: Callable[..., Any]) -> str:
    """The function's qualified name, with its module where that is not the program itself."""
    inner = function.func if isinstance(function, functools.partial) else function
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    module = getattr(inner, "__module__", "__main__")
    return name if module in ("__main__", "__mp_main__", None) else f"{module}.{name}"


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
