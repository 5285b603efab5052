"""`paceline status RUN`: how a run stands, read from its directory in a moment, however long it has been going."""

from __future__ import annotations

import dataclasses
import json as json_text
import sys
import time
from pathlib import Path
from typing import Any

from paceline.events import Record, WorkerFailed, WorkerFinished, WorkerStarted
from paceline.monitor.files import last_lines, local_path, worker_number
from paceline.monitor.run_record import RunRecord
from paceline.monitor.stream import attempt_dir, decoded
from paceline.monitor.wording import number_text, rate_text
from paceline.units import duration_text

__all__ = ["RunStatus", "WorkerStatus", "main_status", "status"]

EXPLAINED = {
    "lost": "lost (its supervisor is gone without a word; run it again with the same --run-dir to continue)",
    "elsewhere": "running, says its record (on another host: ask there)",
}
NUM_FIRST_LINES = 200  # in which a worker says that it started
NUM_LAST_LINES = 2000  # in which it names its last step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """A worker by what it last wrote."""

    rank: int
    host: str
    pid: int
    device: str
    state: str  # starting | running | finished | failed | stopped (after another one failed) | gone
    step: int
    age_s: float | None  # since its last event; None: it has not said anything


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
    step: int
    epoch: int | None
    loss: float | None
    samples_per_s: float | None
    metrics_url: str | None
    started: float
    ended: float | None
    workers: tuple[WorkerStatus, ...]


def status(run_dir: Path | str) -> RunStatus:
    """Read how a run stands; raises ValueError where `run_dir` is not the directory of a run."""
    record = RunRecord.load(run_dir)
    row = _last_step(record.run_dir)
    workers = _workers(record)
    plans = [started.plan for started in _started(record).values()]
    return RunStatus(
        run_dir=str(record.run_dir),
        state=record.state_now(),
        is_checked=record.is_here(),
        exit_code=record.exit_code,
        attempt=record.attempt,
        host=record.host,
        pid=record.pid,
        plan=plans[0] if plans else record.plan,
        step=row.get("step", 0),
        epoch=row.get("epoch"),
        loss=row.get("loss"),
        samples_per_s=row.get("samples_per_s"),
        metrics_url=record.metrics_url,
        started=record.started,
        ended=record.ended,
        workers=workers,
    )


def main_status(run_dir: Path | str, json: bool = False) -> int:
    """Print how a run stands; returns 0, or 2 where there is no run."""
    try:
        now = status(run_dir)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    print(json_text.dumps(dataclasses.asdict(now), indent=1) if json else _text(now))
    return 0


def _text(run: RunStatus) -> str:
    state = (
        EXPLAINED["elsewhere"] if run.state == "running" and not run.is_checked else EXPLAINED.get(run.state, run.state)
    )
    code = "" if run.exit_code is None else f" with exit code {run.exit_code}"
    parts = [f"step {run.step}"]
    if run.epoch is not None:
        parts.append(f"epoch {run.epoch}")
    if run.loss is not None:
        parts.append(f"loss {number_text(run.loss)}")
    if run.samples_per_s is not None:
        parts.append(f"{rate_text(run.samples_per_s)} samples/s")
    since = duration_text((run.ended or time.time()) - run.started)
    lines = [
        f"{local_path(run.run_dir)}: {state}{code}",
        f"  attempt {run.attempt}, {'took' if run.ended else 'for'} {since}; supervisor {run.pid} on {run.host}",
        f"  {'  '.join(parts)}",
    ]
    lines += [f"  plan {run.plan}"] if run.plan else []
    lines += [f"  metrics at {run.metrics_url}"] if run.metrics_url else []
    return "\n".join([*lines, "", *_table(run.workers)])


def _table(workers: tuple[WorkerStatus, ...]) -> list[str]:
    head = ("worker", "host", "pid", "device", "state", "step", "last event")
    rows = [
        (
            str(worker.rank), worker.host or "-", str(worker.pid or "-"), worker.device or "-", worker.state,
            str(worker.step), "-" if worker.age_s is None else f"{duration_text(max(worker.age_s, 0.0))} ago",
        )
        for worker in workers
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def _last_step(run_dir: Path) -> dict[str, Any]:
    for line in last_lines(run_dir / "metrics.jsonl"):
        try:
            return dict(json_text.loads(line))
        except ValueError:  # cut off by a kill: the line before it counts
            continue
    return {}


def _workers(record: RunRecord) -> tuple[WorkerStatus, ...]:
    started = _started(record)
    failed = {worker for event in _supervisor_events(record) if (worker := _failed_worker(event)) is not None}
    return tuple(
        _worker(record, worker, started.get(worker), failed)
        for worker in range(max(record.workers, 1 + max(started, default=-1)))
    )


def _worker(record: RunRecord, worker: int, started: WorkerStarted | None, failed: set[int]) -> WorkerStatus:
    directory = attempt_dir(record.run_dir, record.attempt) / f"worker_{worker}"
    step, age_s, state = 0, None, "starting" if started is None else "running"
    for number, line in enumerate(last_lines(directory / "events.jsonl")):
        event = decoded(line)
        if event is None:
            continue
        age_s = time.time() - event.time if age_s is None else age_s
        state = "finished" if isinstance(event.event, WorkerFinished) else state
        step = getattr(event.event, "step", 0)
        if step or number > NUM_LAST_LINES:
            break
    if worker in failed:
        state = "failed"
    elif (directory / "error.json").exists():
        state = "stopped" if _is_echo(directory / "error.json") else "failed"
    elif state in ("starting", "running") and record.state_now() != "running":
        state = "gone"
    return WorkerStatus(
        rank=worker,
        host=started.host if started else "",
        pid=started.pid if started else 0,
        device=started.device if started else "",
        state=state,
        step=step or (started.resumed_from_step if started else 0),
        age_s=age_s,
    )


def _is_echo(path: Path) -> bool:
    """Say whether an error only tells that a peer went away."""
    try:
        return bool(json_text.loads(path.read_text(encoding="utf-8")).get("echo"))
    except (OSError, ValueError, AttributeError):  # being written at this moment, or cut off: an error all the same
        return False


def _started(record: RunRecord) -> dict[int, WorkerStarted]:
    """What the workers of the newest attempt said when they started: it stands near the beginning of their files."""
    found: dict[int, WorkerStarted] = {}
    directory = attempt_dir(record.run_dir, record.attempt)
    for place in sorted(directory.glob("worker_*")) if directory.is_dir() else []:
        worker, path = worker_number(place.name), place / "events.jsonl"
        if worker is None or not path.exists():
            continue
        with open(path, encoding="utf-8", errors="replace") as file:
            for _, line in zip(range(NUM_FIRST_LINES), file, strict=False):
                event = decoded(line)
                if event is not None and isinstance(event.event, WorkerStarted):
                    found[worker] = event.event
                    break
    return found


def _supervisor_events(record: RunRecord) -> list[Record]:
    path = attempt_dir(record.run_dir, record.attempt) / "events.jsonl"
    return [event for line in last_lines(path) if (event := decoded(line)) is not None]


def _failed_worker(record: Record) -> int | None:
    return record.event.rank if isinstance(record.event, WorkerFailed) else None
