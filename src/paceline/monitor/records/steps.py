"""Merges what the workers report about a step into one row.

All workers commit a step together, but each writes its own line, and the files are read one after the other. No worker
finishes step k + 2 before all have written step k, since they agree in every step. So a row is given out when all
members have reported it, or when some worker was two steps ahead of it *before* this reading of the files began: what
is still missing then will not come. Replicas that take steps by themselves are waited for until they have reported or
left. A backup worker that was too late for a step does not report it. In an elastic run members come and go: `regroup`,
`join` and `leave` say so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from paceline.events import Record, StepDone

__all__ = ["OTHER", "OWN_NAMES", "PHASES", "IdleShares", "Step", "StepMerger", "loss_of", "parts_of", "real", "shares"]

PHASES = ("data", "compute", "communication", "optimizer", "recovery")  # the last one only where members came or went
OTHER = "other"  # of the time between two commits: the loop's own code, evaluation, records
AHEAD = 2  # steps: see above
OWN_NAMES = frozenset(
    {
        "step",
        "attempt",
        "epoch",
        "time",
        "num_samples",
        "num_dropped",
        "samples_per_s",
        "skipped",
        "wire_ratio",
        "noise_scale",
    }
    | {"seconds"}
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A committed step as all workers saw it."""

    step: int
    epoch: int
    time: float  # when the last worker had committed it
    num_samples: int
    loss: float | None
    metrics: Mapping[str, float]  # means over the workers that reported them
    samples_per_s: float | None  # from the time between two commits
    seconds: Mapping[str, float]  # means over the workers
    skipped: bool
    num_bytes_sent: int  # of all workers together
    workers: tuple[int, ...]  # that have reported
    waited_s: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])  # for the others, by worker
    took_s: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])  # the whole step, by worker
    num_wire_bytes: int = 0  # gradients between replicas, of all workers together
    num_raw_bytes: int = 0  # what these would have been without a codec
    noise_scale: float | None = None  # of gradients, in samples
    num_dropped: int = 0  # of its samples those that came too late, and do not count
    optimizer: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])  # learning rates, grad_norm

    @property
    def measured(self) -> dict[str, float]:
        """What is recorded of the optimizer and what the script reports, which counts where it has the same name."""
        return {**self.optimizer, **self.metrics}


class IdleShares:
    """Adds up which share of its time each worker waited for the others: the slow one is the one that waits least."""

    def __init__(self) -> None:
        self._waited_s: dict[int, float] = {}
        self._took_s: dict[int, float] = {}

    def add(self, row: Step) -> None:
        for worker, seconds in row.took_s.items():
            self._took_s[worker] = self._took_s.get(worker, 0.0) + seconds
            self._waited_s[worker] = self._waited_s.get(worker, 0.0) + row.waited_s.get(worker, 0.0)

    @property
    def shares(self) -> dict[int, float]:
        """From 0 to 1, by worker; of those whose time was measured."""
        return {
            worker: min(1.0, self._waited_s[worker] / seconds)
            for worker, seconds in sorted(self._took_s.items())
            if seconds > 0
        }


class StepMerger:
    """Takes `StepDone` records, in any order between workers; gives out rows in the order of steps, each once."""

    def __init__(self, workers: Collection[int]) -> None:
        self._workers = frozenset(workers)
        self._open: dict[int, dict[int, Record]] = {}
        self._given = 0  # last step that was given out
        self._newest = 0  # step of which any worker has reported
        self._newest_before = 0  # the same when `rows` was last called
        self._alone: list[Record] = []  # reports on steps that only one worker takes part in
        self._has_alone = False  # there were such reports
        self._last_time: float | None = None
        self._ahead: float = AHEAD
        self.last_steps: dict[int, int] = {}  # worker -> last step it has spoken of

    def regroup(self, members: Collection[int]) -> None:
        """Wait for these workers only, from now on."""
        self._workers = frozenset(members)

    def join(self, worker: int) -> None:
        """Wait for this worker, too."""
        self._workers |= {worker}

    def leave(self, worker: int) -> None:
        """Wait for this worker no longer."""
        self._workers -= {worker}

    def add(self, record: Record) -> None:
        """Take one worker's word on a step; a word that comes too late, or twice, changes nothing."""
        event = record.event
        if not isinstance(event, StepDone) or record.worker is None:
            return
        self.last_steps[record.worker] = event.step
        if event.late:
            return  # the workers that took the step report it
        if event.num_here is not None:
            self._ahead = math.inf
        if event.alone:
            self._alone.append(record)
            self._has_alone = True
        elif event.step > self._given:
            self._open.setdefault(event.step, {}).setdefault(record.worker, record)
            self._newest = max(self._newest, event.step)

    def committed_by(self, worker: int) -> int:
        """Return the last step that a worker has committed: workers that take steps together commit them together, and
        one of them may have ended before it had written its last one.
        """
        furthest = max(self.last_steps.values(), default=0)
        own = self.last_steps.get(worker, furthest)
        are_together = not self._has_alone and math.isfinite(self._ahead)
        return furthest if are_together and own == furthest - 1 else own

    def pass_over(self, first_step: int, last_step: int) -> list[Step]:
        """These steps come as sums, and are given out no more; returns the rows before them."""
        rows = self._give_until(first_step - 1)
        self._open = {step: said for step, said in self._open.items() if step > last_step}
        self._given = max(self._given, last_step)
        self._newest = max(self._newest, last_step)
        return rows

    def rows(self) -> list[Step]:
        """Return the rows that have become complete; call it once after each reading of all files."""
        complete = [step for step, said in self._open.items() if self._workers <= said.keys()]
        end = int(max(max(complete, default=0), self._newest_before - self._ahead))
        self._newest_before = self._newest
        return [*self._give_alone(), *self._give_until(end)]

    def rest(self) -> list[Step]:
        """Return what is left, complete or not: for when all writers have ended."""
        return [*self._give_alone(), *self._give_until(self._newest)]

    def _give_alone(self) -> list[Step]:
        """Steps of single workers, in the order of their ends."""
        alone, self._alone = sorted(self._alone, key=lambda record: record.time), []
        return [self._merge({record.worker: record}) for record in alone if record.worker is not None]

    def _give_until(self, end: int) -> list[Step]:
        rows = [self._merge(self._open.pop(step)) for step in sorted(step for step in self._open if step <= end)]
        self._given = max(self._given, end)
        return rows

    def _merge(self, said: Mapping[int, Record]) -> Step:
        events = {worker: record.event for worker, record in sorted(said.items()) if isinstance(record.event, StepDone)}
        first, when = next(iter(events.values())), max(record.time for record in said.values())
        seconds = _means([event.seconds for event in events.values()])
        measured = {worker: event for worker, event in events.items() if set(event.seconds) != {"total"}}
        passed = when - self._last_time if self._last_time is not None else seconds.get("total", 0.0)
        self._last_time = when
        loss, metrics = _named(loss_of(list(events.values())), _means([event.metrics for event in events.values()]))
        return Step(
            step=first.step,
            epoch=first.epoch,
            time=when,
            num_samples=first.num_samples,
            loss=loss,
            metrics=metrics,
            samples_per_s=(first.num_samples - first.num_dropped) / passed
            if passed > 0 and first.num_samples
            else None,  # of a program's own loop no samples are known
            seconds=seconds,
            skipped=first.skipped,
            num_bytes_sent=sum(event.num_bytes_sent for event in events.values()),
            workers=tuple(events),
            waited_s={worker: event.seconds.get("communication", 0.0) for worker, event in measured.items()},
            num_wire_bytes=sum(event.num_wire_bytes for event in events.values()),
            num_raw_bytes=sum(event.num_raw_bytes for event in events.values()),
            noise_scale=first.noise_scale,
            optimizer=_means([event.optimizer for event in events.values()]),
            num_dropped=first.num_dropped,
            took_s={worker: event.seconds.get("total", 0.0) for worker, event in measured.items()},
        )


def parts_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase, and those of `OTHER` that are left of the total; together they are the whole.

    Phases that overlap may come to more than the total: then nothing is left.
    """
    parts = {phase: seconds[phase] for phase in PHASES if phase in seconds}
    if "total" in seconds:
        parts[OTHER] = max(0.0, seconds["total"] - sum(parts.values()))
    return parts


def real(value: float | None) -> float | None:
    """Return a finite number or None: JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None


def loss_of(events: Sequence[StepDone]) -> float | None:
    """The loss of the global batch: all say the same, or each replica that of its own samples."""
    weights = [event.num_samples if event.num_here is None else event.num_here for event in events]
    known = [(event.loss, weight) for event, weight in zip(events, weights, strict=True) if event.loss is not None]
    if not known or all(event.num_here is None for event in events):
        return events[0].loss
    total = sum(weight for _, weight in known)
    return sum(loss * weight for loss, weight in known) / total if total else None


def _means(reports: list[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the reports that have it, names in the order of their appearance."""
    values: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _named(loss: float | None, metrics: dict[str, float]) -> tuple[float | None, dict[str, float]]:
    """Keep a reported metric from hiding a column of ours: it becomes `reported_<name>`; an equal loss is dropped."""
    reported = metrics.pop("loss", None)
    named = {f"reported_{name}" if name in OWN_NAMES else name: value for name, value in metrics.items()}
    if loss is None:
        loss = reported
    elif reported is not None and not math.isclose(reported, loss, rel_tol=1e-5) and not math.isnan(loss):
        named["reported_loss"] = reported
    return loss, named


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each phase's share of the time, and what is left as "other"; empty where no phase was measured."""
    parts = parts_of(seconds)
    if parts.keys() == {OTHER}:
        return {}
    total = sum(parts.values())
    return {phase: part / total for phase, part in parts.items()} if total > 0 else {}
