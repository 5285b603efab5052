"""One row of the overview: how a run stands, read from its record and from a few rows of its metrics."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.events import WorkerFailed, WorkerStarted
from paceline.logs.log_reader import last_lines, lines_of
from paceline.monitor.records.event_reader import attempt_dir, decode_event
from paceline.monitor.records.run_record import RUNNING, RunRecord
from paceline.monitor.status.progress import opened_stream
from paceline.ui.metrics_rows import SPEED_ROWS, last_rows, number, sampled_rows
from paceline.units import printable

__all__ = ["FileStamp", "RunSummary", "program_text", "summary_of"]

SPARK_POINTS = 32
STILL_S, STILL_STEPS = 5.0, 10  # without a step for longer than both: it stands still
NUM_LAST_EVENTS = 200  # of the supervisor, in which it says why a run failed
NUM_FIRST_EVENTS = 50  # of a worker, in which it names the plan
MOST_REASON = 300  # characters


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A run by its record (`name` is its place below the folder) and its metrics. Times are seconds since 1970."""

    name: str
    state: str  # running | finished | failed | stopped | lost | unreadable
    is_checked: bool  # that a running run really runs: possible on its own host
    problem: str  # why it failed, or why it cannot be read; "" otherwise
    program: str
    plan: str
    workers: int
    hosts: int
    attempt: int
    began: float  # of the first attempt
    started: float  # of the newest one
    ended: float | None
    step: int
    last_step: int | None  # at which it is to end; None: not known
    epoch: int | None
    loss: float | None
    at: float | None  # when the last step was committed
    samples_per_s: float | None
    step_s: float | None
    left_s: float | None  # until the last step, at the present speed
    spark: tuple[float | None, ...]  # the loss, from the first step to the last

    run_for: str | None  # the framework that takes its steps; None: Paceline

    def facts(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def after(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What these newest rows of its metrics change of its facts, which takes a tenth of reading its files again."""
        return _by_rows(rows, self.run_for, last_step=self.last_step, is_on=self.is_running)

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING


@dataclasses.dataclass(frozen=True, slots=True)
class FileStamp:
    """Tells whether a file has changed, without reading it. Zeros: there is none."""

    inode: int = 0
    size: int = 0
    mtime_ns: int = 0

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        try:
            found = os.stat(path)
        except OSError:
            return cls()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


def summary_of(run_dir: Path, name: str, *, with_spark: bool = True) -> RunSummary:
    """Read a run's summary in about a millisecond, however long the run is. A record that cannot be read gives one of
    state `unreadable`. The `spark` is half of the work."""
    try:
        record = RunRecord.load(run_dir)
    except ValueError as error:
        return _unreadable(run_dir, name, str(error))
    metrics = run_dir / "metrics.jsonl"
    rows = last_rows(metrics, SPEED_ROWS)
    state, last_step, run_for = record.state_now(), _last_step(record), record.job.get("run_for")
    return RunSummary(
        name=name,
        state=state,
        is_checked=record.is_here(),
        problem=_reason(record) if state == "failed" else "",
        program=program_text(record.job),
        plan=printable(_plan(record)),
        workers=record.workers,
        hosts=_whole(record.job.get("hosts"), otherwise=1),
        attempt=record.attempt,
        began=record.attempts[0].started if record.attempts else record.started,
        started=record.started,
        ended=record.ended,
        last_step=last_step,
        spark=_spark(metrics, rows[-1] if rows else {}) if with_spark else (),
        run_for=run_for if isinstance(run_for, str) else None,
        **_by_rows(rows, run_for, last_step=last_step, is_on=state == RUNNING),
    )


def _by_rows(
    rows: Sequence[Mapping[str, Any]], run_for: object, *, last_step: int | None, is_on: bool
) -> dict[str, Any]:
    """The fields of a summary that the newest rows of the metrics say. Rows of another framework's program come when
    that writes its buffers, so they tell no speed, and not each of them has a loss."""
    last = rows[-1] if rows else {}
    step, step_s, epoch = last.get("step", 0), None if run_for is not None else _step_s(rows), last.get("epoch")
    losses = [row["loss"] for row in rows if "loss" in row] if run_for is not None else [last.get("loss")]
    is_timed = is_on and last_step is not None and step_s is not None and last_step > step
    return {
        "step": step,
        "epoch": epoch if type(epoch) is int else None,
        "loss": number(losses[-1]) if losses else None,
        "at": number(last.get("time")),
        "samples_per_s": _samples_per_s(rows),
        "step_s": step_s,
        "left_s": (last_step - step) * step_s if is_timed else None,
    }


def program_text(job: Mapping[str, Any]) -> str:
    """Return the script's name and its arguments, as they were given."""
    program, args = job.get("program"), job.get("args")
    words = [os.path.basename(program)] if isinstance(program, str) and program else []
    words += [str(word) for word in args] if isinstance(args, list | tuple) else []
    return printable(" ".join(words))


def _unreadable(run_dir: Path, name: str, problem: str) -> RunSummary:
    when = FileStamp.of(run_dir / "run.json").mtime_ns / 1e9
    return RunSummary(
        name=name, state="unreadable", is_checked=False, problem=printable(problem)[:MOST_REASON], program="", plan="",
        workers=0, hosts=1, attempt=0, began=when, started=when, ended=None, step=0, last_step=None, epoch=None,
        loss=None, at=None, samples_per_s=None, step_s=None, left_s=None, spark=(), run_for=None,
    )  # fmt: skip


def _last_step(record: RunRecord) -> int | None:
    """The step at which the run is to end: the job's, or what the data gives, whichever is less."""
    opened = opened_stream(attempt_dir(record.run_dir, record.attempt))
    most = record.job.get("max_steps")
    ends = [most if type(most) is int else None, None if opened is None else opened.last_step]
    return min((end for end in ends if end is not None), default=None)


def _plan(record: RunRecord) -> str:
    """The plan that the newest attempt runs, or else the one that it was given."""
    for line in itertools.islice(
        lines_of(attempt_dir(record.run_dir, record.attempt) / "worker_0" / "events.jsonl"), NUM_FIRST_EVENTS
    ):
        found = decode_event(line) if '"WorkerStarted"' in line else None
        if found is not None and isinstance(found.event, WorkerStarted):
            return found.event.plan
    return record.plan or ""


def _reason(record: RunRecord) -> str:
    """Why the newest attempt failed, by what its supervisor has said first."""
    reason = ""
    lines = last_lines(attempt_dir(record.run_dir, record.attempt) / "events.jsonl")
    for line in itertools.islice(lines, NUM_LAST_EVENTS):
        found = decode_event(line) if '"WorkerFailed"' in line else None
        if found is not None and isinstance(found.event, WorkerFailed) and (not found.event.follows or not reason):
            reason = found.event.reason
    return printable(reason)[:MOST_REASON]


def _step_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of a step over the newest rows of one attempt, from commit to commit."""
    own = [row for row in rows if row.get("attempt") == rows[-1].get("attempt")]
    if len(own) < 2 or own[-1]["step"] <= own[0]["step"]:
        return None
    passed = own[-1]["time"] - own[0]["time"]
    return passed / (own[-1]["step"] - own[0]["step"]) if passed > 0 else None


def _samples_per_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The median over the newest rows: the last one alone may be a short batch, or one that waited."""
    known = sorted(value for row in rows if (value := number(row.get("samples_per_s"))) is not None)
    return known[len(known) // 2] if known else None


def _spark(metrics: Path, last: Mapping[str, Any]) -> tuple[float | None, ...]:
    rows = sampled_rows(metrics, SPARK_POINTS)
    if last and rows and rows[-1]["step"] != last["step"]:
        rows.append(dict(last))
    return tuple(None if loss is None else float(f"{loss:.5g}") for loss in (number(row.get("loss")) for row in rows))


def _whole(value: object, *, otherwise: int) -> int:
    return value if type(value) is int and value >= 0 else otherwise
