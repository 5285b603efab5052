"""The report of a run: where every second went, what each incident cost, what snapshots cost, and what each worker
held.

A worker's memory is its peak, and the part of it that was the model's and optimizer's state. Each worker has a row,
because pipeline stages and uneven parts differ.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.events import EventsMerged, StateKept, WorkerFinished, WorkerStarted
from paceline.monitor.records.damaged_lines import DamagedLines
from paceline.monitor.records.run_files import local_path
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.report.attempt_log import AttemptLog, read_attempts
from paceline.monitor.report.curves import Curves, read_curves
from paceline.monitor.report.goodput import ACCOUNTS, USEFUL, GoodputLedger, Incident, goodput_ledger
from paceline.monitor.report.measures import Measure, read_measures
from paceline.monitor.report.predicted import ReportedReceipt, read_reported_receipt, receipt_lines
from paceline.monitor.report.presence import WorkerStay, stays_of
from paceline.plan.program_tasks import task_name
from paceline.units import bytes_text, duration_text, workers_text

__all__ = [
    "RunReport",
    "WorkerMemory",
    "clock_text",
    "cost_text",
    "elsewhere_text",
    "incident_text",
    "memory_by_worker",
    "memory_lines",
    "read_report",
    "report_text",
]

WIDTH = 100
MOST_LISTED = 20  # incidents, and workers, that the table shows; the page and the JSON have all
INDENT = 9  # of a receipt's lines
SOURCES = {
    "memory": "from memory",
    "disk": "from disk",
    "nothing": "nothing was kept",
    "program": "what the program saves",
}
COLUMNS = ("useful", "data", "communication", "checkpoint", "start_up", "recovery", "vacant", "idle")  # of a worker


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run with its goodput ledger and curves."""

    run_dir: Path
    state: str
    plan: str | None
    record: RunRecord
    ledger: GoodputLedger
    curves: Curves
    first_step: int | None
    last_step: int | None
    kept: SnapshotCost | None = None  # None: no snapshots in memory
    held: Mapping[int, WorkerMemory] = dataclasses.field(default_factory=lambda: dict[int, WorkerMemory]())  # by worker
    reported: ReportedReceipt = dataclasses.field(default_factory=ReportedReceipt)
    measures: tuple[Measure, ...] = ()  # evaluations, then reported metrics
    stays: tuple[WorkerStay, ...] = ()
    left_out: tuple[str, ...] = ()  # files with lines that cannot be read


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotCost:
    """What snapshots in memory have cost: all of them, of all attempts."""

    num: int
    every: int  # steps, in the end
    seconds: float  # that training stood still
    share: float  # of the time in steps, the standing still included
    num_bytes: int  # of a host's memory
    travel_s: float = 0.0  # that a copy took to the next host at most; 0: none went there


def read_report(run_dir: Path | str, *others: Path | str) -> RunReport:
    """Read a run's files; raises ValueError where `run_dir` is not the directory of a run, or nothing is in it yet.

    `others`: copies of its directories on other hosts. One of all these has the run's record.
    """
    places = [Path(run_dir), *map(Path, others)]
    for place in places:
        if not os.path.isdir(place):
            raise ValueError(f"{str(place)!r} is not a directory: name the directories of one run's hosts.")
    heads = [place for place in places if os.path.exists(place / "run.json")]
    if len(heads) > 1:
        raise ValueError(
            f"{local_path(heads[0])} and {local_path(heads[1])} are two runs, as each has a run.json. Name one run, "
            "and the directories that it has on other hosts."
        )
    record = RunRecord.load(heads[0] if heads else places[0])
    damaged = DamagedLines()
    logs = read_attempts(record, others=[place for place in places if place != record.run_dir], damaged=damaged)
    ledger = goodput_ledger(logs)
    plans = [each.event.plan for log in logs for each in log.records if isinstance(each.event, WorkerStarted)]
    held = memory_by_worker(logs)
    steps = [step for book in ledger.attempts for step in (book.first_step, book.last_step) if step is not None]
    return RunReport(
        run_dir=record.run_dir,
        state=record.state_now(),
        plan=plans[-1] if plans else record.plan,
        record=record,
        ledger=ledger,
        curves=read_curves(record.run_dir / "metrics.jsonl", ledger.elapsed, damaged),
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        kept=_snapshot_cost(logs, ledger),
        held=held,
        reported=read_reported_receipt(
            record, peak=max((one.peak_memory_bytes for one in held.values()), default=None)
        ),
        measures=read_measures(record.run_dir / "metrics.jsonl", logs),
        stays=stays_of(logs),
        left_out=tuple(damaged.texts()),
    )


def report_text(report: RunReport) -> str:
    """Return the report as a table of at most 100 columns."""
    ledger = report.ledger
    attempts = len(ledger.attempts)
    title = (
        f"{local_path(report.run_dir)}: {report.state}, {duration_text(ledger.duration_s)}, "
        f"{len(ledger.workers)} worker{'s' * (len(ledger.workers) != 1)}, {attempts} attempt{'s' * (attempts != 1)}"
    )
    return "\n".join(
        [
            title,
            f"goodput {ledger.goodput:.1%}: the share of that time in "
            + (
                "useful steps"
                if report.record.job.get("run_for") is None
                else "which the program ran (what it did again after a loss is not known)"
            ),
            *(_wrapped(elsewhere_text(ledger), WIDTH) if ledger.elsewhere else []),
            "",
            *_accounts_lines(ledger),
            *_workers_lines(ledger, report.record.job),
            *memory_lines(report.held, most=MOST_LISTED, job=report.record.job),
            *([f"\n{snapshot_cost_text(report.kept)}"] if report.kept is not None else []),
            *_receipt_lines(report.reported),
            *_incidents_lines(ledger),
            *(line for text in report.left_out for line in _wrapped(f"note: {text}", WIDTH)),
        ]
    )


def snapshot_cost_text(kept: SnapshotCost) -> str:
    """Return "snapshots in memory: every 40 steps, 0.4 % of the time, 1.2 GiB per host"."""
    text = f"snapshots in memory: every {kept.every} steps, {kept.share:.1%} of the steps' time"
    away = f", on the next host after {duration_text(kept.travel_s)}" if kept.travel_s else ""
    return f"{text}, {bytes_text(kept.num_bytes)} per host{away}"


def _snapshot_cost(logs: Sequence[AttemptLog], ledger: GoodputLedger) -> SnapshotCost | None:
    events = [record.event for log in logs for record in log.records if isinstance(record.event, StateKept)]
    if not events:
        return None
    records = (record.event for log in logs for record in log.records)
    merged = [event for event in records if isinstance(event, EventsMerged) and event.kind == "StateKept"]
    seconds = sum(event.seconds for event in events) + sum(event.sums.get("seconds", 0.0) for event in merged)
    apart = ("start_up", "recovery", "vacant", "idle", "down")
    in_steps = sum(wall for account, wall in ledger.wall_s.items() if account not in apart)
    return SnapshotCost(
        num=len(events) + sum(event.num for event in merged),
        every=events[-1].every,
        seconds=seconds,
        share=seconds / in_steps if in_steps else 0.0,
        num_bytes=max(event.num_bytes for event in events),
        travel_s=max(event.travel_s for event in events),
    )


def elsewhere_text(ledger: GoodputLedger) -> str:
    """Say whose files are not here."""
    return (
        f"{workers_text(ledger.elsewhere)} ran on other hosts, whose files are not here: their time is not counted "
        "here (copy their run directories, and name them after this one)"
    )


def incident_text(incident: Incident) -> str:
    """Say what happened and how long it took to go on."""
    causes = ", ".join(incident.causes)
    if not incident.knows_steps:
        return _program_incident_text(incident, causes)
    if incident.kind == "end":
        after = f"attempt {incident.attempt} ended after step {incident.step + incident.steps_lost}: {causes}"
        if incident.went_on is None:
            return after + (f"; steps in no checkpoint {incident.steps_lost}" if incident.steps_lost else "")
        went_on = f"attempt {incident.went_on_as} went on from step {incident.step}"
        if incident.source is not None:
            went_on += f" ({SOURCES[incident.source]})"
        return f"{after}; {went_on}, steps lost {incident.steps_lost}"
    if incident.kind == "spike":
        undone = f"rolled back to step {incident.step}, steps undone {incident.steps_undone}"
        return f"step {incident.at_step}: {causes}; left out" + (f", {undone}" if incident.steps_undone else "")
    if incident.kind == "weights":
        return f"step {incident.at_step}: {causes}; healed"
    if incident.kind == "memory":
        return f"step {incident.at_step}: {causes}; run again"
    if incident.kind == "server":
        return f"step {incident.at_step}: {causes}; its mirror took its place"
    if incident.kind == "left":
        go_on = f"{len(incident.members)} worker{'s go' if len(incident.members) != 1 else ' goes'} on"
        return f"worker {incident.workers[0]} has left ({causes}) after step {incident.step}: {go_on}"
    parts = [f"{causes} after step {incident.step}"]
    if incident.went_on is not None:
        parts.append(
            f"detected in {incident.detected_s or 0:.2f} s, regrouped in {incident.regrouped_s or 0:.2f} s, "
            f"steps lost {incident.steps_lost}"
        )
    parts += [f"worker {each.worker} back at step {each.step} after {each.after_s:.2f} s" for each in incident.joined]
    return "; ".join(parts)


def _program_incident_text(incident: Incident, causes: str) -> str:
    """What happened to another framework's program, whose steps are not known."""
    if incident.kind != "end":
        if incident.went_on is None:
            return f"{causes}; the others went on, and it was not back before the end"
        return f"{causes}; back after {duration_text(incident.went_on - incident.began)}, the others went on meanwhile"
    ended = f"attempt {incident.attempt} ended: {causes}"
    if incident.went_on is None:
        return ended
    return f"{ended}; attempt {incident.went_on_as} began, and the program went on from what it had saved"


def cost_text(incident: Incident) -> str:
    """Return "0.54 s: recovery 0.54 s": worker-seconds, by account."""
    if incident.kind in ("left", "server", "memory") and not incident.costs:
        return "nothing"
    parts = [f"{account} {duration_text(seconds)}" for account, seconds in incident.costs.items() if seconds >= 0.0005]
    return f"{duration_text(incident.cost_s)} of workers' time" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


def clock_text(seconds: float) -> str:
    """Return "0:07", "12:30" or "3:05:00"."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def _accounts_lines(ledger: GoodputLedger) -> Iterator[str]:
    whole = ledger.duration_s or 1.0
    yield f"{'where the time went':<20}{'wall':>12}{'share':>8}{'workers':>13}   what it is"
    rows = [(name, ledger.wall_s[name], ledger.worker_s[name], text) for name, text in ACCOUNTS.items()]
    for name, wall, workers, text in rows:
        if workers >= 0.0005:
            mark = "+" if name in USEFUL else " "
            yield (
                f"{mark} {name:<18}{duration_text(wall):>12}{wall / whole:>8.1%}{duration_text(workers):>13}   {text}"
            )
    total = sum(workers for _, _, workers, _ in rows)
    yield f"  {'total':<18}{duration_text(ledger.duration_s):>12}{1:>8.1%}{duration_text(total):>13}   + are useful"


def _label(job: Mapping[str, Any], worker: int) -> str:
    """A worker's number; the task's name where a program has servers."""
    return str(worker) if job.get("servers") is None else task_name(job, worker)


def _workers_lines(ledger: GoodputLedger, job: Mapping[str, Any]) -> Iterator[str]:
    if len(ledger.workers) < 2:
        return
    yield ""
    yield f"{'worker':<9}" + "".join(f"{name.replace('communication', 'comm'):>11}" for name in COLUMNS)
    for worker, accounts in list(ledger.workers.items())[:MOST_LISTED]:
        useful = {"useful": sum(accounts[name] for name in USEFUL)} | dict(accounts)
        yield f"{_label(job, worker):<9}" + "".join(f"{_brief(useful[name]):>11}" for name in COLUMNS)
    if len(ledger.workers) > MOST_LISTED:
        yield f"and {len(ledger.workers) - MOST_LISTED} more: see the page, or --json"


def _receipt_lines(reported: ReportedReceipt) -> Iterator[str]:
    yield ""
    for line in receipt_lines(reported):
        if len(line) <= WIDTH:
            yield line
            continue
        first, *rest = _wrapped(line.strip(), WIDTH - INDENT)
        indent = " " * (len(line) - len(line.lstrip()))
        yield indent + first
        yield from (" " * INDENT + one for one in rest)


def _incidents_lines(ledger: GoodputLedger) -> Iterator[str]:
    if not ledger.incidents:
        return
    yield ""
    yield f"incidents: {len(ledger.incidents)}"
    for incident in ledger.incidents[-MOST_LISTED:]:
        lines = _wrapped(f"{incident_text(incident)}; cost {cost_text(incident)}")
        when = clock_text(ledger.elapsed(incident.began))
        yield from (f"{when if place == 0 else '':>9}  {line}" for place, line in enumerate(lines))
    if len(ledger.incidents) > MOST_LISTED:
        yield f"{'':>9}  and {len(ledger.incidents) - MOST_LISTED} earlier ones: see the page, or --json"


def _wrapped(text: str, width: int = WIDTH - 11) -> Sequence[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False)


def _brief(seconds: float) -> str:
    return duration_text(seconds) if seconds >= 0.0005 else "-"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMemory:
    """Of one worker, in bytes."""

    peak_memory_bytes: int  # of its process, or of its GPU
    state_bytes: int  # parameters, buffers and optimizer state in the end; 0: not known


def memory_by_worker(logs: Sequence[AttemptLog]) -> dict[int, WorkerMemory]:
    """Return what the workers of the newest attempt that came to an end have reported, by worker."""
    for log in reversed(logs):
        finished = [record.event for record in log.records if isinstance(record.event, WorkerFinished)]
        if finished:
            return {
                one.rank: WorkerMemory(peak_memory_bytes=one.peak_memory_bytes, state_bytes=one.state_bytes)
                for one in sorted(finished, key=lambda one: one.rank)
            }
    return {}


def memory_lines(held: Mapping[int, WorkerMemory], *, most: int, job: Mapping[str, Any] | None = None) -> Iterator[str]:
    """A table with a row for each of the first `most` workers; empty if none has reported."""
    if not held:
        return
    yield ""
    yield f"{'worker':<9}{'peak memory':>13}   {'of it parameters, buffers and optimizer state'}"
    for worker, one in list(held.items())[:most]:
        state = bytes_text(one.state_bytes) if one.state_bytes else "not known"
        yield f"{_label(job or {}, worker):<9}{bytes_text(one.peak_memory_bytes):>13}   {state}"
    if len(held) > most:
        yield f"and {len(held) - most} more: see --json"
