"""Start a job on this host (having met the others, where it has several) and run it to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline import environment
from paceline.errors import LaunchError, PacelineError
from paceline.launch.coordinator.control_socket import ControlSocket
from paceline.launch.coordinator.coordinator import Coordinator
from paceline.launch.coordinator.host_agent import HostAgent
from paceline.launch.coordinator.rendezvous import RetainedHostState, join_hosts
from paceline.launch.fork.warm_parent_client import ENTRY, WarmParent
from paceline.launch.inline import PATIENCE_S, run_inline
from paceline.launch.io.event_loop import EventLoop
from paceline.launch.io.signals import Interrupted, StopSignals
from paceline.launch.job.outcome import JobOutcome, interrupted
from paceline.launch.job.placement import assign, assignment_template
from paceline.launch.job.restart_plan import RestartPlan
from paceline.launch.snapshots.snapshot_replication import SnapshotReplication
from paceline.launch.snapshots.snapshot_store import SnapshotStore
from paceline.launch.supervisor import GuardedObserver, Observer, Supervisor
from paceline.plan.job import Job

__all__ = ["launch", "prestart"]


def prestart() -> WarmParent:
    """Start the warm parent, as early as possible: it imports what workers need while the job is being prepared."""
    return WarmParent.start()


def launch(
    job: Job,
    *,
    plan: str | None = None,
    overrides: Sequence[str] = (),
    given: Sequence[str] = (),
    program: Path | None = None,
    run_dir: Path,
    attempt: int,
    observer: Observer,
    met: Callable[[Coordinator | HostAgent], Path] | None = None,
    command_started: float,
    warm: WarmParent | None = None,
    stays: RetainedHostState | None = None,
    asked: Job | None = None,
    again: RestartPlan | None = None,
    judge: Callable[[JobOutcome], RestartPlan | None] | None = None,
) -> JobOutcome:
    """Run the job's workers of this host, and return how the whole job ended.

    `job.workers` must be known. `program` is the pickled function of `paceline.run(fn)`; workers look for it as
    RUN/attempt_n/program.pkl. `met` is called when all hosts are there and before anything is written, with this
    host's side of the job: it knows the head's `attempt` and `run_dir`, and `met` returns the run's directory on this
    host (without it, `run_dir`). `warm`, where given, is used, and closed unless the Outcome may begin again. Blocks
    until every worker is gone. While it runs, Ctrl-C, SIGTERM and SIGHUP end the workers and are told in the Outcome
    (but for launcher "inline", where Ctrl-C is worker 0's); `stays`, where given, notes them already, and has workers'
    states from one launch to the next. `judge(outcome)` says on the head whether all begin again where workers were
    lost, and `again` is what it has said after the launch before; `asked` is the job as the user started it then.
    Raises LaunchError where the job could not be started; a failure after that is an Outcome.
    """
    is_inline = job.launcher == "inline"
    with contextlib.ExitStack() as stack:
        memory_checkpoints = (
            None if is_inline or stays is None else stays.memory_checkpoints
        )  # without, nobody begins again
        if stays is None:
            stays = stack.enter_context(contextlib.closing(RetainedHostState(signals=StopSignals())))
            if not is_inline:
                stack.enter_context(stays.signals)
        signals = stays.signals
        loop = stack.enter_context(contextlib.closing(EventLoop()))
        parent = _parent(job, warm)
        ending = stack.enter_context(contextlib.ExitStack())
        if parent is not None:
            ending.callback(parent.close)
        witness = GuardedObserver(observer, signals)
        replication = _replication(job, memory_checkpoints, loop, witness.say)
        if replication is not None:
            stack.callback(replication.close)
        try:
            side = join_hosts(
                job,
                plan=plan,
                attempt=attempt,
                run_dir=str(run_dir),
                loop=loop,
                say=witness.say,
                signals=signals,
                asked=asked,
                again=again,
                stays=stays,
                replication=replication,
            )
        except Interrupted as early:
            return interrupted(early.signum, ())
        stack.callback(side.close)
        stays.host_index, side.replication = side.host_index, replication
        if isinstance(side, Coordinator):
            side.judge = judge
        if met is not None:
            run_dir = _told(side, met)
        run_dir = run_dir.absolute()
        _bring(program, run_dir / f"attempt_{side.attempt}" / "program.pkl")
        alike = assignment_template(
            dataclasses.replace(job, timeout_s=max(job.timeout_s, PATIENCE_S)) if is_inline else job,
            host=side.host,
            host_index=side.host_index,
            slots=side.slots,
            address=side.address,
            run_dir=run_dir,
            attempt=side.attempt,
            command_started=command_started,
            plan=plan,
            overrides=overrides,
            given=given,
            begins_at=None if again is None else again.begins_at,
        )
        stack.callback(ControlSocket(loop, side.asked).close)
        assignments = assign(alike, side.ranks)
        supervisor = Supervisor(
            assignments,
            template=alike,
            side=side,
            parent=parent,
            loop=loop,
            observer=witness,
            signals=signals,
            memory_checkpoints=memory_checkpoints,
            again=again,
        )
        if is_inline:
            entry = warm.entry if warm is not None else ENTRY
            return run_inline(supervisor, assignments[0], entry=entry, loop=loop, signals=signals)
        outcome = supervisor.run()
        if outcome.may_begin_again:
            ending.pop_all()
            if isinstance(side, Coordinator):
                stays.listener = side.close_door(stays_open=True)
        return outcome


def _replication(
    job: Job, memory_checkpoints: SnapshotStore | None, loop: EventLoop, say: Callable[[str], None]
) -> SnapshotReplication | None:
    """What takes workers' states from host to host; None where this host is alone."""
    if memory_checkpoints is None or job.head is None:
        return None
    return SnapshotReplication(memory_checkpoints, environment.token(job), loop, say)


def _told(side: Coordinator | HostAgent, met: Callable[[Coordinator | HostAgent], Path]) -> Path:
    """Call `met`; where it fails, the other hosts are told before the error goes on."""
    try:
        return met(side)
    except PacelineError as error:
        side.abandon(str(error))
        raise


def _parent(job: Job, warm: WarmParent | None) -> WarmParent | None:
    """The warm parent to fork from; None where worker 0 is alone in this process."""
    if job.launcher == "inline" and job.workers == 1:
        if warm is not None:
            warm.close()
        return None
    return warm if warm is not None else WarmParent.start()


def _bring(program: Path | None, place: Path) -> None:
    """Have the program's file where the workers look for it."""
    if program is None or program.absolute() == place:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(program, place)
    except OSError as error:
        raise LaunchError(f"Cannot copy the program {program} to {place}: {error.strerror}.") from error
