"""A run's timeline as spans: run > attempt > worker > step > part, with checkpoints, evaluations and incidents.

Identifiers are made from the run and the place of a span in it: a run that is sent twice has the same spans. Clocks of
hosts are aligned by the steps, as in the trace. The newest single steps of each worker are taken.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence

from paceline.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    MicroBatchHalved,
    Record,
    Regrouped,
    Restarted,
    ServerReplaced,
    SpikeSeen,
    WeightsDiffer,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.records.steps import parts_of
from paceline.monitor.report.attempt_log import AttemptLog, StepTime
from paceline.monitor.report.trace import ORDER, clocks_ahead, host_of, newest_steps

__all__ = ["RunSpan", "run_spans"]

Value = str | int | float | bool
INCIDENTS = (
    CheckpointFailed,
    MicroBatchHalved,
    Regrouped,
    Restarted,
    ServerReplaced,
    SpikeSeen,
    WeightsDiffer,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
ERRED = ("failed", "lost")  # states of attempts
ERRORS = (CheckpointFailed, SpikeSeen, WeightsDiffer, WorkerFailed, WorkerLost)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunSpan:
    """A span; times in seconds since 1970. `place` names it, and its parent is the place without the last word."""

    place: tuple[str, ...]
    name: str
    begin: float
    end: float
    resource: Mapping[str, Value]  # of the process that it belongs to
    attributes: Mapping[str, Value] = dataclasses.field(default_factory=dict[str, Value])
    error: str = ""  # why it is an error; "": it is none

    @property
    def span_id(self) -> int:
        return number_of(self.place, num_bytes=8)

    @property
    def parent_id(self) -> int | None:
        return number_of(self.place[:-1], num_bytes=8) if len(self.place) > 1 else None

    @property
    def trace_id(self) -> int:
        return number_of(self.place[:1], num_bytes=16)


def number_of(place: Sequence[str], *, num_bytes: int) -> int:
    """An identifier, never 0, which OpenTelemetry has for none."""
    digest = hashlib.blake2b("\0".join(place).encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest, "big") or 1


def run_spans(record: RunRecord, attempts: Sequence[AttemptLog], *, steps: int) -> Iterator[RunSpan]:
    """Yield the spans of a run, each after its parent."""
    shown = [(log, worker, times) for log in attempts for worker, times in newest_steps(log, steps)]
    ahead = clocks_ahead(shown) if shown else {}
    first = record.attempts[0].started if record.attempts else record.started
    run = f"{record.run_dir.resolve()} {first:.6f}"
    resource: dict[str, Value] = {
        "service.name": "paceline",
        "service.instance.id": "supervisor",
        "host.name": record.host,
        "paceline.run": record.run_dir.resolve().name,
    }
    yield RunSpan(
        place=(run,),
        name=f"run {record.run_dir.resolve().name}",
        begin=min((log.began for log in attempts), default=first),
        end=max((log.ended for log in attempts), default=first),
        resource=resource,
        attributes={"paceline.state": record.state_now(), "paceline.plan": record.plan or ""},
        error="the run has failed" if record.state_now() == "failed" else "",
    )
    for log in attempts:
        yield from _attempt_spans(log, (run, f"attempt {log.attempt}"), resource, ahead)
        for known, worker, times in shown:
            if known is log:
                yield from _worker_spans(log, worker, times, (run, f"attempt {log.attempt}"), resource, ahead)


def _attempt_spans(
    log: AttemptLog, place: tuple[str, ...], resource: Mapping[str, Value], ahead: Mapping[str, float]
) -> Iterator[RunSpan]:
    attributes: dict[str, Value] = {
        "paceline.attempt": log.attempt,
        "paceline.workers": log.workers,
        "paceline.last_step": log.last_step,
        "paceline.state": log.state,
    }
    error = f"the attempt has {'failed' if log.state == 'failed' else 'been lost'}" if log.state in ERRED else ""
    yield RunSpan(
        place=place,
        name=place[-1],
        begin=log.began,
        end=log.ended,
        resource=resource,
        attributes=attributes,
        error=error,
    )
    for number, record in enumerate(log.records):
        if isinstance(record.event, INCIDENTS):
            host = host_of(log, record.worker) if record.worker is not None else ""
            yield _incident(record, (*place, f"incident {number}"), resource, ahead.get(host, 0.0))


def _incident(record: Record, place: tuple[str, ...], resource: Mapping[str, Value], ahead_s: float) -> RunSpan:
    """A span that lasts as long as the incident cost, as far as its event says it."""
    event, end = record.event, record.time - ahead_s
    match event:
        case Restarted(lost_at=lost_at):
            begin = lost_at
        case Regrouped(detected_s=detected_s, regrouped_s=regrouped_s):
            begin = end - detected_s - regrouped_s
        case WorkerJoined(after_s=after_s):
            begin = end - (after_s or 0.0)
        case ServerReplaced(took_s=took_s):
            begin = end - took_s
        case _:
            begin = end
    fields = vars(event)
    attributes = {f"paceline.{name}": _value(value) for name, value in fields.items() if value is not None}
    error = str(fields.get("reason") or type(event).__name__) if isinstance(event, ERRORS) else ""
    return RunSpan(
        place=place,
        name=type(event).__name__,
        begin=min(begin, end),
        end=end,
        resource=resource,
        attributes=attributes,
        error=error,
    )


def _worker_spans(
    log: AttemptLog,
    worker: int,
    times: Sequence[StepTime],
    above: tuple[str, ...],
    of_run: Mapping[str, Value],
    ahead: Mapping[str, float],
) -> Iterator[RunSpan]:
    host = host_of(log, worker)
    ahead_s = ahead.get(host, 0.0)
    own = [record for record in log.records if record.worker == worker]
    started = [record for record in own if isinstance(record.event, WorkerStarted)]
    resource: dict[str, Value] = {**of_run, "service.instance.id": f"worker {worker}", "host.name": host}
    resource["paceline.worker"] = worker
    for record in started[-1:]:
        if isinstance(record.event, WorkerStarted):
            resource |= {"process.pid": record.event.pid, "paceline.device": record.event.device}
            resource["paceline.plan"] = record.event.plan
    place = (*above, f"worker {worker}")
    spans = [span for one in times for span in _step_spans(one, place, resource, ahead_s)]
    spans += [
        _section(record, (*place, f"section {number}"), resource, ahead_s)
        for number, record in enumerate(own)
        if isinstance(record.event, (CheckpointSaved, Evaluated))
    ]
    begin = min([*(record.time - ahead_s for record in started), *(span.begin for span in spans)])
    yield RunSpan(place=place, name=place[-1], begin=begin, end=max(span.end for span in spans), resource=resource)
    yield from spans


def _step_spans(
    one: StepTime, above: tuple[str, ...], resource: Mapping[str, Value], ahead_s: float
) -> Iterator[RunSpan]:
    parts = parts_of(one.seconds)
    total, end = max(sum(parts.values()), one.seconds.get("total", 0.0)), one.time - ahead_s
    place, begin = (*above, f"step {one.step}"), end - total
    attributes: dict[str, Value] = {"paceline.step": one.step, "paceline.skipped": one.skipped}
    yield RunSpan(place=place, name="step", begin=begin, end=end, resource=resource, attributes=attributes)
    for part in ORDER:
        if parts.get(part, 0.0) > 0:
            yield RunSpan(place=(*place, part), name=part, begin=begin, end=begin + parts[part], resource=resource)
            begin += parts[part]


def _section(record: Record, place: tuple[str, ...], resource: Mapping[str, Value], ahead_s: float) -> RunSpan:
    """What stood between two steps: an evaluation, or the stall of a checkpoint."""
    event, end = record.event, record.time - ahead_s
    attributes: dict[str, Value] = {}
    if isinstance(event, Evaluated):
        name, begin = "evaluation", end - event.duration_s
        attributes["paceline.step"] = event.step
        for measure, value in event.metrics.items():
            attributes[f"paceline.eval.{measure}"] = value
    elif isinstance(event, CheckpointSaved):  # it is reported when it has been written
        name, begin = "checkpoint", end - event.write_s - event.stall_s
        attributes = {"paceline.step": event.step, "paceline.bytes": event.num_bytes, "paceline.stall_s": event.stall_s}
    else:
        name, begin = type(event).__name__, end
    return RunSpan(place=place, name=name, begin=begin, end=end, resource=resource, attributes=attributes)


def _value(value: object) -> Value:
    return value if isinstance(value, (str, int, float, bool)) else str(value)
