"""Watches one attempt of a run: reads what the workers write, passes it on to the console and every file and endpoint.

The supervisor's loop calls `poll` about five times a second; it costs well under a millisecond when nothing is new,
and starts no thread (the metrics endpoint, where one is asked for, has its own).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from paceline.events import Evaluated, Note, Record, Reported, StepDone, StreamOpened, Warned, WorkerStarted
from paceline.monitor.console import NoConsole, PlainConsole, is_terminal
from paceline.monitor.failure import Failure, explain, headline, root
from paceline.monitor.files import local_path
from paceline.monitor.metrics import MetricsFile
from paceline.monitor.once import Once, tag
from paceline.monitor.output import Output
from paceline.monitor.run_record import RunRecord
from paceline.monitor.steps import Step, StepMerger
from paceline.monitor.stream import Tail, attempt_dir
from paceline.monitor.summary import Summary
from paceline.monitor.tensorboard import TensorBoardFile
from paceline.monitor.wording import closing_table, ending_text, event_line, ready_line
from paceline.plan.job import Job

__all__ = ["Sink", "Watch"]


class Sink(Protocol):
    """Takes everything that happens in a run, in order; one file for each kind."""

    def accept(self, item: Record | Step) -> None:
        """Take an event, or a step as all workers saw it (`StepDone` itself is not passed on)."""
        ...

    def close(self) -> None:
        """Write what is left and let go of everything."""
        ...


class Screen(Sink, Protocol):
    """A sink that people look at."""

    def show(self, text: str) -> None: ...

    def poll(self, now: float) -> None: ...


class Watch:
    """Everything that watches an attempt. Call `poll` often, and `finish` in all cases: it gives the terminal back.

    `local`: the workers whose files this host has; None: all `workers` of the job. `record=False` (hosts that follow a
    head) writes no file of the run: the head does. `explains=False`: somebody else tells the user why the run failed.
    Raises LaunchError where the job's metrics endpoint cannot listen.
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
        record: bool = True,
        explains: bool = True,
    ) -> None:
        self.run_dir, self.attempt = Path(run_dir), attempt
        self._local = frozenset(range(workers) if local is None else local)
        self._record, self._explains = record, explains
        self._screen = _screen(console, sys.stdout if stream is None else stream, self.run_dir, workers, job)
        self._tail = Tail(self.run_dir, attempt)
        self._merger = StepMerger(self._local)
        self._summary = Summary(self.run_dir, attempt=attempt, workers=workers)
        self._tensorboard = TensorBoardFile(self.run_dir / "tensorboard")
        self._sinks: list[Sink] = [self._summary, self._screen]
        if record:
            self._sinks.append(MetricsFile(self.run_dir / "metrics.jsonl"))
        if job.tensorboard and record:
            self._sinks.append(self._tensorboard)
        self._output = Output(
            attempt_dir(self.run_dir, attempt), self._local, everyone=job.show == "all", show=self._screen.show
        )
        self._warnings = Once(self._local, lambda text, said_by: self._screen.show(f"{tag(said_by)} warning: {text}"))
        self._notes = Once(self._local, lambda text, said_by: self._screen.show(text))
        self._started: dict[int, WorkerStarted] = {}
        self._facts: dict[str, Any] | None = None
        self.exit_note = ""  # after `finish`: one sentence on how the attempt ended
        self.failures: tuple[Failure, ...] = ()  # after `finish`: with the step that each worker had reached
        self.metrics_url: str | None = None
        if job.metrics_port is not None and record:
            self._serve_metrics(job.metrics_host, job.metrics_port, workers)

    def poll(self) -> None:
        """Take in what is new and show what is due; returns at once. After `finish` it does nothing."""
        if self._facts is not None:
            return
        now = time.monotonic()
        self._take(self._tail.poll(), now)
        self._give(self._merger.rows())
        self._warnings.release(now)
        self._notes.release(now)
        self._output.poll(now)
        if self._tensorboard in self._sinks:
            with self._dropping(self._tensorboard):
                self._tensorboard.poll(now)
        self._screen.poll(now)

    def say(self, text: str) -> None:
        """Show a sentence of the caller's."""
        self._screen.show(text)

    def finish(self, state: str, exit_code: int, failures: Sequence[Failure] = ()) -> dict[str, Any]:
        """Read all that is left, close everything, write summary.json, say how it went; return the summary.

        `state` is "finished", "failed" or "stopped". The workers must have ended. A second call returns the summary.
        """
        if self._facts is not None:
            return self._facts
        now = time.monotonic()
        self._take(self._tail.poll(limit_bytes=None), now)
        self._give(self._merger.rest())
        self._warnings.release(now, everything=True)
        self._notes.release(now, everything=True)
        self._output.finish(now, failed={failure.worker for failure in failures})
        self.failures = tuple(self._located(failure) for failure in failures)
        for failure in self.failures:
            self._summary.peak_memory(failure.worker, failure.peak_memory_bytes or 0)
        self._tail.close()
        self._screen.close()
        if self.failures and self._explains:
            self._screen.show(f"\n{explain(self.failures)}\n")
        for sink in tuple(self._sinks):
            with self._dropping(sink):
                sink.close()
        if self.metrics_url:
            self._note_url(None)
        self._facts = self._summary.facts(state, exit_code)
        if self._record:
            with self._dropping(self._summary):
                self._summary.write(self._facts)
        self.exit_note = _exit_note(self._facts, self.failures)
        self._screen.show(("" if self.failures and self._explains else "\n") + _closing(self._facts))
        return self._facts

    def _take(self, records: list[Record], now: float) -> None:
        for record in records:
            match record.event:
                case StepDone():
                    self._merger.add(record)
                    continue
                case Evaluated() | Reported() | StreamOpened() if record.worker not in (None, min(self._local)):
                    continue  # equal on all workers (or, for reports between steps, worker 0's word)
                case Note(text=text) if record.worker is not None:
                    self._notes.add(text, record.worker, now)
                case Note(text=text):
                    self._screen.show(text)
                case Warned(text=text) if record.worker is not None:
                    self._warnings.add(text, record.worker, now)
                case Warned(text=text):
                    self._screen.show(f"warning: {text}")
                case WorkerStarted() as started:
                    self._worker_started(started)
                case _:
                    pass
            self._pass_on(record)
            line = event_line(record.event)
            if line:
                self._screen.show(line)

    def _give(self, rows: list[Step]) -> None:
        for row in rows:
            self._pass_on(row)

    def _pass_on(self, item: Record | Step) -> None:
        for sink in tuple(self._sinks):
            with self._dropping(sink):
                sink.accept(item)

    @contextlib.contextmanager
    def _dropping(self, sink: Sink) -> Iterator[None]:
        """Go on without a sink that cannot write any more: a full disk under the metrics must not cost the training."""
        try:
            yield
        except OSError as error:
            self._sinks.remove(sink)
            self._screen.show(f"warning: {type(sink).__name__} is given up, the run goes on without it: {error}")

    def _located(self, failure: Failure) -> Failure:
        """Note the last step of a worker that had no time to tell it itself: a killed one."""
        step = self._merger.last_steps.get(failure.worker, 0)
        return failure if failure.error or failure.step else dataclasses.replace(failure, step=step)

    def _worker_started(self, started: WorkerStarted) -> None:
        self._started[started.rank] = started
        if len(self._started) == len(self._local):
            self._screen.show(ready_line(self._started.values()))

    def _serve_metrics(self, host: str, port: int, workers: int) -> None:
        from paceline.monitor.prometheus import PrometheusEndpoint  # 60 ms that most runs need not pay

        endpoint = PrometheusEndpoint(host, port, workers=workers)
        self._sinks.append(endpoint)
        self._note_url(endpoint.url)
        self._screen.show(f"metrics are served at {endpoint.url}")

    def _note_url(self, url: str | None) -> None:
        self.metrics_url = url
        if (self.run_dir / "run.json").exists():
            RunRecord.load(self.run_dir).changed(metrics_url=url)


def _screen(kind: str, stream: TextIO, run_dir: Path, workers: int, job: Job) -> Screen:
    if kind not in ("auto", "plain", "none"):
        raise ValueError(f"console={kind!r}: it must be 'auto', 'plain' or 'none'")
    if kind == "none":
        return NoConsole()
    if kind == "auto" and is_terminal(stream) and job.launcher != "inline":  # inline: the debugger needs the terminal
        from paceline.monitor.live import LiveConsole

        live = LiveConsole(stream, run_dir=run_dir, workers=workers, max_steps=job.max_steps)
        if live.can_draw:
            return live
    return PlainConsole(stream)


def _exit_note(facts: dict[str, Any], failures: Sequence[Failure]) -> str:
    return headline(root(failures)) if failures else ending_text(facts)


def _closing(facts: dict[str, Any]) -> str:
    """The closing table; for a run that failed before its first step only where its logs are."""
    if facts["steps"] or facts["state"] == "finished":
        return closing_table(facts)
    return f"{facts['state']} before the first step; logs are in {local_path(facts['log_dir'])}"
