"""Ends an attempt on disk: writes the supervisor's last events, the summary and `run.json`.

Each file is written even where another one fails, and what could not be written is reported. A full disk must not leave
a run that claims to be running.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline import clock
from paceline.errors import RunFileError, writing
from paceline.events import Event, EventLog, RunFinished, WorkerFailed
from paceline.monitor.records.failure import Failure, headline, is_consequence
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.watch import Watch

__all__ = ["AttemptEnd"]


class AttemptEnd:
    """What is closed when an attempt ends, whether or not the disk still takes it."""

    def __init__(
        self,
        directory: Path,
        *,
        log: EventLog | None,
        watch: Watch | None,
        record: RunRecord | None,
        since: float,
    ) -> None:
        """`directory` is the attempt's; what was not opened is None; `since`, clock.now(): the user's command began."""
        self._log_path = directory / "events.jsonl"
        self._log, self._watch, self._record, self._since = log, watch, record, since
        self._unreported: list[RunFileError] = []

    def close(self, state: str, exit_code: int, failures: tuple[Failure, ...] = (), *, goes_on: bool = False) -> int:
        """Write all that is left; return the exit status, 1 for a good run whose files are incomplete.

        `goes_on`: the next attempt begins at once, shows this one's end, and notes it in the record.
        """
        try:
            if self._watch is not None:
                self._watch.poll()
                failures = self._watch.located(failures)
            self._emit(*(_worker_failed(failure, follows=is_consequence(failure, failures)) for failure in failures))
            if self._watch is not None:
                exit_code = self._watch.finish(state, exit_code, failures, goes_on=goes_on)["exit_code"]
            exit_code = self._report_unwritten(exit_code)
            duration_s = round(clock.now() - self._since, 3)
            self._emit(RunFinished(state=state, exit_code=exit_code, duration_s=duration_s))
            self._close_log()
        finally:
            if self._record is not None and not goes_on:
                with self._kept_back(self._record.run_dir / "run.json"):
                    self._record.end_attempt(state, exit_code)
        exit_code = self._report_unwritten(exit_code)
        if self._watch is not None and self._watch.unwritten:
            self._watch.say(f"not whole, because of the disk: {', '.join(self._watch.unwritten)}")
        return exit_code

    def _report_unwritten(self, exit_code: int) -> int:
        """Show what could not be written, after the run's own error; return the exit status."""
        for error in self._unreported:
            if self._watch is None:
                print(f"paceline: {error}", file=sys.stderr)
            else:
                self._watch.not_written(error)
        is_whole = not self._unreported and (self._watch is None or not self._watch.unwritten)
        self._unreported.clear()
        return exit_code if is_whole else exit_code or 1

    def _emit(self, *events: Event) -> None:
        if self._log is not None:
            with self._kept_back(self._log_path):
                for event in events:
                    self._log.emit(event)

    def _close_log(self) -> None:
        if self._log is not None:
            with self._kept_back(self._log_path):
                self._log.close()

    @contextlib.contextmanager
    def _kept_back(self, path: Path) -> Iterator[None]:
        """Go on where a file cannot be written: there is more to close."""
        try:
            with writing(path):
                yield
        except RunFileError as error:
            self._unreported.append(error)


def _worker_failed(failure: Failure, *, follows: bool) -> WorkerFailed:
    reason = headline(failure)
    return WorkerFailed(rank=failure.worker, host=failure.host, step=failure.step, reason=reason, follows=follows)
