"""`paceline trace RUN`: the steps of all workers as a timeline, with what happened between them.

A worker records of each step when it was committed, and how long its parts took. So steps lie where they were; within
a step the parts stand one after the other, though compute and communication may have overlapped. Hosts' clocks are
aligned by the steps, which all workers commit together.
"""

from __future__ import annotations

import collections
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.events import CheckpointSaved, Evaluated, Record, WorkerJoined, WorkerLost, WorkerStarted
from paceline.logs.trace_events import TraceSlice, write_trace
from paceline.monitor.records.run_files import local_path
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.records.steps import parts_of
from paceline.monitor.report.attempt_log import AttemptLog, StepTime, read_attempts

__all__ = ["ORDER", "clocks_ahead", "host_of", "main_trace", "newest_steps", "run_slices"]

MOMENTS = (CheckpointSaved, Evaluated, WorkerJoined, WorkerLost)
ORDER = ("recovery", "data", "compute", "communication", "optimizer", "other")


def main_trace(run_dir: Path, *others: Path, out: Path, steps: int) -> int:
    """Write the newest `steps` steps of each worker; returns 0, or 2 where there is no run or no step."""
    try:
        record = RunRecord.load(run_dir)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    slices = list(run_slices(read_attempts(record, others=others), steps=steps))
    if not slices:
        print(f"paceline: {run_dir} has no step yet: nothing can be shown.", file=sys.stderr)
        return 2
    write_trace(out, slices)
    workers = len({one.row for one in slices})
    last = max(one.begin_s + (one.duration_s or 0.0) for one in slices)
    print(f"trace  {local_path(out)}: {workers} workers, {last:.1f} s; open it in ui.perfetto.dev or chrome://tracing")
    return 0


def run_slices(attempts: Sequence[AttemptLog], *, steps: int) -> Iterator[TraceSlice]:
    """Yield the timeline of a run's attempts, by worker, from the first step that is shown."""
    shown = [(log, worker, times) for log in attempts for worker, times in newest_steps(log, steps)]
    if not shown:
        return
    ahead = clocks_ahead(shown)
    zero = min(
        one.time - one.seconds.get("total", 0.0) - ahead.get(host_of(log, worker), 0.0)
        for log, worker, times in shown
        for one in times
    )
    for log, worker, times in sorted(shown, key=lambda one: one[1]):
        host = host_of(log, worker)
        row, begin = f"worker {worker}", zero + ahead.get(host, 0.0)
        for one in times:
            yield from _step_slices(one, host, row, begin, log.attempt)
        for record in log.records:
            if _is_of(record, worker) and record.time >= begin:
                yield TraceSlice(group=host, row=row, name=type(record.event).__name__, begin_s=record.time - begin)


def _step_slices(one: StepTime, host: str, row: str, zero: float, attempt: int) -> Iterator[TraceSlice]:
    parts = parts_of(one.seconds)
    total = max(sum(parts.values()), one.seconds.get("total", 0.0))
    begin = one.time - zero - total
    name = f"step {one.step}" if not one.skipped else f"step {one.step} (skipped)"
    details = {"attempt": attempt} | {part: round(value, 6) for part, value in parts.items()}
    yield TraceSlice(group=host, row=row, name=name, begin_s=begin, duration_s=total, details=details)
    for part in ORDER:
        if parts.get(part, 0.0) > 0:
            yield TraceSlice(group=host, row=row, name=part, begin_s=begin, duration_s=parts[part])
            begin += parts[part]


def newest_steps(log: AttemptLog, steps: int) -> Iterator[tuple[int, list[StepTime]]]:
    """The newest single steps of each worker; those that were summed up have no moments."""
    known = {record.event.rank for record in log.records if isinstance(record.event, WorkerStarted)}
    for worker in sorted(known | set(range(log.workers))):
        times = collections.deque((one for one in log.steps(worker) if one.num == 1), maxlen=steps)
        if times:
            yield worker, list(times)


def clocks_ahead(shown: Sequence[tuple[AttemptLog, int, list[StepTime]]]) -> Mapping[str, float]:
    """By how many seconds each host's clock is ahead of that of the first worker's host, by the steps of both."""
    commits: dict[str, dict[tuple[int, int], float]] = {}
    for log, worker, times in shown:
        there = commits.setdefault(host_of(log, worker), {})
        for one in times:
            there.setdefault((log.attempt, one.step), one.time)
    if len(commits) < 2:
        return {}
    log, worker, _ = min(shown, key=lambda one: one[1])
    first = commits[host_of(log, worker)]
    found: dict[str, float] = {}
    for host, times in commits.items():
        apart = [when - first[key] for key, when in times.items() if key in first]
        found[host] = statistics.median(apart) if apart else 0.0
    return found


def host_of(log: AttemptLog, worker: int) -> str:
    """The host of a worker's newest process."""
    started = [
        record.event.host
        for record in log.records
        if isinstance(record.event, WorkerStarted) and record.event.rank == worker
    ]
    return started[-1] if started else "host"


def _is_of(record: Record, worker: int) -> bool:
    """Whether a moment is this worker's: it wrote it, or the supervisor wrote it about this one."""
    rank = record.event.rank if isinstance(record.event, (WorkerJoined, WorkerLost)) else record.worker
    return isinstance(record.event, MOMENTS) and rank == worker
