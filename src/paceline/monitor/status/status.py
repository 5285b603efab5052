"""`paceline status RUN`: how a run stands, read from its directory in a moment, however long it has been going."""

from __future__ import annotations

import dataclasses
import itertools
import json as json_text
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import clock
from paceline.events import (
    Record,
    Regrouped,
    Restarted,
    StepDone,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from paceline.logs.log_reader import last_lines, lines_of
from paceline.monitor.console.event_lines import event_line
from paceline.monitor.records.damaged_lines import DamagedLines
from paceline.monitor.records.event_reader import attempt_dir, decode_event
from paceline.monitor.records.failure import is_echo
from paceline.monitor.records.run_files import local_path, worker_number
from paceline.monitor.records.run_record import RUNNING, RunRecord
from paceline.monitor.status.newest_task import NewestTask
from paceline.monitor.status.pool_wait import pool_that_will_go_on
from paceline.monitor.status.progress import Progress, RunTrouble
from paceline.monitor.status.still_tasks import are_still, still_lines
from paceline.plan.program_tasks import task_name, tasks_text
from paceline.processes import process_state, process_usage, this_host
from paceline.units import bytes_text, duration_text, printable

__all__ = ["RunStatus", "WorkerStatus", "main_status", "status"]

EXPLAINED = {
    "lost": "lost (its supervisor is gone without a word; run it again with the same --run-dir to continue)",
    "elsewhere": "running, says its record (on another host: ask there)",
}
NUM_FIRST_LINES = 200  # in which a worker says that it started
NUM_LAST_LINES = 2000  # in which it names its last step
NUM_IDLE_STEPS = 16  # over which its idle share is measured


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """A worker by what it last wrote."""

    rank: int
    host: str
    pid: int
    device: str
    state: str  # starting | running | halted (SIGSTOP, a debugger) | lost | left | finished | failed
    # | stopped (after another one failed) | gone
    step: int
    idle: float | None  # share of its last steps in which it waited for the others; None: not known
    age_s: float | None  # since its last event; None: it has not said anything
    name: str = ""  # what messages call it
    restarts: int = 0  # of another framework's program, alone; the others below: of its process, now or when told last
    up_s: float | None = None  # since it was started
    cores: float | None = None  # that it has kept busy in the last seconds
    memory_bytes: int | None = None  # resident now
    still_s: float = 0.0  # for which it has used no processor and written nothing; 0: for less than is worth a word
    place: str = ""  # where it stands still, "train.py:88 in step"; "": not known


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run by its record, its last committed step and its workers."""

    run_dir: str
    state: str  # running | finished | failed | stopped | lost
    is_checked: bool  # that a running run really runs: possible on the supervisor's own host
    exit_code: int | None
    attempt: int
    host: str
    pid: int
    plan: str | None
    progress: Progress
    trouble: RunTrouble
    metrics_url: str | None
    started: float
    ended: float | None
    members: tuple[int, ...]  # the workers that take part, or did when the run ended
    workers_lost: int  # in the newest attempt
    last_incident: str | None  # what became of the last loss, in words
    workers_left: int  # in the newest attempt, in good order, while the others went on
    last_leaving: str | None  # the last one of them, in words
    workers: tuple[WorkerStatus, ...]
    tasks: str | None = (
        None  # of another framework's program, whose steps are not known; None: Paceline takes the steps
    )
    waits_in: str | None = None  # the folder of the pool that will go on with it; None: it runs, or no pool will
    left_out: tuple[str, ...] = ()  # files with lines that cannot be read

    @property
    def stands_still(self) -> bool:
        """Whether it runs, and has taken no step for far longer than one takes; of another framework's program: whether
        no task does anything."""
        return self.state == RUNNING and (self.progress.stands_still if self.tasks is None else are_still(self.workers))

    def facts(self) -> dict[str, Any]:
        """Plain data for programs, progress and trouble among the rest."""
        facts = dataclasses.asdict(self)
        return {**facts, **facts.pop("progress"), **facts.pop("trouble"), "stands_still": self.stands_still}


def status(run_dir: Path | str) -> RunStatus:
    """Read how a run stands; raises ValueError where `run_dir` is not the directory of a run."""
    record = RunRecord.load(run_dir)
    damaged = DamagedLines()
    said = _supervisor_events(record, damaged)
    progress = Progress.of(record, damaged)
    changes = _MembershipChanges.of(said)
    started = _started(record, changes.replaced)
    failed = {each.event.rank: each.event for each in said if isinstance(each.event, WorkerFailed)}
    workers = _workers(record, started, changes, failed, damaged)
    plans = [each.event.plan for each in started.values() if isinstance(each.event, WorkerStarted)]
    return RunStatus(
        run_dir=str(record.run_dir),
        state=record.state_now(),
        is_checked=record.is_here(),
        exit_code=record.exit_code,
        attempt=record.attempt,
        host=record.host,
        pid=record.pid,
        plan=plans[0] if plans else record.plan,
        progress=progress,
        trouble=RunTrouble.of(said, progress),
        metrics_url=record.metrics_url,
        started=record.started,
        ended=record.ended,
        members=tuple(worker.rank for worker in workers if changes.is_member(worker.rank) and worker.state != "lost"),
        workers_lost=changes.num_lost,
        last_incident=changes.last_text,
        workers_left=changes.num_left,
        last_leaving=changes.last_leaving,
        workers=workers,
        tasks=_tasks(record),
        waits_in=pool_that_will_go_on(record),
        left_out=tuple(damaged.texts()),
    )


def main_status(run_dir: Path | str, json: bool = False) -> int:
    """Print how a run stands; returns 0, or 2 where there is no run."""
    try:
        now = status(run_dir)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    print(json_text.dumps(now.facts(), indent=1) if json else printable(_text(now)))
    return 0


def _text(run: RunStatus) -> str:
    state = (
        EXPLAINED["elsewhere"] if run.state == "running" and not run.is_checked else EXPLAINED.get(run.state, run.state)
    )
    code = "" if run.exit_code is None else f" with exit code {run.exit_code}"
    if run.waits_in is not None:
        state, code = f"waits in pool {local_path(run.waits_in)}", f" (the last attempt {run.state}{code})"
    since = duration_text((run.ended or clock.now()) - run.started)
    lines = [
        f"{local_path(run.run_dir)}: {state}{code}",
        f"  attempt {run.attempt}, {'took' if run.ended else 'for'} {since}; supervisor {run.pid} on {run.host}",
        f"  {run.progress.text()}" if run.tasks is None else f"  {run.tasks}",
    ]
    lines += [f"  {run.progress.text()} (by the program's event files)"] if run.tasks and run.progress.step else []
    lines += [f"  {run.trouble.error}"] if run.trouble.error else []
    if run.state == RUNNING:
        lines += [f"  {line}" for line in _still_lines(run)] if run.stands_still else []
        lines += [f"  {run.trouble.warning_text()}"] if run.trouble.warning else []
        halted = [worker for worker in run.workers if worker.state == "halted"]
        lines += [
            f"  worker {worker.rank} (pid {worker.pid}) is halted (SIGSTOP, a debugger) and keeps the others waiting: "
            f"kill -CONT {worker.pid} has it go on"
            for worker in halted
        ]
    lines += [f"  note: {text}" for text in run.left_out]
    lines += [f"  plan {run.plan}"] if run.plan else []
    lines += [f"  metrics at {run.metrics_url}"] if run.metrics_url else []
    if run.workers_lost:
        present = f", {len(run.members)} taking part now" if run.state == "running" else ""
        lines.append(f"  {run.workers_lost} worker{'s' * (run.workers_lost != 1)} lost{present}; the last incident:")
        lines.append(f"    {run.last_incident}")
    if run.workers_left:
        present = f", {len(run.members)} taking part now" if run.state == "running" else ""
        lines.append(
            f"  {run.workers_left} worker{'s have' if run.workers_left != 1 else ' has'} left{present}; the last one:"
        )
        lines.append(f"    {run.last_leaving}")
    table = _table(run.workers) if run.tasks is None else _task_table(run.workers)
    return "\n".join([*lines, "", *table])


def _still_lines(run: RunStatus) -> list[str]:
    if run.tasks is None:
        return [run.progress.still_text()]
    return still_lines(run.workers, attempt_dir(Path(run.run_dir), run.attempt))


def _table(workers: tuple[WorkerStatus, ...]) -> list[str]:
    head = ("worker", "host", "pid", "device", "state", "step", "idle", "last event")
    rows = [
        (
            str(worker.rank), worker.host or "-", str(worker.pid or "-"), worker.device or "-", worker.state,
            str(worker.step), "-" if worker.idle is None else f"{worker.idle:.0%}",
            "-" if worker.age_s is None else f"{duration_text(max(worker.age_s, 0.0))} ago",
        )
        for worker in workers
    ]  # fmt: skip
    return _aligned(head, rows)


def _task_table(workers: tuple[WorkerStatus, ...]) -> list[str]:
    """The tasks of another framework's program."""
    head = ("task", "host", "pid", "device", "state", "up", "cores", "memory", "restarts")
    rows = [
        (
            worker.name, worker.host or "-", str(worker.pid or "-"), worker.device or "-", worker.state,
            "-" if worker.up_s is None else duration_text(worker.up_s),
            "-" if worker.cores is None else f"{worker.cores:.2f}",
            "-" if worker.memory_bytes is None else bytes_text(worker.memory_bytes),
            str(worker.restarts),
        )
        for worker in workers
    ]  # fmt: skip
    return _aligned(head, rows)


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


@dataclasses.dataclass(kw_only=True)
class _MembershipChanges:
    """What the supervisor said of the membership of an attempt."""

    lost: dict[int, float] = dataclasses.field(default_factory=dict[int, float])  # worker -> when, not joined since
    replaced: set[int] = dataclasses.field(default_factory=set[int])  # that were lost at any time
    members: set[int] | None = None  # None: all
    num_lost: int = 0
    last_text: str | None = None
    left: dict[int, float] = dataclasses.field(default_factory=dict[int, float])  # worker -> when, not joined since
    num_left: int = 0
    last_leaving: str | None = None

    @classmethod
    def of(cls, records: Iterable[Record]) -> _MembershipChanges:
        changes = cls()
        for record in records:
            match record.event:
                case WorkerLost(rank=worker, reason=reason):
                    changes.lost[worker] = record.time
                    changes.replaced.add(worker)
                    changes.num_lost += 1
                    changes.last_text = reason
                case Restarted(lost=lost) as restarted:  # with workers of their own
                    changes.num_lost += len(lost)
                    changes.last_text = event_line(restarted)
                case Regrouped(members=members) as regrouped:
                    changes.members = set(members)
                    changes.last_text = event_line(regrouped)
                case WorkerLeft(rank=worker, members=members) as leaving:
                    changes.left[worker] = record.time
                    changes.replaced.add(worker)
                    changes.members = set(members)
                    changes.num_left += 1
                    changes.last_leaving = event_line(leaving)
                case WorkerJoined(rank=worker):
                    changes.lost.pop(worker, None)
                    changes.left.pop(worker, None)
                    if changes.members is not None:
                        changes.members.add(worker)
                case _:
                    pass
        return changes

    def is_member(self, worker: int) -> bool:
        is_gone = worker in self.lost or worker in self.left
        return not is_gone and (self.members is None or worker in self.members)


def _workers(
    record: RunRecord,
    started: Mapping[int, Record],
    changes: _MembershipChanges,
    failed: Mapping[int, WorkerFailed],
    damaged: DamagedLines,
) -> tuple[WorkerStatus, ...]:
    return tuple(
        _worker(
            record,
            worker,
            started.get(worker),
            failed,
            damaged=damaged,
            lost_at=changes.lost.get(worker),
            left_at=changes.left.get(worker),
        )
        for worker in range(max(record.workers, 1 + max(started, default=-1)))
    )


def _worker(
    record: RunRecord,
    worker: int,
    last_record: Record | None,
    failed: Mapping[int, WorkerFailed],
    *,
    damaged: DamagedLines,
    lost_at: float | None,
    left_at: float | None,
) -> WorkerStatus:
    started = last_record.event if last_record is not None and isinstance(last_record.event, WorkerStarted) else None
    directory = attempt_dir(record.run_dir, record.attempt) / f"worker_{worker}"
    step, age_s, state = 0, None, "starting" if started is None else "running"
    done: list[StepDone] = []
    program = NewestTask()
    is_own = True
    for number, line in enumerate(last_lines(directory / "events.jsonl")):
        event = decode_event(line)
        if event is None:
            damaged.note(directory / "events.jsonl", line)
            continue
        age_s = clock.now() - event.time if age_s is None else age_s
        step = step or getattr(event.event, "step", 0)
        if is_own:
            state = "finished" if isinstance(event.event, WorkerFinished) else state
            done += [event.event] if isinstance(event.event, StepDone) else []
            program.take(event.event)
            is_own = not isinstance(event.event, WorkerStarted)  # before that: the process that held the place before
        is_enough = program.start is not None or (step and (not is_own or len(done) == NUM_IDLE_STEPS))
        if is_enough or number > NUM_LAST_LINES:
            break
    task, told = program.start, program.told
    if lost_at is not None and state in ("starting", "running"):  # else its successor is starting
        state = "lost" if last_record is None or last_record.time < lost_at else "starting"
    if left_at is not None and (last_record is None or last_record.time < left_at):
        state = "left"
    elif worker in failed:
        state = "stopped" if failed[worker].follows else "failed"
    elif os.path.exists(directory / "error.json"):
        state = "stopped" if is_echo(directory / "error.json") else "failed"
    elif state in ("starting", "running") and record.state_now() != RUNNING:
        state = "gone"
    elif state == "running" and started is not None and started.host == this_host():
        pid = started.pid if task is None else task.pid
        state = "halted" if process_state(pid) == "stopped" else state
    if task is not None and not program.is_ready and state == "running":
        state = "starting"
    is_here = state in ("starting", "running", "halted") and started is not None and started.host == this_host()
    usage = process_usage(task.pid) if task is not None and is_here else None
    return WorkerStatus(
        rank=worker,
        host=started.host if started else "",
        pid=task.pid if task else started.pid if started else 0,
        device=started.device if started else "",
        state=state,
        step=step or (started.resumed_from_step if started else 0),
        idle=_idle(done),
        age_s=age_s,
        name=task_name(record.job, worker),
        restarts=task.restarts if task else 0,
        up_s=usage.age_s if usage is not None else None if told is None else told.up_s,
        cores=None if told is None else told.cores,
        memory_bytes=usage.memory_bytes if usage is not None else None if told is None else told.memory_bytes,
        still_s=0.0 if told is None else told.still_s,
        place="" if told is None else told.place,
    )


def _tasks(record: RunRecord) -> str | None:
    """Return "tensorflow: chief, 2 workers, 1 server"; None where Paceline takes the run's steps."""
    framework, servers = record.job.get("run_for"), record.job.get("servers")
    if framework is None:
        return None
    return f"{framework}: {tasks_text(record.workers, servers if isinstance(servers, int) else None)}"


def _idle(done: Iterable[StepDone]) -> float | None:
    took_s = waited_s = 0.0
    for event in done:
        if set(event.seconds) != {"total"}:  # else of a program's own loop, whose waits are not measured
            took_s += event.seconds.get("total", 0.0)
            waited_s += event.seconds.get("communication", 0.0)
    return min(1.0, waited_s / took_s) if took_s > 0 else None


def _started(record: RunRecord, replaced: Collection[int]) -> dict[int, Record]:
    """What the workers of the newest attempt said when they last started.

    That stands near the beginning of their files; only of those that were replaced it is looked for from the end.
    """
    found: dict[int, Record] = {}
    directory = attempt_dir(record.run_dir, record.attempt)
    for place in sorted(directory.glob("worker_*")):
        worker = worker_number(place.name)
        if worker is None:
            continue
        path = place / "events.jsonl"
        lines = last_lines(path) if worker in replaced else itertools.islice(lines_of(path), NUM_FIRST_LINES)
        for line in lines:
            event = decode_event(line) if '"WorkerStarted"' in line else None
            if event is not None and isinstance(event.event, WorkerStarted):
                found[worker] = event
                break
    return found


def _supervisor_events(record: RunRecord, damaged: DamagedLines) -> list[Record]:
    """In the order of their times."""
    path = attempt_dir(record.run_dir, record.attempt) / "events.jsonl"
    return list(damaged.read(path, lines_of(path), decode_event))
