"""One attempt of a run as its supervisor sees it: its directory, its record and its monitoring.

Worlds that another launcher started have no `Attempt` (`paceline.runs.monitor_thread`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import environment, run_lock
from paceline.checkpoint.retention import tidy
from paceline.errors import LaunchError, PlanError, writing
from paceline.events import Event, EventLog, Note, RunStarted, UploadFailed, Warned
from paceline.host_memory import oom_kills
from paceline.launch.coordinator.coordinator import Coordinator
from paceline.launch.coordinator.host_agent import HostAgent
from paceline.launch.coordinator.rendezvous import RetainedHostState
from paceline.launch.coordinator.takeover import Takeover
from paceline.launch.fork.warm_parent_client import WarmParent
from paceline.launch.io.signals import StopSignals
from paceline.launch.job.outcome import STUCK, JobOutcome
from paceline.launch.job.restart_plan import RestartPlan
from paceline.launch.local import launch
from paceline.monitor.attempt_end import AttemptEnd
from paceline.monitor.console.event_lines import event_line
from paceline.monitor.hang.hang_monitor import HangMonitor
from paceline.monitor.records.failure import Failure
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.watch import Screen, Sink, Watch
from paceline.plan import CommandPlan, Job
from paceline.private_files import make_run_directory, read_private, replace_private
from paceline.runs.attempt_failures import exit_status, worker_end
from paceline.runs.attempt_start import (
    begin_record,
    is_led,
    next_attempt,
    qualified_name,
    run_started,
    wait_for_orphans,
)
from paceline.runs.run_loggers import RunLoggers
from paceline.runs.run_predictor import RunPredictor
from paceline.runs.run_uploads import RunUploads
from paceline.runs.told_rows import ToldRows
from paceline.runs.unpicklable import pickled_function
from paceline.units import printable

__all__ = ["Attempt"]

WHILE_MET_S = 10.0  # less than the coordinator waits for a host's first message


class Attempt:
    """One attempt of a run, as the supervisor of one host sees it: its directory, its record and its hang monitor.

    It is the observer of its own launch. Nothing is written before all hosts have met, because only then is it known
    which one is the coordinator's host. That one keeps the record of the whole run; the others follow its directory and
    attempt number.
    """

    def __init__(
        self,
        job: Job,
        *,
        plan: CommandPlan | None = None,
        given: Sequence[str] = (),
        command_started: float,
        follow: bool = False,
        function: tuple[Callable[[Any], Any], Mapping[str, Any]] | None = None,
        asked: Job | None = None,
        restart_plan: RestartPlan | None = None,
        takeover: Takeover | None = None,
        predictor: RunPredictor | None = None,
        loggers: RunLoggers | None = None,
        uploads: RunUploads | None = None,
        screen: Screen | None = None,
    ) -> None:
        """`job` has its workers and its run_dir; with `follow` the coordinator's run_dir replaces the latter.

        `function` is the function of `paceline.run(fn)` with the Job fields of that call. `restart_plan`: workers of
        the previous attempt were lost, and all restart in this way; `asked` is the job as the user started it.
        `takeover`: the attempt is under way, and this process takes over from its lost coordinator. `predictor`
        predicts the run, and is closed by the caller. `loggers`: the run's trackers. `uploads`: what copies its
        checkpoints, begun and closed by the caller.
        `screen`: that the attempt before has left.
        """
        self.job = job
        self._plan, self._given = plan or CommandPlan(), tuple(given)
        self._command_started = command_started
        self._follow, self._function = follow, function
        self._restart_plan, self.asked, self.takeover = restart_plan, asked or job, takeover
        self._predictor = predictor or RunPredictor(None)
        self._loggers = loggers or RunLoggers(job)
        self._uploads = uploads or RunUploads(dataclasses.replace(job, remote_dir=None))
        self._signals: StopSignals | None = None
        self._screen = screen
        self._made_s = time.monotonic()
        self.next: RestartPlan | None = None  # after `run`: how the next attempt starts
        self.run_dir = Path(str(job.run_dir))
        self.number = 0
        self.is_head = True
        self.failures: tuple[Failure, ...] = ()
        self._record: RunRecord | None = None
        self._log: EventLog | None = None
        self._watch: Watch | None = None
        self._hang_monitor: HangMonitor | None = None

    @property
    def micro(self) -> int | None:
        """Samples of a micro-batch with which this attempt began, if they are fewer than the plan's."""
        return None if self._restart_plan is None else self._restart_plan.micro

    @property
    def lasted_s(self) -> float:
        """Seconds since it was made, just before it ran."""
        return time.monotonic() - self._made_s

    @property
    def directory(self) -> Path:
        return self.run_dir / f"attempt_{self.number}"

    def run(
        self,
        warm: WarmParent | None,
        *,
        retained: RetainedHostState | None = None,
        judge: Callable[[Attempt, JobOutcome, int], RestartPlan | None] | None = None,
    ) -> JobOutcome:
        """Start the workers, watch them to their end, and report to the user how it went.

        On the coordinator, `judge(self, outcome, at_step)` decides whether and how all restart. Then `next` is set on
        all hosts, and the next attempt reports to the user.
        """
        kills_before = oom_kills()
        self._signals = None if retained is None else retained.signals
        outcome, restart_plan = JobOutcome(state="failed", exit_code=1), self._restart_plan
        try:
            outcome = launch(
                self.job,
                plan=self._plan,
                given=self._given,
                run_dir=self.run_dir,
                attempt=self.takeover.before.attempt
                if self.takeover is not None
                else self._next_attempt()
                if restart_plan is None or retained is None or not retained.host_index
                else 0,
                observer=self,
                on_joined=self._begin,
                command_started=self._command_started,
                warm=warm,
                retained=retained,
                asked=self.asked,
                restart_plan=restart_plan,
                judge=None if judge is None else functools.partial(self._judged, judge),
                takeover=self.takeover,
            )
            self.next = outcome.restart_plan
        except (LaunchError, PlanError) as error:
            outcome = dataclasses.replace(outcome, exit_code=exit_status(error))
            raise
        finally:
            seen = tuple(worker_end(exit, oom_kills_before=kills_before) for exit in outcome.failures)
            outcome = dataclasses.replace(outcome, exit_code=self._end(outcome, seen))
        return outcome

    def _next_attempt(self) -> int:
        """The attempt that this host begins if it becomes the coordinator; 0 where the run has one, which it joins."""
        if self._restart_plan is None and is_led(self.job):
            return 0
        return next_attempt(self.run_dir)

    def _judged(
        self, judge: Callable[[Attempt, JobOutcome, int], RestartPlan | None], outcome: JobOutcome
    ) -> RestartPlan | None:
        """Decide what follows after workers were lost; all have ended."""
        seen = 0 if self._watch is None else self._watch.catch_up()
        return judge(self, outcome, max(seen, 0 if self._restart_plan is None else self._restart_plan.restarted.step))

    def successor(self, restart_plan: RestartPlan) -> Attempt:
        """Return the next attempt of the same run, to be run at once."""
        begins_by = restart_plan.restarted
        job, given = (
            dataclasses.replace(self.job, workers=restart_plan.workers, hosts=restart_plan.num_hosts),
            self._given,
        )
        if begins_by.source == "disk":  # what is there, this run has saved
            job, given = dataclasses.replace(job, fresh=False), (*given, "fresh")
        return Attempt(
            dataclasses.replace(job, run_dir=str(self.run_dir)),
            plan=self._plan,
            given=given,
            command_started=begins_by.lost_at,
            function=self._function,
            asked=self.asked,
            restart_plan=restart_plan,
            predictor=self._predictor,
            loggers=self._loggers,
            uploads=self._uploads,
            screen=None if self._watch is None else self._watch.lasting_screen,
        )

    def poll(self) -> None:
        """Read what the workers have written (called by the launch)."""
        if self._hang_monitor is not None:
            self._hang_monitor.poll(time.monotonic())
        if self._watch is not None:
            self._watch.poll()
        if text := self._predictor.poll():
            self.emit(Note(text=text))
        self._loggers.poll(self._warn)
        self._uploads.poll(self._uploaded)
        if self.takeover is not None:
            with contextlib.suppress(OSError):  # a coordinator that stood still, or was slow to leave, had it until now
                run_lock.hold(self.run_dir)

    def say(self, text: str) -> None:
        """Show a sentence; there is no console before all hosts have met."""
        if self._watch is not None:
            self._watch.say(text)
        else:
            print(f"paceline: {printable(text)}", flush=True)

    def hush(self) -> None:
        """Show nothing any more: the new coordinator's process on this host shows the whole run."""
        if self._watch is not None:
            self._watch.is_quiet = True

    def emit(self, event: Event) -> None:
        """Record an event; only the coordinator's host keeps the run's record."""
        if self._log is not None:
            self._log.emit(event)

    def value(self, outcome: JobOutcome) -> Any:
        """What the function returned on worker 0, or in an elastic run on the first worker present at its end; None on
        other hosts, which do not have it.

        Raise LaunchError if none of them was on this host.
        """
        if not self.is_head:
            return None
        import cloudpickle  # only here: the command never needs it

        there = [ended for ended in outcome.exits if ended.exit_code == 0]
        for ended in there:
            result = self.directory / f"worker_{ended.worker}" / "result.pkl"
            if result.exists():
                return cloudpickle.loads(read_private(result))
        hosts = ", ".join(dict.fromkeys(ended.host for ended in there))
        raise LaunchError(
            f"The run has finished, but no worker was left on this host at its end, so what the function returned is "
            f"in the run's directory on {hosts}: {self.directory}/worker_*/result.pkl. Give the hosts a run_dir on a "
            "disk that they share, or write files of your own."
        )

    def _begin(self, node_role: Coordinator | HostAgent) -> Path:
        """All hosts are there: open the record and return the run's directory on this host; RunFileError if it cannot
        be written.
        """
        self.number, self.is_head = node_role.attempt, node_role.host_index == 0
        if self._follow and not self.is_head:
            self.run_dir = Path(node_role.run_dir)
            self._let_orphans_end()
        workers = self.job.workers or 1
        if self.takeover is not None:
            self._record = RunRecord.take_over(self.run_dir)
        elif self.is_head:
            self._record = begin_record(
                self.run_dir, self.job, workers=workers, plan=self._plan.whole, first=self.number
            )
            if self._record.attempt != self.number:
                raise LaunchError(
                    f"{str(self.run_dir)!r} was used by another run meanwhile: start the job again.", is_accident=True
                )
        with writing(self.directory):
            make_run_directory(self.run_dir)
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._function is not None:
                self._write_function(*self._function)
            if self.is_head:
                self._log = EventLog(self.directory / "events.jsonl", worker=None)
                if self.takeover is None:
                    self._log.emit(self._started())
                if self._restart_plan is not None:
                    self._log.emit(self._restart_plan.restarted)
        if self.is_head and self._restart_plan is None and self.takeover is None:
            self._predictor.begin(self.run_dir, self.number)
        local = None if self.is_head and (self.job.hosts == 1 or self.takeover is not None) else node_role.here
        self._watch = Watch(
            self.run_dir,
            self.number,
            workers,
            job=self.job,
            local=local,
            host=node_role.host,
            record=self.is_head,
            explains=self._function is None,  # otherwise the exception of `paceline.run(fn)` does
            goes_on=self.takeover is not None,
            shows_run=self.is_head or environment.engine() is None,
            more=self._sinks(workers),
            screen=self._screen,
            closing_rows=self._predictor.rows,
        )
        if self.takeover is not None:
            self.emit(Note(text=f"host {node_role.host} leads the run now: {self.takeover.reason}"))
        # In a debugger all workers wait on purpose; what another framework's program waits for is not known.
        if self.job.launcher != "inline" and self.job.run_for is None:
            self._hang_monitor = self._hang_monitor_for(node_role)
        return self.run_dir

    def _sinks(self, workers: int) -> list[Sink]:
        """What takes the run's events and steps beside the job's own files and console."""
        mark = environment.mark()
        told: list[Sink] = [] if mark is None else [ToldRows(mark, attempt=self.number)]
        told += self._loggers.sinks(self.run_dir, self.number)
        return [*told, self._predictor.conditions(workers)] if self._predictor.has_begun else told

    def _let_orphans_end(self) -> None:
        """Wait for workers of an earlier attempt on this host, if it was in the run before."""
        try:
            wait_for_orphans(
                dataclasses.replace(self.job, run_dir=str(self.run_dir)), say=self.say, limit_s=WHILE_MET_S
            )
        except LaunchError:
            self.say(
                f"workers of the previous start are still running after {WHILE_MET_S:.0f} s: "
                "the run goes on beside them"
            )

    def _hang_monitor_for(self, node_role: Coordinator | HostAgent) -> HangMonitor:
        """Return the hang monitor; on other hosts it only reports to the coordinator what it sees."""

        def say(text: str) -> None:
            self.emit(Warned(text=text))

        if isinstance(node_role, Coordinator):
            hang_monitor = HangMonitor(
                self.directory,
                host=node_role.host,
                local=node_role.here,
                control=node_role,
                say=say,
                may_balance=self._may_balance,
            )
            node_role.remote_hosts.on_activity = hang_monitor.receive
        else:
            hang_monitor = HangMonitor(
                self.directory,
                host=node_role.host,
                local=node_role.here,
                control=None,
                say=say,
                send=node_role.send_activity,
            )
            node_role.on_stack_request = hang_monitor.stack_requested
        return hang_monitor

    @property
    def _may_balance(self) -> bool:
        """Whether slower workers could be given less work, as far as is known here: the plan may be in the script."""
        plan = self._plan.whole
        return not self.job.balance and (plan is None or (plan.layout.workers_each == 1 and not plan.is_asynchronous))

    def _end(self, outcome: JobOutcome, failures: tuple[Failure, ...]) -> int:
        """Close the record as far as it was opened; return the exit status."""
        if outcome.is_superseded and self._watch is not None:  # another host keeps the record now
            self._log = self._record = None
            self._watch.hand_over()
        end = AttemptEnd(
            self.directory, log=self._log, watch=self._watch, record=self._record, since=self._command_started
        )
        if self._hang_monitor is not None:
            failures = self._hang_monitor.explained(failures)
        if self._record is not None and self._writes_nobody(outcome):
            with contextlib.suppress(OSError):  # left for the next start, which says so
                tidy(self.run_dir / "checkpoints")
        if self.next is None:
            self._end_uploads(outcome.state)
        exit_code = end.close(outcome.state, outcome.exit_code, failures, goes_on=self.next is not None)
        if self.next is None:
            self._loggers.end(outcome.state, self._warn)
        if self._watch is not None:
            self.failures = self._watch.failures
        return exit_code

    def _end_uploads(self, state: str) -> None:
        """Wait for checkpoints that are not uploaded yet; another signal cuts that short."""

        def poll() -> None:
            if self._watch is not None:
                self._watch.poll()

        def is_interrupted() -> bool:
            return self._signals is not None and bool(self._signals.take())

        self._uploads.end(state, self._uploaded, poll=poll, is_interrupted=is_interrupted)

    def _uploaded(self, event: Event) -> None:
        """Record what has become of an upload; a host that keeps no record shows what went wrong."""
        if self._log is not None:
            self.emit(event)
        elif isinstance(event, UploadFailed | Warned) and (line := event_line(event)):
            self.say(line)

    def _warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def _writes_nobody(self, outcome: JobOutcome) -> bool:
        """Whether all workers have ended, on all hosts, so that what is unfinished in the run's directory stays so."""
        if outcome.state == "finished":
            return True
        have_ended = all((ended.error or {}).get("kind") != STUCK for ended in (*outcome.exits, *outcome.failures))
        return have_ended and self.next is None and self.job.head is None  # a host that was lost may still write

    def _started(self) -> RunStarted:
        program = self.job.program
        if not program and self._function is not None:
            program = qualified_name(self._function[0])
        return run_started(self.job, self.run_dir, self.number, program=program, launcher=self.job.launcher)

    def _write_function(self, function: Callable[[Any], Any], fields: Mapping[str, Any]) -> None:
        replace_private(self.directory / "program.pkl", pickled_function(function, dict(fields)))
