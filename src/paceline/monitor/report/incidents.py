"""The incidents of a run: which workers were lost, what became of them, and where an attempt ended early.

Losses that fall together, before the others have regrouped, are one incident. The coordinator reports it, since it
decides about members on all hosts. Loss spikes and differing weights are incidents that all workers report alike. An
attempt that did not finish is an incident, too.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

from paceline.events import (
    CheckpointSaved,
    MicroBatchHalved,
    Regrouped,
    Restarted,
    ServerReplaced,
    SpikeSeen,
    TaskLost,
    TaskReady,
    TaskStarted,
    WeightsDiffer,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.console.event_lines import EXIT_CAUSES, spike_cause
from paceline.monitor.report.attempt_log import AttemptLog
from paceline.units import workers_text

__all__ = ["Incident", "Replacement", "Rewinds", "incidents_of", "restart_of", "resumed_from_step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replacement:
    """The successor of a lost worker has committed its first step."""

    worker: int
    time: float
    step: int
    after_s: float


@dataclasses.dataclass(kw_only=True)
class Incident:
    """A loss that the others survived ("loss"), a spike whose step was left out or rolled back ("spike"), weights that
    were healed ("weights"), a parameter server whose mirror took its place ("server"), a worker that left in good order
    ("left"), micro-batches that were halved for want of memory ("memory"), or the early end of an attempt ("end").

    It grows while events are read. `costs` are worker-seconds by account: recovery, repeated, undone, vacant and down.
    """

    kind: str
    attempt: int
    began: float
    step: int = 0  # committed steps from which the run went on
    causes: list[str] = dataclasses.field(default_factory=list[str])
    workers: list[int] = dataclasses.field(default_factory=list[int])  # that were lost, or have left
    went_on: float | None = None  # when the others had formed again, or the next attempt began
    detected_s: float | None = None
    regrouped_s: float | None = None
    members: tuple[int, ...] = ()  # that were left
    holds: bool = False  # they were too few, and waited for others
    steps_lost: int = 0  # that had been committed, and were taken again, or are in no checkpoint
    at_step: int | None = None  # of a spike and of differing weights: the step in hand
    steps_undone: int = 0  # by a rollback; their samples are not used again
    joined: list[Replacement] = dataclasses.field(default_factory=list[Replacement])
    source: str | None = None  # of an end after which all began again at once: where the state was (`Restarted`)
    went_on_as: int | None = None  # of an end: the attempt that went on
    knows_steps: bool = True  # otherwise another framework's program took them
    costs: dict[str, float] = dataclasses.field(default_factory=dict[str, float])

    @property
    def cost_s(self) -> float:
        """Worker-seconds in all accounts."""
        return sum(self.costs.values())

    def book(self, account: str, seconds: float) -> None:
        self.costs[account] = self.costs.get(account, 0.0) + seconds


def incidents_of(log: AttemptLog, later: AttemptLog | None) -> list[Incident]:
    """Return the incidents of one attempt, by their times. The `later` attempt is the next one whose workers started:
    it says which steps were taken again."""
    found: list[Incident] = []
    open_loss: Incident | None = None
    seen: set[tuple[str, int]] = set()  # all workers say alike what they see
    for record in log.records:
        match record.event:
            case WorkerLost() as lost:
                if open_loss is None:
                    open_loss = Incident(kind="loss", attempt=log.attempt, began=record.time, step=lost.step)
                    found.append(open_loss)
                open_loss.began = min(open_loss.began, record.time - lost.silent_s)
                open_loss.workers.append(lost.rank)
                if lost.reason not in open_loss.causes:  # a host's loss is reported for each of its workers
                    open_loss.causes.append(lost.reason)
            case Regrouped() as regrouped:
                if open_loss is None:
                    open_loss = Incident(kind="loss", attempt=log.attempt, began=record.time)
                    open_loss.causes += regrouped.causes
                    found.append(open_loss)
                _went_on(open_loss, record.time, regrouped)
                open_loss = None
            case WorkerJoined(after_s=after_s) as joined if after_s is not None:  # otherwise it replaces no lost worker
                _replacement(found, record.time, joined, after_s)
            case WorkerLeft() as leaving:
                found.append(_left(log.attempt, record.time, leaving))
            case TaskLost() as lost:
                found.append(_task_lost(log.attempt, record.time, lost))
            case TaskReady(rank=worker):
                _task_back(found, record.time, worker)
            case ServerReplaced() as replaced:
                found.append(_replaced(log.attempt, record.time, replaced))
            case SpikeSeen(step=step, action="skip" | "rollback") as spike if ("spike", step) not in seen:
                seen.add(("spike", step))
                found.append(_spike(log.attempt, record.time, spike))
            case MicroBatchHalved() as halved:
                found.append(_halved(log.attempt, record.time, halved))
            case WeightsDiffer(step=step, source=int()) as differ if ("weights", step) not in seen:
                seen.add(("weights", step))
                found.append(_healed(log.attempt, record.time, differ))
            case _:
                pass
    if open_loss is not None:  # no regrouping: the coordinator may know of fewer steps than were committed
        open_loss.step = max(open_loss.step, log.last_step)
    resumed_from = None if later is None else resumed_from_step(later)
    # A run that went on from the end of a finished attempt has lost nothing; one that was started over has.
    if log.state not in ("finished", "running") or (resumed_from is not None and resumed_from < log.last_step):
        found.append(_end(log, later, resumed_from))
    return found


def resumed_from_step(log: AttemptLog) -> int | None:
    """The committed steps that an attempt began with; None where it did not come so far."""
    started = [record.event.resumed_from_step for record in log.records if isinstance(record.event, WorkerStarted)]
    return started[0] if started else None


def restart_of(log: AttemptLog) -> Restarted | None:
    """How an attempt began where the workers of the one before were lost, and all began again at once; else None."""
    return next((record.event for record in log.records if isinstance(record.event, Restarted)), None)


class Rewinds:
    """The moments at which a run went back to an older step: later steps that were recorded before do not count.

    A run that ended early, and has not gone on, will go back to its newest checkpoint.
    """

    def __init__(self, incidents: Sequence[Incident]) -> None:
        moments = sorted(
            (math.inf if incident.went_on is None else incident.went_on, incident.step, place)
            for place, incident in enumerate(incidents)
            if incident.steps_lost + incident.steps_undone > 0
        )
        self._incidents = incidents
        self._times = [moment for moment, _, _ in moments]
        self._oldest = [(step, place) for _, step, place in moments]
        for index in reversed(range(len(self._oldest) - 1)):  # of all later moments
            self._oldest[index] = min(self._oldest[index], self._oldest[index + 1])

    def of(self, step: int, recorded_at: float) -> Incident | None:
        """Return the incident for which a step, recorded at this time, was taken again or undone; None: it counts."""
        index = bisect.bisect_right(self._times, recorded_at)
        if index == len(self._times) or step <= self._oldest[index][0]:
            return None
        return self._incidents[self._oldest[index][1]]


def _went_on(incident: Incident, when: float, regrouped: Regrouped) -> None:
    incident.went_on, incident.step, incident.members = when, regrouped.step, tuple(regrouped.members)
    incident.detected_s, incident.regrouped_s = regrouped.detected_s, regrouped.regrouped_s
    incident.steps_lost, incident.holds = regrouped.steps_lost, regrouped.holds


def _replacement(found: Sequence[Incident], when: float, event: WorkerJoined, after_s: float) -> None:
    for incident in reversed(found):
        if incident.kind == "loss" and event.rank in incident.workers:
            incident.joined.append(Replacement(worker=event.rank, time=when, step=event.step, after_s=after_s))
            return


def _task_lost(attempt: int, when: float, lost: TaskLost) -> Incident:
    return Incident(
        kind="loss", attempt=attempt, began=when, causes=[lost.reason], workers=[lost.rank], knows_steps=False
    )


def _task_back(found: Sequence[Incident], when: float, worker: int) -> None:
    """A task is at work; where it was lost before, it is back."""
    for incident in found:
        if incident.kind == "loss" and incident.workers == [worker] and incident.went_on is None:
            incident.went_on = when


def _left(attempt: int, when: float, leaving: WorkerLeft) -> Incident:
    return Incident(
        kind="left",
        attempt=attempt,
        began=when,
        went_on=when,
        causes=[leaving.reason],
        workers=[leaving.rank],
        members=tuple(leaving.members),
        step=leaving.step,
    )


def _spike(attempt: int, when: float, spike: SpikeSeen) -> Incident:
    to_step = spike.to_step if spike.action == "rollback" else None
    undone = 0 if to_step is None else spike.step - 1 - to_step  # and the spike's own, which no worker took
    step = spike.step - 1 if to_step is None else to_step
    return Incident(
        kind="spike",
        attempt=attempt,
        began=when,
        went_on=when,
        causes=[spike_cause(spike)],
        step=step,
        at_step=spike.step,
        steps_undone=undone,
    )


def _replaced(attempt: int, when: float, replaced: ServerReplaced) -> Incident:
    return Incident(
        kind="server",
        attempt=attempt,
        began=when - replaced.took_s,
        went_on=when,
        causes=[replaced.lost],
        step=replaced.step - 1,
        at_step=replaced.step,
    )


def _halved(attempt: int, when: float, halved: MicroBatchHalved) -> Incident:
    samples = f"{halved.after} sample{'s' if halved.after > 1 else ''}"
    short = workers_text(halved.workers) if halved.workers else "a lost worker"
    return Incident(
        kind="memory",
        attempt=attempt,
        began=when,
        went_on=when,
        causes=[f"{short} ran out of memory; micro-batches of {samples}, not {halved.before}"],
        step=halved.step - 1,
        at_step=halved.step,
    )


def _healed(attempt: int, when: float, differ: WeightsDiffer) -> Incident:
    text = f"weights of {', '.join(differ.who)} differed from {differ.num_alike} others' in {differ.first}"
    return Incident(
        kind="weights",
        attempt=attempt,
        began=when,
        went_on=when,
        causes=[text],
        workers=list(differ.workers),
        step=differ.step,
        at_step=differ.step,
    )


def _end(log: AttemptLog, later: AttemptLog | None, resumed_from: int | None) -> Incident:
    failed = [record.event for record in log.records if isinstance(record.event, WorkerFailed)]
    failed = [event for event in failed if not event.follows and event.rank not in log.echoes] or failed
    reasons = list(dict.fromkeys(event.reason for event in failed))
    if not reasons:
        cause = (
            "the supervisor is gone without a word" if log.state == "lost" else EXIT_CAUSES.get(log.exit_code or 0, "")
        )
        reasons = [cause or ("started over" if log.state == "finished" else log.state)]
    moments = [record.time for record in log.records if isinstance(record.event, WorkerFailed)]
    incident = Incident(kind="end", attempt=log.attempt, began=min([*moments, log.ended]), step=log.last_step)
    incident.causes, incident.workers = reasons, [event.rank for event in failed]
    incident.knows_steps = not any(isinstance(record.event, TaskStarted) for record in log.records)
    restarted = None if later is None else restart_of(later)
    if restarted is not None:
        incident.source, incident.causes, incident.workers = restarted.source, [*restarted.causes], [*restarted.lost]
    if later is not None and resumed_from is not None:
        incident.went_on, incident.went_on_as = later.began, later.attempt
        incident.step, incident.steps_lost = resumed_from, max(0, log.last_step - resumed_from)
    elif log.state != "running" and 0 not in log.elsewhere:  # what worker 0 saved is known
        incident.step = min(log.last_step, _saved_step(log))
        incident.steps_lost = log.last_step - incident.step
    return incident


def _saved_step(log: AttemptLog) -> int:
    """The step from which a next attempt would go on."""
    saved = [record.event.step for record in log.records if isinstance(record.event, CheckpointSaved)]
    return max([*saved, resumed_from_step(log) or 0])
