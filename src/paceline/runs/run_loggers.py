"""The experiment trackers of a run, over all its attempts: made before anything starts, ended when the run has."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline import environment
from paceline.errors import PlanError
from paceline.events import Record, RunStarted, WorkerStarted
from paceline.monitor.export.logger_feed import LoggerFeed
from paceline.monitor.export.process_logger import ProcessLogger
from paceline.monitor.export.run_logger import LoggedRun, RunLogger, arguments_by_name, name_of_run
from paceline.monitor.export.scalars import ScalarPoints
from paceline.monitor.export.tracker_process import TRACKERS
from paceline.monitor.records.steps import Step
from paceline.plan import Job

__all__ = ["RunLoggers", "check_trackers"]

END_S = 30.0  # for all trackers together


def check_trackers(job: Job) -> None:
    """Raise PlanError where the package of a tracker that the job names is not installed."""
    for name in job.log:
        package = TRACKERS[name][0]
        if importlib.util.find_spec(package) is None:
            raise PlanError(
                f"--log {name} needs the package {package}, which this Python does not have: "
                f"pip install 'paceline[{name}]', or leave the option out."
            )


class RunLoggers:
    """All trackers of one run. Without any, nothing is done."""

    def __init__(self, job: Job, own: Sequence[RunLogger] = (), *, arguments: Sequence[str] = ()) -> None:
        """`own`: objects of the user's beside those that `job.log` names. `arguments` of the script, as words; the
        parameters of a sweep's trial are logged among them, however the script gets them.
        """
        parameters = {name: str(value) for name, value in environment.trial_parameters().items()}
        self._job, self._arguments = job, {**arguments_by_name(arguments), **parameters}
        self._feeds = [LoggerFeed(name, ProcessLogger(name)) for name in dict.fromkeys(job.log)]
        self._feeds += [LoggerFeed(type(logger).__name__, logger) for logger in own]
        self._num_attempts = 0

    def sinks(self, run_dir: Path, attempt: int) -> list[AttemptPoints]:
        """What takes an attempt's events and steps; empty without trackers."""
        if not self._feeds:
            return []
        self._num_attempts += 1
        run = LoggedRun(
            name=name_of_run(run_dir),
            run_dir=str(run_dir),
            attempt=attempt,
            workers=self._job.workers or 1,
            arguments=self._arguments,
            is_fresh=self._job.fresh and self._num_attempts == 1,
        )
        return [AttemptPoints(self._feeds, run)]

    def poll(self, warn: Callable[[str], None]) -> None:
        """Report what has gone wrong since the last call."""
        for feed in self._feeds:
            for text in feed.warnings():
                warn(text)

    def end(self, state: str, warn: Callable[[str], None]) -> None:
        """Give every tracker what is left, for 30 seconds at most."""
        until = time.monotonic() + END_S
        for feed in self._feeds:
            feed.end(state, limit_s=max(1.0, until - time.monotonic()))
        self.poll(warn)


class AttemptPoints:
    """A sink of one attempt's events and steps, which makes points of them for all trackers."""

    def __init__(self, feeds: Sequence[LoggerFeed], run: LoggedRun) -> None:
        self._feeds, self._run = feeds, run
        self._points = ScalarPoints()
        self._has_begun = False

    def accept(self, item: Record | Step) -> None:
        if not isinstance(item, Step):
            self._note(item)
        points = self._points.take(item)
        if points:
            self._begin()
            for feed in self._feeds:
                feed.add(points)

    def close(self) -> None:
        """Give the points that wait for more steps; a run that had no step is logged, too, if its workers started."""
        points = self._points.rest()
        if points or self._run.plan:
            self._begin()
            for feed in self._feeds:
                feed.add(points)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            for feed in self._feeds:
                feed.begin(self._run)
                feed.goes_back()

    def _note(self, record: Record) -> None:
        run = self._run
        match record.event:
            case RunStarted(program=program):
                self._run = dataclasses.replace(run, program=program)
            case WorkerStarted(host=host, device=device, plan=plan):
                hosts, devices = dict.fromkeys((*run.hosts, host)), dict.fromkeys((*run.devices, device))
                self._run = dataclasses.replace(run, plan=plan, hosts=tuple(hosts), devices=tuple(devices))
            case _:
                pass
