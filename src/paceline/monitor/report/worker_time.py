"""Attributes each second of one worker's place in an attempt to an account of the goodput report, from its events."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

from paceline.events import (
    CheckpointSaved,
    Evaluated,
    EventsMerged,
    Record,
    StateKept,
    TaskLost,
    TaskReady,
    TaskStarted,
    WorkerFinished,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from paceline.monitor.records.steps import OTHER, PHASES
from paceline.monitor.report.attempt_log import AttemptLog, StepTime
from paceline.monitor.report.incidents import Incident, Rewinds

__all__ = ["ACCOUNTS", "USEFUL", "WorkerTime"]

PROGRAM = "program"
ACCOUNTS: dict[str, str] = {
    "compute": "forward and backward",
    "optimizer": "the optimizer's step",
    OTHER: "the script's own code in a step",
    PROGRAM: "another framework's program, whose steps are not known",
    "data": "waiting for data",
    "communication": "waiting for other workers in a step",
    "evaluation": "worker.evaluate",
    "checkpoint": "standing still for a save, or a snapshot in memory",
    "start_up": "from the command to the first step",
    "recovery": "dropped work, regrouping, successors' start",
    "repeated": "steps that had to be taken again",
    "undone": "steps left out, undone by a rollback, or not saved",
    "vacant": "the empty place of a worker that was lost or has left",
    "idle": "no step left to take",
    "down": "between attempts",
}
USEFUL = ("compute", "optimizer", OTHER, PROGRAM)


class WorkerTime:
    """Takes the events of the workers that held one place, by time; `close` returns what it comes to.

    `note(began, ended, parts)` is called with every stretch of time that was attributed.
    """

    def __init__(
        self,
        worker: int,
        log: AttemptLog,
        incidents: Sequence[Incident],
        rewinds: Rewinds,
        note: Callable[[float, float, Mapping[str, float]], None],
        *,
        begun_by: Incident | None = None,
    ) -> None:
        """`begun_by`: the loss after which all began again, as this attempt."""
        self.first_step: int | None = None
        self.last_step: int | None = None
        self._worker, self._log, self._rewinds, self._note = worker, log, rewinds, note
        self._accounts = dict.fromkeys(ACCOUNTS, 0.0)
        self._until = log.began  # all time before is attributed
        self._state = "new"  # new | starting | at work | program | vacant | finished | given up
        self._incident = begun_by  # that emptied the place
        self._usual: dict[str, float] = {}  # an undisturbed step's seconds, by account
        self._evaluation_s = self._stall_s = self._keep_s = 0.0  # since the last recorded step
        losses = [incident for incident in incidents if incident.kind == "loss"]
        self._own_losses = [incident for incident in losses if worker in incident.workers]
        self._leavings = [one for one in incidents if one.kind == "left" and worker in one.workers]
        self._end = next((incident for incident in incidents if incident.kind == "end"), None)
        self._left_out = {incident.at_step: incident for incident in incidents if incident.kind == "spike"}
        self._disturbed = _disturbed(losses, worker)
        saves = [record for record in log.records if isinstance(record.event, CheckpointSaved)]
        self._stalls = {_save(record).step: _save(record).stall_s for record in saves}
        events = [record.event for record in log.records]
        self._keeps = {event.step: event.seconds for event in events if isinstance(event, StateKept)}
        for event in events:
            if isinstance(event, EventsMerged) and event.last_step is not None:
                stall_s = event.sums.get("stall_s", 0.0) if event.kind == "CheckpointSaved" else 0.0
                keep_s = event.sums.get("seconds", 0.0) if event.kind == "StateKept" else 0.0
                self._stalls[event.last_step] = self._stalls.get(event.last_step, 0.0) + stall_s
                self._keeps[event.last_step] = self._keeps.get(event.last_step, 0.0) + keep_s
        self._stall_steps, self._keep_steps = sorted(self._stalls), sorted(self._keeps)
        self._own_saves = {_save(record).step: _save(record) for record in saves if record.worker == worker}

    def take(self, item: Record | StepTime) -> None:
        when = min(max(item.time, self._until), self._log.ended)  # the clocks of hosts differ
        if isinstance(item, StepTime):
            if item.num > 1:
                self._steps(item, when)
            else:
                self._step(item, when)
            return
        match item.event:
            case WorkerStarted(startup_s=startup_s):
                self._started(when, startup_s)
            case WorkerLost():
                self._incident = self._own_losses.pop(0) if self._own_losses else self._incident
                self._book(when, {"recovery": when - self._until}, self._incident)
                self._state = "vacant"
            case WorkerLeft(resized=resized):
                if self._state != "finished":
                    self._last_words(when)
                self._incident = self._leavings.pop(0) if self._leavings else None
                self._state = "given up" if resized else "vacant"
            case TaskStarted():
                self._book_start(when)
                self._state = "starting"
            case TaskReady():
                self._book_start(when)
                self._state, self._incident = "program", None
            case TaskLost():
                if self._state == "program":
                    self._book(when, {PROGRAM: when - self._until})
                self._book_start(when)
                self._state, self._incident = "vacant", self._own_losses.pop(0) if self._own_losses else None
            case WorkerFinished() if self._state == "program":
                self._book(when, {PROGRAM: when - self._until})
                self._state = "finished"
            case WorkerFinished():
                self._last_words(when)
                self._state = "finished"
            case Evaluated(duration_s=duration_s):
                self._evaluation_s += duration_s
            case EventsMerged(kind="Evaluated", sums=sums):
                self._evaluation_s += sums.get("duration_s", 0.0)
            case _:
                pass

    def close(self) -> dict[str, float]:
        """Book what is left of the attempt; return the accounts."""
        ended = self._log.ended
        rest = ended - self._until
        match self._state:
            case "program":
                self._book(ended, {PROGRAM: rest})
            case "finished":
                if (self.last_step or 0) >= self._log.last_step:  # else it left before the others: its place is gone
                    self._book(ended, {"idle": rest})
            case "given up":
                pass  # the run was made smaller on purpose
            case "vacant":
                self._book(ended, {"vacant": rest}, self._incident)
            case "new":
                self._book(ended, {"recovery" if self._incident else "start_up": rest}, self._incident)
            case "starting":
                self._book(ended, {"recovery" if self._incident else "start_up": rest}, self._incident)
            case _ if self._end is not None:
                self._book(ended, {"recovery": rest}, self._end)
            case _ if self._log.state == "running":
                self._book(ended, {OTHER: rest})
            case _:
                self._last_words(ended)
        return self._accounts

    def _started(self, when: float, startup_s: float) -> None:
        forked = max(self._until, when - startup_s)
        if self._state == "vacant":
            self._book(forked, {"vacant": forked - self._until}, self._incident)
        elif self._state in ("finished", "given up") or self._worker >= self._log.workers:
            self._until = forked  # the place was added later, or was given up for a time
            self._incident = None
        self._state = "starting"

    def _book_start(self, when: float) -> None:
        """Book the start of a program: of one that replaces a lost one, it is part of the incident."""
        account = "start_up" if self._incident is None else "recovery"
        self._book(when, {account: when - self._until}, self._incident)

    def _step(self, step_time: StepTime, when: float) -> None:
        length = when - self._until
        parts = {phase: max(0.0, step_time.seconds.get(phase, 0.0)) for phase in PHASES}
        measured = sum(parts.values())
        if measured > length:  # clocks differ a little, and parts may overlap
            parts = {phase: seconds * length / measured for phase, seconds in parts.items()}
        rest = max(0.0, length - measured)
        owner = self._disturbed.get(step_time.step)
        if self._state == "starting":
            self._state, owner, self._incident = "at work", self._incident, None
            parts["start_up"] = 0.0
            parts["recovery" if owner else "start_up"] += rest
        elif owner is not None and step_time.time >= owner.began:
            parts = self._as_usual(length)
        else:
            owner = None
            self._share_out(parts, rest)
            self._usual = {**parts, "recovery": 0.0}
        rewound_by = self._rewinds.of(step_time.step, step_time.time)
        if rewound_by is not None:
            owner = rewound_by
            is_undone = rewound_by.kind == "spike" or rewound_by.went_on is None
            parts = _wasted(parts, "undone" if is_undone else "repeated")
        elif step_time.skipped:
            parts, owner = _wasted(parts, "undone"), self._left_out.get(step_time.step)
        self._evaluation_s, self._stall_s = 0.0, self._stalls.get(step_time.step, 0.0)
        self._keep_s = self._keeps.get(step_time.step, 0.0)
        self.first_step, self.last_step = self.first_step or step_time.step, step_time.step
        self._book(when, parts, owner)

    def _steps(self, told: StepTime, when: float) -> None:
        """Book steps that were summed up. Those among them that do not count, because the run went back or no worker
        took them, are that share of each account."""
        length = when - self._until
        parts = {phase: max(0.0, told.seconds.get(phase, 0.0)) for phase in PHASES}
        measured = sum(parts.values())
        if measured > length:
            parts = {phase: seconds * length / measured for phase, seconds in parts.items()}
        if self._state == "starting":
            self._state, self._incident = "at work", None
        self._stall_s += _between(self._stalls, self._stall_steps, told.first, told.step - 1)
        self._keep_s += _between(self._keeps, self._keep_steps, told.first, told.step - 1)
        self._share_out(parts, max(0.0, length - measured))
        self._usual = {account: seconds / told.num for account, seconds in parts.items()} | {"recovery": 0.0}
        self._evaluation_s, self._stall_s = 0.0, self._stalls.get(told.step, 0.0)
        self._keep_s = self._keeps.get(told.step, 0.0)
        self.first_step, self.last_step = self.first_step or told.first, told.step
        began, total_s = self._until, told.seconds.get("total", 0.0)
        rewound_by = self._rewinds.of(told.step, told.time)
        lost = (told.step - max(rewound_by.step, told.first - 1)) / (told.step - told.first + 1) if rewound_by else 0.0
        skipped = min(told.skipped_s / total_s, 1.0) if total_s > 0 else 0.0
        counted = {account: seconds * (1 - lost) for account, seconds in parts.items()}
        undone = {account: seconds * skipped for account, seconds in counted.items()}
        counted = {account: seconds - undone[account] for account, seconds in counted.items()}
        counted["undone"] = counted.get("undone", 0.0) + sum(undone.values())
        self._book(began + length * (1 - lost), counted)
        if rewound_by is not None:
            is_undone = rewound_by.kind == "spike" or rewound_by.went_on is None
            account = "undone" if is_undone else "repeated"
            self._book(when, {account: length * lost}, rewound_by)

    def _as_usual(self, length: float) -> dict[str, float]:
        """A disturbed step counts like the one before; what it took longer was lost."""
        usual = sum(self._usual.values())
        shrink = min(1.0, length / usual) if usual else 0.0
        parts = {account: seconds * shrink for account, seconds in self._usual.items()}
        parts["recovery"] = max(0.0, length - usual)
        return parts

    def _share_out(self, parts: dict[str, float], rest: float) -> None:
        """Divide what a step did not measure. While one worker saves, the others wait for it in their exchange."""
        parts["evaluation"] = min(self._evaluation_s, rest)
        rest -= parts["evaluation"]
        if self._own_saves:
            parts["checkpoint"] = min(self._stall_s, rest)
            rest -= parts["checkpoint"]
        else:
            parts["checkpoint"] = min(self._stall_s, parts["communication"])
            parts["communication"] -= parts["checkpoint"]
        kept_s = min(self._keep_s, rest)  # all workers at the same time
        parts["checkpoint"] += kept_s
        parts[OTHER] = rest - kept_s

    def _last_words(self, when: float) -> None:
        """Book what came after the last step: an evaluation, the last save, and whatever the script does then."""
        length = max(0.0, when - self._until)
        if self.last_step is None:
            self._book(when, {"start_up": length})
            return
        parts = {"evaluation": min(self._evaluation_s, length)}
        save = self._own_saves.get(self.last_step)
        if save is not None:  # nothing goes on meanwhile: also the writing is waited for
            parts["checkpoint"] = min(length - parts["evaluation"], save.stall_s + save.write_s)
        parts["idle"] = max(0.0, length - sum(parts.values()))
        self._book(when, parts)

    def _book(self, until: float, parts: Mapping[str, float], incident: Incident | None = None) -> None:
        """Book everything up to a moment; what is not ordinary work is the incident's cost, where there is one."""
        if until <= self._until:
            return
        for account, seconds in parts.items():
            self._accounts[account] += seconds
            if incident is not None and account in ("recovery", "repeated", "undone", "vacant"):
                incident.book(account, seconds)
        self._note(self._until, until, parts)
        self._until = until


def _between(seconds: Mapping[int, float], steps: Sequence[int], first: int, last: int) -> float:
    """The seconds of steps `first` to `last`; `steps` are all of them, in order."""
    within = steps[bisect.bisect_left(steps, first) : bisect.bisect_right(steps, last)]
    return sum(seconds[step] for step in within)


def _wasted(parts: Mapping[str, float], account: str) -> dict[str, float]:
    """Book a step that did not count under one account. What came before it, the start, was not the step's."""
    kept = {name: seconds for name, seconds in parts.items() if name == "start_up"}
    return {**kept, account: sum(parts.values()) - sum(kept.values())}


def _disturbed(losses: Sequence[Incident], worker: int) -> dict[int, Incident]:
    """The steps at which a worker was held up: by a loss, or because a successor was taken in."""
    steps = {incident.step + 1: incident for incident in losses if incident.went_on is not None}
    for incident in losses:
        for joined in incident.joined:
            if joined.worker != worker:
                steps.setdefault(joined.step, incident)
    return steps


def _save(record: Record) -> CheckpointSaved:
    if not isinstance(record.event, CheckpointSaved):
        raise TypeError(f"not a save: {record.event}")
    return record.event
