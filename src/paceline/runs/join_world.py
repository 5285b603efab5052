"""A process that torchrun, srun or mpirun started is a worker of its world, and worker 0 records the run."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import environment
from paceline.errors import PlanError
from paceline.monitor.records.run_files import local_path
from paceline.monitor.records.run_record import RunRecord
from paceline.plan import CommandPlan, Job, Plan
from paceline.runs.attempt_start import begin_record
from paceline.runs.go_on import command_of_script, command_of_world, later_call
from paceline.runs.messages import tell, tell_go_on
from paceline.runs.monitor_thread import monitoring_thread, note_end, note_failure, note_left, reporting_thread
from paceline.runs.own_script import own_script
from paceline.runs.run_loggers import RunLoggers
from paceline.runs.run_uploads import RunUploads
from paceline.runs.settled_job import settled_job

if TYPE_CHECKING:
    from paceline.monitor.export.run_logger import RunLogger
    from paceline.plan.job import Assignment
    from paceline.worker.external_launch import JoinedWorld
    from paceline.worker.membership.preemption import PreemptionNotice
    from paceline.world_detection import World

__all__ = ["joining_world"]


@contextlib.contextmanager
def joining_world(
    world: World,
    job: Job,
    plan: Plan | None,
    *,
    program: str,
    is_first: bool = True,
    loggers: Sequence[RunLogger] = (),
) -> Iterator[tuple[JoinedWorld, PreemptionNotice]]:
    """Be in a world that another launcher started, while entered; a thread beside worker 0 shows and records the run.

    `program` is what the run is called after; `is_first`: no run was before it in this process.
    """
    from paceline.worker.external_launch import await_records_closed, join_external_world, started_at
    from paceline.worker.membership.clean_exit import CleanExit

    if job.workers not in (None, world.workers) and world.worker_rank == 0:
        tell(f"workers={job.workers} is not used: {world.source} started {world.workers} workers")

    begun: list[RunRecord] = []  # on worker 0
    copying: list[RunUploads] = []

    def choose() -> tuple[Path, int]:
        asked = dataclasses.replace(job, workers=world.workers)
        settled = settled_job(asked, CommandPlan(whole=plan), script=own_script())
        directory = Path(str(settled.run_dir))
        copying.append(uploads.enter_context(RunUploads(settled)))
        copying[-1].begin(tell)
        begun.append(begin_record(directory, settled, workers=world.workers, plan=plan))
        return directory, begun[-1].attempt

    with (
        contextlib.ExitStack() as uploads,
        join_external_world(world, job, run_dir=choose, command_started=started_at(), log=tell) as place,
    ):
        own = place.assignment
        watched: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if own.rank == 0:
            watched = monitoring_thread(
                own,
                own.job,
                record=begun[-1],
                hosts=place.hosts,
                store=place.store,
                program=program,
                launcher=world.source,
                loggers=RunLoggers(own.job, loggers, arguments=sys.argv[1:]),
                uploads=copying[-1],
            )
        elif own.rank in {ranks[0] for ranks in place.hosts}:
            watched = reporting_thread(own, hosts=place.hosts, store=place.store)
        environment.enter(own)
        try:
            with (
                _telling_go_on(own, world, is_first=is_first),
                _listening_for_preemption(own, world) as notice,
                watched,
                _noting_end(own, notice),
            ):
                yield place, notice
        except CleanExit:
            await_records_closed(
                place.store, own
            )  # an engine ends all workers when the first one's exit status is not 0
            raise
        finally:
            environment.leave()


@contextlib.contextmanager
def _noting_end(own: Assignment, notice: PreemptionNotice) -> Iterator[None]:
    """Note at once how the worker ended: what comes after may be cut short."""
    from paceline.worker.membership.clean_exit import CleanExit
    from paceline.worker.membership.preemption import TerminatedBySignal
    from paceline.worker.record.error_report import is_peer_failure

    try:
        yield
    except CleanExit as leaving:
        note_left(own, int(str(leaving.code)))
        raise
    except TerminatedBySignal as stop:
        note_end(own, "stopped", int(str(stop.code)))
        raise
    except Exception as error:
        note_failure(own)
        if is_peer_failure(error):
            tell(f"worker {own.rank} (host {own.host}) ended because a peer went away")
            raise SystemExit(1) from None
        if not isinstance(error, PlanError):
            error.add_note(f"the whole traceback of worker {own.rank}: {local_path(own.worker_dir)}/error.json")
        raise
    finally:
        notice.hold()


def _listening_for_preemption(own: Assignment, world: World) -> PreemptionNotice:
    """What hears that this worker is asked to leave."""
    from paceline.worker.membership.preemption import PreemptionNotice

    def noticed(signum: int, ends_at_once: bool) -> None:
        if own.rank == 0 and (ends_at_once or world.kills_soon):
            note_end(own, "stopped", 128 + (signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM))

    return PreemptionNotice(grace_s=own.job.grace_s, more=environment.notice_signals(), on_notice=noticed)


@contextlib.contextmanager
def _telling_go_on(own: Assignment, world: World, *, is_first: bool) -> Iterator[None]:
    """Where the run ends before its end, print what goes on with it; on worker 0."""
    try:
        yield
    except BaseException as error:
        if own.rank == 0 and not isinstance(error, PlanError) and getattr(error, "code", 1):
            run_dir = Path(own.run_dir)
            if world.source == "alone":
                command = command_of_script(run_dir, script=None, names_dir=False)  # at exit no script is known
            else:
                command = command_of_world(run_dir) if is_first else later_call(run_dir)
            tell_go_on(command, getattr(error, "code", 1), is_there=True)
        raise
