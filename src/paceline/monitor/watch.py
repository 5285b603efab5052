"""Watches one attempt of a run: reads what the workers write, and passes it to the console, files and endpoints.

The supervisor's loop calls `poll` about five times a second. A call costs well under a millisecond when nothing is new.
No thread is started; only the Prometheus endpoint has its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from paceline.errors import RunFileError, writing
from paceline.events import (
    Evaluated,
    Note,
    Record,
    Regrouped,
    Reported,
    Restarted,
    SpikeSeen,
    StepDone,
    StepsMerged,
    StreamOpened,
    Warned,
    WeightsDiffer,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.console.closing_table import closing_table, ending_text
from paceline.monitor.console.deduplication import Deduplicator, tag
from paceline.monitor.console.event_lines import EXIT_CAUSES, event_line, ready_line
from paceline.monitor.console.notebook import NotebookConsole, find_display
from paceline.monitor.console.plain import PlainConsole, SilentConsole, is_terminal
from paceline.monitor.console.worker_output import WorkerOutput
from paceline.monitor.export.metrics_jsonl import MetricsFile
from paceline.monitor.export.summary_json import Summary
from paceline.monitor.export.tensorboard import TensorBoardFile
from paceline.monitor.records.attempt_history import repeated_steps_text
from paceline.monitor.records.damaged_lines import DamagedLines
from paceline.monitor.records.event_reader import EventTail, attempt_dir
from paceline.monitor.records.failure import Failure, explain, headline, root_cause
from paceline.monitor.records.run_files import local_path
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.records.steps import Step, StepMerger
from paceline.plan.job import Job
from paceline.plan.program_tasks import task_names, tasks_text
from paceline.units import printable

if TYPE_CHECKING:
    from paceline.monitor.export.prometheus import PrometheusEndpoint

__all__ = ["Sink", "Watch"]


class Sink(Protocol):
    """Takes everything that happens in a run, in order; one file for each kind."""

    def accept(self, item: Record | Step) -> None:
        """Take an event, or a step as all workers saw it (`StepDone` itself is not passed on)."""
        ...

    def close(self) -> None:
        """Write what is left and let go of everything; this and `accept` raise RunFileError where they cannot write."""
        ...


class Screen(Sink, Protocol):
    """A sink that people look at."""

    def show(self, text: str) -> None: ...

    def poll(self, now: float) -> None: ...

    def follow(self, local: Collection[int]) -> None: ...

    def ended(self, state: str) -> None:
        """The attempt has ended so; "running": the next one begins at once."""
        ...


class Watch:
    """Everything that watches an attempt. Call `poll` often, and `finish` in all cases: it gives the terminal back.

    `local`: the workers whose files this host has; None: all `workers` of the job. Those that are added later are this
    host's where they say that they are on `host`. `record=False` (hosts that follow a coordinator) writes no file of
    the run: the coordinator does. `explains=False`: another process reports why the run failed. Raises LaunchError
    where the job's metrics endpoint cannot listen.
    """

    def __init__(
        self,
        run_dir: Path | str,
        attempt: int,
        workers: int,
        *,
        job: Job,
        console: Literal["auto", "plain", "none"] = "auto",
        stream: TextIO | None = None,
        local: Collection[int] | None = None,
        host: str = "",
        record: bool = True,
        explains: bool = True,
        goes_on: bool = False,
        shows_run: bool = True,
        more: Sequence[Sink] = (),
        screen: Screen | None = None,
        closing_rows: Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]] | None = None,
    ) -> None:
        """`goes_on`: another process watched the attempt until now, and showed what has happened. `shows_run=False`:
        the console shows only what this host's workers print and warn of; another host's shows the run. `more`: sinks
        beside those of the job, where this process records the run. `screen`: of the
        attempt before. `closing_rows`: more rows of the closing table,
        from the summary; called where this process records the run, and it does not go on."""
        self.run_dir, self.attempt = Path(run_dir), attempt
        self._local = frozenset(range(workers) if local is None else local)
        self._here = self._local if local is None else local  # grows when this host is given workers later
        self._tells_of_all = len(self._local) == workers  # also of workers that are added later
        self._host = host
        self._members = set(range(workers))  # of the whole job
        self._newcomers: set[int] = set()  # that have started, and are members when they have taken a step
        self._finished: dict[int, int] = {}  # workers that have left, after these steps
        self._record, self._explains, self._is_fresh = record, explains, job.fresh
        self._saves_itself = job.run_as == "horovod"
        self._screen = screen or _screen(
            console, sys.stdout if stream is None else stream, self.run_dir, workers, self._local, job
        )
        self._tail = EventTail(self.run_dir, attempt)
        self._merger = StepMerger(self._local)
        self._summary = Summary(self.run_dir, attempt=attempt, workers=workers, max_steps=job.max_steps)
        self._tensorboard = TensorBoardFile(self.run_dir / "tensorboard")
        self._problems: list[str] = []  # that threads of files have said, to be shown
        self._sinks: list[Sink] = [self._summary, self._screen]
        if record:
            of_program = job.run_for is not None
            self._sinks.append(
                MetricsFile(
                    self.run_dir / "metrics.jsonl", attempt=attempt, say=self._problems.append, of_program=of_program
                )
            )
        if job.tensorboard and record:
            self._sinks.append(self._tensorboard)
        if record:
            self._sinks += more
        names = () if job.servers is None else task_names(workers, job.servers)
        self._output = WorkerOutput(
            attempt_dir(self.run_dir, attempt),
            self._local,
            everyone=job.show == "all",
            show=self._show_output,
            names=names,
            hides_information=job.run_for is not None,
        )
        self.is_quiet = False  # another process shows, or has shown, what is read
        self._shows_run, self._closing_rows = shows_run, closing_rows
        self._tasks = "" if job.run_for is None else tasks_text(workers, job.servers)
        self._warnings = Deduplicator(
            self._local, lambda text, said_by: self._show(f"{tag(said_by, names)} warning: {text}")
        )
        self._notes = Deduplicator(self._local, lambda text, said_by: self._show(text))
        self._started: dict[int, WorkerStarted] | None = {}  # None: all have started, and that was shown
        self._facts: dict[str, Any] | None = None
        self.exit_note = ""  # after `finish`: one sentence on how the attempt ended
        self.failures: tuple[Failure, ...] = ()  # after `finish`: with the step that each worker had reached
        self.unwritten: dict[str, str] = {}  # files of the run that are not whole, and why
        self._told = ""  # what the user has read of that
        self._is_ending = self._is_handed_over = False
        self._begins_by: Restarted | None = None  # until its first step is committed
        self._endpoint: PrometheusEndpoint | None = None
        self.metrics_url: str | None = None
        if job.metrics_port is not None and record:
            self._serve_metrics(job.metrics_host, job.metrics_port, workers)
        if goes_on:
            self._read_quietly()

    def _read_quietly(self) -> None:
        """Read what another process has shown before: the files of the run are written anew from it."""
        now = time.monotonic()
        self.is_quiet = True
        self._take(self._tail.poll(limit_bytes=None), now)
        self._give(self._merger.rows())
        self._output.poll(now)
        self._warnings.release(now, everything=True)
        self._notes.release(now, everything=True)
        self.is_quiet = False

    @property
    def lasting_screen(self) -> Screen | None:
        """The screen, where the next attempt is to go on with it: a notebook's cell shows one display for a run."""
        return self._screen if isinstance(self._screen, NotebookConsole) else None

    def hand_over(self) -> None:
        """Write nothing of the run any more: another process watches it now."""
        self._sinks = [self._screen]
        self._record, self._is_handed_over = False, True
        self.metrics_url = None  # what run.json says of it is the other one's

    def poll(self) -> None:
        """Take in what is new and show what is due; returns at once. After `finish` it does nothing."""
        if self._facts is not None:
            return
        now = time.monotonic()
        self._take(self._tail.poll(), now)
        self._warnings.release(now)
        self._notes.release(now)
        self._give(self._merger.rows())
        self._output.poll(now)
        while self._problems:
            self._show(f"warning: {self._problems.pop(0)}")
        if self._tensorboard in self._sinks:
            with self._dropping(self._tensorboard):
                self._tensorboard.poll(now)
        self._screen.poll(now)

    def _show(self, text: str) -> None:
        self._show_output(printable(text))

    def _show_output(self, text: str) -> None:
        if not self.is_quiet:
            self._screen.show(text)

    def _show_of_run(self, text: str) -> None:
        """Show what is the whole run's, and not this host's."""
        if self._shows_run:
            self._show(text)

    def say(self, text: str) -> None:
        """Show a sentence of the caller's."""
        self._show(text)

    def not_written(self, error: RunFileError, *, is_book: bool = True) -> None:
        """Say that a file could not be written, once for each reason; where it `is_book`, the run's are not whole."""
        if is_book:
            self.unwritten[local_path(error.path)] = error.reason
        if error.reason not in self._told:
            self._told += error.reason
            self._show(f"warning: {error}" + ("" if self._is_ending else " The run goes on without it."))

    def catch_up(self) -> int:
        """Read all that the workers have written; returns the last step that any of them has recorded."""
        self._take(self._tail.poll(limit_bytes=None), time.monotonic())
        return max(self._merger.last_steps.values(), default=0)

    def finish(
        self, state: str, exit_code: int, failures: Sequence[Failure] = (), *, goes_on: bool = False
    ) -> dict[str, Any]:
        """Read all that is left, close everything, write summary.json, say how it went; return the summary.

        `state` is "finished", "failed" or "stopped". The workers must have ended. A second call returns the summary.
        Where a file of the run is not whole, a good exit code becomes 1. `goes_on`: the next attempt begins at once,
        and says what became of this one.
        """
        if self._facts is not None:
            return self._facts
        now = time.monotonic()
        self._is_ending = True
        self._take(self._tail.poll(limit_bytes=None), now)
        self._warnings.release(now, everything=True)
        self._notes.release(now, everything=True)
        self._give(self._merger.rest())
        self._output.finish(now, failed=set() if goes_on else {failure.worker for failure in failures})
        self.failures = self.located(failures)
        for failure in self.failures:
            self._summary.peak_memory(failure.worker, failure.peak_memory_bytes or 0)
        self._tail.close()
        self._screen.ended("running" if goes_on else state)
        self._screen.close()
        if self.failures and self._explains and self._shows_run and not goes_on:
            explained = explain(self.failures)
            self._told += "\n".join([explained, *(str((each.error or {}).get("message")) for each in self.failures)])
            self._show(f"\n{explained}\n")
        for sink in tuple(self._sinks):
            with self._dropping(sink):
                sink.close()
        if self.metrics_url:
            self._note_url(None)
        self._facts = self._summary.facts(state, exit_code or int(bool(self.unwritten)))
        if self._record:
            with self._dropping(self._summary):
                self._summary.write(self._facts)
        self.exit_note = _exit_note(self._facts, self.failures)
        if not goes_on and not self._is_handed_over:
            more = self._closing_rows(self._facts) if self._closing_rows is not None and self._record else ()
            self._show_of_run(
                ("" if self.failures and self._explains else "\n")
                + _closing(self._facts, is_head=self._record, more=more)
            )
        return self._facts

    def located(self, failures: Sequence[Failure]) -> tuple[Failure, ...]:
        """Note the last steps of workers that had no time to report them."""
        return tuple(map(self._located, failures))

    def _take(self, records: list[Record], now: float) -> None:
        for record in records:
            match record.event:
                case StepDone():
                    self._note_at_work(record.worker, record.event.step)
                    self._merger.add(record)
                    continue
                case StepsMerged(
                    first_step=first, last_step=last
                ):  # this process was stopped, and reads again long after
                    if record.worker not in (None, self._speaker):
                        continue
                    self._give(self._merger.pass_over(first, last))
                case Evaluated() | Reported() | StreamOpened() if record.worker not in (None, self._speaker):
                    continue  # equal on all workers (or, for reports between steps, the first one's word)
                case SpikeSeen() | WeightsDiffer() if record.worker not in (None, self._speaker):
                    continue
                case WorkerLost(rank=worker) if worker in self._members:
                    self._newcomers.discard(worker)
                    self._pass_on(record)
                    continue  # shown once the others have formed a new generation
                case Note(text=text) if record.worker is not None:
                    self._notes.add(text, record.worker, now)
                case Note(text=text):
                    self._show_of_run(text)
                case Warned(text=text) if record.worker is not None:
                    self._warnings.add(text, record.worker, now)
                case Warned(text=text):
                    self._show_of_run(f"warning: {text}")
                case Restarted() as restarted:
                    self._begins_by = restarted
                case WorkerStarted() as started:
                    self._worker_started(started)
                case Regrouped() | WorkerJoined() | WorkerLeft() | WorkerFinished() as change:
                    self._note_members(change)
                case _:
                    pass
            self._pass_on(record)
            line = event_line(record.event)
            if line:
                self._show_of_run(line)

    @property
    def _speaker(self) -> int:
        """Of what all workers say alike, this one's word is taken: the first member of this host."""
        return min(self._members & self._local, default=min(self._local, default=0))

    def _note_members(self, change: Regrouped | WorkerJoined | WorkerLeft | WorkerFinished) -> None:
        match change:
            case Regrouped(members=members):
                self._members = set(members)
                self._merger.regroup(self._members & self._local)
            case WorkerJoined(rank=worker):
                self._count_in(worker)
            case WorkerLeft(rank=worker):
                self._finished.pop(worker, None)
                self._members.discard(worker)
                self._merger.leave(worker)
            case WorkerFinished(rank=worker, step=step):
                self._finished[worker] = step
                self._merger.leave(worker)
        self._follow()

    def _note_at_work(self, worker: int | None, step: int) -> None:
        """Count in a worker that was added while the run goes on, and count out one that left early."""
        if worker in self._newcomers:
            self._count_in(worker)
            self._follow()
        gone = {rank for rank, last_step in self._finished.items() if last_step < step}
        if gone:
            self._finished = {rank: last for rank, last in self._finished.items() if rank not in gone}
            self._members -= gone
            self._follow()

    def _count_in(self, worker: int) -> None:
        self._newcomers.discard(worker)
        self._members.add(worker)
        if worker in self._local:
            self._merger.join(worker)

    def _follow(self) -> None:
        """Have console and metrics cover the workers that take part, and those that are about to."""
        here = self._members & self._local
        self._warnings.expect(here)
        self._notes.expect(here)
        self._output.follow((self._members | self._newcomers) & self._local)
        self._screen.follow(self._local)
        if self._endpoint is not None:
            self._endpoint.follow(self._members)

    def _give(self, rows: list[Step]) -> None:
        for row in rows:
            if self._begins_by is not None:
                after_s = row.time - self._begins_by.lost_at
                self._show_of_run(f"step {row.step} is committed, {after_s:.2f} s after the loss")
                self._begins_by = None
            self._pass_on(row)

    def _pass_on(self, item: Record | Step) -> None:
        for sink in tuple(self._sinks):
            if sink is self._screen and (self.is_quiet or not self._shows_run):
                continue
            with self._dropping(sink):
                sink.accept(item)

    @contextlib.contextmanager
    def _dropping(self, sink: Sink) -> Iterator[None]:
        """Go on without a sink that cannot write any more: a full disk under the metrics must not cost the training."""
        try:
            yield
        except RunFileError as error:
            self._sinks.remove(sink)
            self.not_written(error, is_book=sink is not self._tensorboard)

    def _located(self, failure: Failure) -> Failure:
        """Note the last step of a worker that had no time to report it: a killed one, or one on a lost host, whose
        events are there, and which was not further than the others."""
        if failure.step or (failure.error and failure.error.get("step") is not None):
            return failure
        return dataclasses.replace(failure, step=self._merger.committed_by(failure.worker))

    def _worker_started(self, started: WorkerStarted) -> None:
        worker = started.rank
        if self._tells_of_all or started.host == self._host:  # hosts that share a disk see each other's workers
            self._local |= {worker}
        if worker not in self._members:
            self._newcomers.add(worker)
            self._follow()
        # Successors of lost ones start when all were ready.
        if self._started is not None and worker in self._local:
            self._started[worker] = started
            if self._started.keys() >= self._local.union(self._here):
                self._show_of_run(ready_line(self._started.values(), tasks=self._tasks))
                self._started = None
                self._report_lost_steps(started.resumed_from_step)

    def _report_lost_steps(self, resumed_from: int) -> None:
        """Show which steps of earlier attempts are taken again; with `fresh` that was asked for, and what a program has
        saved by itself is not known."""
        if (
            self._record and not (self._is_fresh or self._saves_itself) and self._begins_by is None
        ):  # that says it itself
            unreadable = DamagedLines()
            text = repeated_steps_text(
                self.run_dir, before_attempt=self.attempt, resumed_from=resumed_from, unreadable=unreadable
            )
            for said in (*(f"warning: {each}" for each in unreadable.texts()), *filter(None, [text])):
                self._show(said)

    def _serve_metrics(self, host: str, port: int, workers: int) -> None:
        from paceline.monitor.export.prometheus import PrometheusEndpoint  # 60 ms that most runs need not pay

        endpoint = PrometheusEndpoint(host, port, workers=workers)
        self._endpoint = endpoint
        self._sinks.append(endpoint)
        self._note_url(endpoint.url)
        self._show(f"metrics are served at {endpoint.url}")

    def _note_url(self, url: str | None) -> None:
        self.metrics_url = url
        if os.path.exists(self.run_dir / "run.json"):
            try:
                with writing(self.run_dir / "run.json"):
                    RunRecord.load(self.run_dir).changed(metrics_url=url)
            except RunFileError as error:
                self.not_written(error)
            except ValueError as error:  # damaged meanwhile: the end of the attempt writes it anew
                self._show(f"warning: {error}")


def _screen(kind: str, stream: TextIO, run_dir: Path, workers: int, local: Collection[int], job: Job) -> Screen:
    if kind not in ("auto", "plain", "none"):
        raise ValueError(f"console={kind!r}: it must be 'auto', 'plain' or 'none'")
    if kind == "none":
        return SilentConsole()
    if kind == "auto" and is_terminal(stream) and job.launcher != "inline":  # inline: the debugger needs the terminal
        from paceline.monitor.console.live import LiveConsole

        live = LiveConsole(stream, run_dir=run_dir, workers=workers, local=local, max_steps=job.max_steps)
        if live.can_draw:
            return live
    display = find_display() if kind == "auto" and job.launcher != "inline" else None
    if display is not None:
        return NotebookConsole(display, run_dir=run_dir, workers=workers, local=local, max_steps=job.max_steps)
    return PlainConsole(stream, max_steps=job.max_steps)


def _exit_note(facts: dict[str, Any], failures: Sequence[Failure]) -> str:
    return headline(root_cause(failures)) if failures else ending_text(facts)


def _closing(facts: dict[str, Any], *, is_head: bool, more: Sequence[tuple[str, str]]) -> str:
    """The closing table; for a run that failed before its first step only where its logs are."""
    if facts["steps"] or facts["tasks"] or facts["state"] == "finished":
        return closing_table(facts, is_head=is_head, more=more)
    cause = EXIT_CAUSES.get(facts["exit_code"])
    why = f" ({cause})" if cause else ""
    began = f" after step {facts['resumed_from_step']}" if facts["resumed_from_step"] else ""
    return f"{facts['state']} before the first step{began}{why}; logs are in {local_path(facts['log_dir'])}"
