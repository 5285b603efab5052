"""Run a job on this host to its end, after the rendezvous with its other hosts, if it has any."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline import environment, run_lock
from paceline.errors import LaunchError, PacelineError, writing
from paceline.launch.coordinator.control_socket import ControlSocket
from paceline.launch.coordinator.coordinator import Coordinator
from paceline.launch.coordinator.head_register import HeadRegister, LocksMissing, Superseded
from paceline.launch.coordinator.host_agent import HostAgent
from paceline.launch.coordinator.rendezvous import RetainedHostState, join_hosts
from paceline.launch.coordinator.takeover import Takeover
from paceline.launch.fork.warm_parent_client import ENTRY, WarmParent
from paceline.launch.inline import INLINE_TIMEOUT_S, run_inline
from paceline.launch.io.event_loop import EventLoop
from paceline.launch.io.signals import Interrupted, StopSignals
from paceline.launch.job.outcome import JobOutcome, interrupted, only_hosts_lost
from paceline.launch.job.placement import assign, assignment_template
from paceline.launch.job.restart_plan import RestartPlan
from paceline.launch.snapshots.snapshot_replication import SnapshotReplication
from paceline.launch.snapshots.snapshot_store import SnapshotStore
from paceline.launch.supervisor import GuardedObserver, Observer, Supervisor
from paceline.plan.command_plan import CommandPlan
from paceline.plan.job import AUTO, Job
from paceline.private_files import make_run_directory, read_private, replace_private

__all__ = ["launch"]


def launch(
    job: Job,
    *,
    plan: CommandPlan | None = None,
    given: Sequence[str] = (),
    program: Path | None = None,
    run_dir: Path,
    attempt: int,
    observer: Observer,
    on_joined: Callable[[Coordinator | HostAgent], Path] | None = None,
    command_started: float,
    warm: WarmParent | None = None,
    retained: RetainedHostState | None = None,
    asked: Job | None = None,
    restart_plan: RestartPlan | None = None,
    judge: Callable[[JobOutcome], RestartPlan | None] | None = None,
    takeover: Takeover | None = None,
) -> JobOutcome:
    """Run the job's workers of this host, and return how the whole job ended.

    `job.workers` must be known. `program` is the pickled function of `paceline.run(fn)`; workers read it as
    RUN/attempt_n/program.pkl. `on_joined` is called once all hosts are there and before anything is written, with this
    host's role, which knows the coordinator's `attempt` and `run_dir`. It returns the run's directory on this host
    (without it: `run_dir`). `warm` is used if given, and closed unless the job may restart.

    The call blocks until every worker has ended. Meanwhile Ctrl-C, SIGTERM and SIGHUP end the workers and show in the
    outcome. With launcher "inline", Ctrl-C belongs to worker 0. `retained`, if given, already notes signals, and keeps
    snapshots from one launch to the next.

    On the coordinator, `judge(outcome)` decides whether all workers restart after a loss. `restart_plan` is its
    decision after the previous launch, and `asked` is the job as the user started it. `takeover`: the coordinator of
    the run was lost, and this process takes over; it has no workers of its own. Raise LaunchError if the job
    could not be started; a later failure is an outcome.
    """
    is_inline = job.launcher == "inline"
    with contextlib.ExitStack() as stack:
        # Without it no restart is possible.
        memory_checkpoints = None if is_inline or retained is None else retained.memory_checkpoints
        if retained is None:
            retained = stack.enter_context(contextlib.closing(RetainedHostState(signals=StopSignals())))
            if not is_inline:
                stack.enter_context(retained.signals)
        signals = retained.signals
        loop = stack.enter_context(contextlib.closing(EventLoop()))
        is_only_head = takeover is not None or (retained.record is not None and retained.record.epoch > 0)
        parent = None if is_only_head else _parent(job, warm)
        parent_stack = stack.enter_context(contextlib.ExitStack())
        if parent is not None:
            parent_stack.callback(parent.close)
        guarded = GuardedObserver(observer, signals)
        replication = _replication(job, memory_checkpoints, loop, guarded.say)
        if replication is not None:
            stack.callback(replication.close)
        try:
            node_role = join_hosts(
                job,
                plan=plan,
                attempt=attempt,
                run_dir=str(run_dir),
                loop=loop,
                say=guarded.say,
                signals=signals,
                asked=asked,
                restart_plan=restart_plan,
                retained=retained,
                replication=replication,
                takeover=takeover,
            )
        except Interrupted as early:
            return interrupted(early.signum, ())
        stack.callback(node_role.close)
        retained.host_index, node_role.replication = node_role.host_index, replication
        if job.head == AUTO:
            retained.head = node_role.head
        if isinstance(node_role, Coordinator):
            node_role.decide_restarts(judge)
        if on_joined is not None:
            run_dir = _notify_joined(node_role, on_joined)
        run_dir = run_dir.absolute()
        _copy_program(program, run_dir / f"attempt_{node_role.attempt}" / "program.pkl")
        if job.head is not None and not is_inline and isinstance(node_role, Coordinator):
            _enter_register(node_role, run_dir, node_role.head or job.head, retained)
        template = assignment_template(
            dataclasses.replace(job, timeout_s=max(job.timeout_s, INLINE_TIMEOUT_S)) if is_inline else job,
            host=node_role.host,
            host_index=node_role.host_index,
            slots=node_role.slots,
            address=node_role.address,
            run_dir=run_dir,
            attempt=node_role.attempt,
            command_started=command_started,
            plan=plan,
            given=given,
            begins_at=None if restart_plan is None else restart_plan.begins_at,
            micro=None if restart_plan is None else restart_plan.micro,
        )
        stack.callback(ControlSocket(loop, node_role.answer_command).close)
        assignments = assign(template, node_role.ranks)
        if isinstance(node_role, HostAgent):
            node_role.register = HeadRegister(run_dir)
            node_role.take_over = functools.partial(
                retained.new_head.start, template=template, asked=asked or job, say=guarded.say
            )
            node_role.prepare_to_take_over = retained.new_head.prepare
            if retained.new_head.is_at_work:
                guarded.hush()
            retained.new_head.hush = guarded.hush
        supervisor = Supervisor(
            assignments,
            template=template,
            node_role=node_role,
            parent=parent,
            loop=loop,
            observer=guarded,
            signals=signals,
            memory_checkpoints=memory_checkpoints,
            restart_plan=restart_plan,
        )
        if is_inline:
            entry = warm.entry if warm is not None else ENTRY
            return run_inline(supervisor, assignments[0], entry=entry, loop=loop, signals=signals)
        outcome = _stopped_meanwhile(supervisor.run(), signals, has_begun=supervisor.has_begun)
        if isinstance(node_role, HostAgent):
            if node_role.has_left:
                retained.new_head.leave()
            retained.head = node_role.head or retained.head
        else:
            register, retained.record = node_role.leadership.register, node_role.leadership.record
            if outcome.is_superseded:
                run_lock.release(run_dir)  # before its connections end: the next coordinator takes it
            elif not outcome.may_restart and register is not None and retained.record is not None:
                register.end(retained.record)
            if retained.record is not None and retained.record.epoch > 0:
                retained.head = retained.record.address
        if outcome.may_restart:
            parent_stack.pop_all()
            if isinstance(node_role, Coordinator):
                retained.listener = node_role.close_admission(keep_listening=True)
        return outcome


def _stopped_meanwhile(outcome: JobOutcome, signals: StopSignals, *, has_begun: bool) -> JobOutcome:
    """Return the outcome; where a signal to all hosts showed itself first as the loss of another host, that signal."""
    if outcome.may_restart or not only_hosts_lost(outcome):
        return outcome
    taken = [signum for signum in signals.take() if not has_begun or signum == signal.SIGINT]
    return interrupted(taken[0], outcome.exits) if taken else outcome


def _enter_register(coordinator: Coordinator, run_dir: Path, head: str, retained: RetainedHostState) -> None:
    """Enter the run's register, from which another host takes over where this one is lost."""
    with writing(run_dir):
        try:
            coordinator.leadership.enter(HeadRegister(run_dir), address=head, before=retained.record)
        except LocksMissing:
            coordinator.leadership.leave()  # a lost coordinator ends the run there, which goes on with its next start
        except Superseded as other:
            raise LaunchError(f"This host had been given up: {other}.", is_accident=True) from other


def _replication(
    job: Job, memory_checkpoints: SnapshotStore | None, loop: EventLoop, say: Callable[[str], None]
) -> SnapshotReplication | None:
    """Return the replication of snapshots between hosts; None if this host is alone."""
    if memory_checkpoints is None or job.head is None:
        return None
    return SnapshotReplication(memory_checkpoints, environment.token(job), loop, say)


def _notify_joined(node_role: Coordinator | HostAgent, on_joined: Callable[[Coordinator | HostAgent], Path]) -> Path:
    """Call `on_joined`; if it fails, notify the other hosts before the error is raised."""
    try:
        return on_joined(node_role)
    except PacelineError as error:
        node_role.abandon(str(error))
        raise


def _parent(job: Job, warm: WarmParent | None) -> WarmParent | None:
    """The warm parent to fork from; None where worker 0 is alone in this process."""
    if job.launcher == "inline" and job.workers == 1:
        if warm is not None:
            warm.close()
        return None
    return warm if warm is not None else WarmParent.start_for(job)


def _copy_program(program: Path | None, place: Path) -> None:
    """Put the program's file where the workers look for it."""
    if program is None or program.absolute() == place:
        return
    try:
        make_run_directory(place.parent.parent)
        place.parent.mkdir(exist_ok=True)
        replace_private(place, read_private(program))
    except OSError as error:
        raise LaunchError(f"Cannot copy the program {program} to {place}: {error.strerror}.") from error
