"""What a run under faults has left behind, read from its run directory and compared with an undisturbed run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from paceline.elastic.membership_messages import PREEMPTED
from paceline.events import (
    CheckpointFailed,
    CheckpointSkipped,
    Record,
    Regrouped,
    Restarted,
    StepDone,
    WeightsDiffer,
    WorkerStarted,
)
from paceline.logs.ledger_runs import runs_in
from paceline.logs.log_reader import lines_of
from paceline.monitor.audit.audit import AuditResult, audit
from paceline.monitor.records.event_reader import EventTail
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.records.steps import loss_of
from paceline.plain_data import read_object
from paceline.plan import Gossip, LocalSGD, ParameterServer, Plan
from paceline.testing.drill_folder import Came, DrillFolder
from paceline.testing.faults import OF_SERVERS, Fault, Programme

__all__ = [
    "CURVE_TOLERANCE",
    "LOSSY_TOLERANCE",
    "TOLERANCE",
    "Report",
    "Start",
    "read_report",
    "recovery_s",
    "resumed_from",
]

TOLERANCE = 1e-5  # of losses, relative
LOSSY_TOLERANCE = 0.05  # where a wire keeps what is still to be sent, and it was lost with a replica
CURVE_TOLERANCE = 0.25  # of the mean loss, where other replicas take other steps, and the curve is another one
NO_CHECK = "The plan has to say so: Guard(check_every=1)."
NO_GUARD = "The plan has to say so: Guard(on_spike='skip'), with a window that is half full by then."


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One start of the command, and how it ended."""

    exit_code: int  # negative: killed by that signal
    output: str
    resumable_step: int  # of the newest checkpoint that was whole before this start
    is_late: bool = False  # it was ended because it took too long


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A run, over."""

    folder: Path  # everything of it
    run_dir: Path
    programme: Programme
    came: tuple[Came | None, ...]  # for each fault of the programme
    starts: tuple[Start, ...]
    resumed_from: tuple[int, ...]  # of each attempt: the step that it went on from
    committed: tuple[int, ...]  # of each attempt: the last step
    restarted: tuple[Restarted | None, ...]  # of each attempt that began by itself, because workers were lost: how
    plan: Plan  # as it ran
    workers: int  # at the beginning
    losses: dict[int, float]  # by step
    left_out: frozenset[
        int
    ]  # steps that no worker took, or, where replicas take steps by themselves, one of them did not
    late: frozenset[tuple[int, int]]  # worker, and step whose update was made without its share
    differing: tuple[WeightsDiffer, ...]  # weights that were not equal
    regrouped: tuple[Regrouped, ...]
    failed_saves: tuple[int, ...]  # steps
    passed_over: tuple[str, ...]  # checkpoints that a start did not take, and said so
    audit: AuditResult
    recovery_s: tuple[float | None, ...]  # of each fault that loses a worker: until a step was committed
    notes: tuple[str, ...]  # how faults were made, where there is a choice

    @property
    def exit_code(self) -> int:
        return self.starts[-1].exit_code

    @property
    def output(self) -> str:
        return "".join(start.output for start in self.starts)

    @property
    def steps_lost(self) -> int:
        """Committed steps that had to be taken again."""
        restarts = zip(self.committed, self.resumed_from[1:], strict=False)
        return sum(event.steps_lost for event in self.regrouped) + sum(max(0, a - b) for a, b in restarts)

    @property
    def samples_repeated(self) -> int:
        """Uses of samples beyond the first, in what the run's steps are made of."""
        return sum(epoch.num_repeated for epoch in self.audit.epochs)

    def loss_difference(self, like: Report) -> float:
        """The largest relative difference of a step's loss; infinite where the steps are not the same ones.

        Where a batch was poisoned, of the steps before that: its step is left out, and so the later ones differ. Where
        the curve `is_other_from` a step, that of the means from there on counts as one. NaN where replicas ask for
        their batches by themselves: losses depend on which of them was fast.
        """
        if self.plan.is_asynchronous:
            return math.nan
        if self.losses.keys() != like.losses.keys():
            return math.inf
        differences = [*self._differences(like).values(), self._difference_of_means(like)]
        return max(differences) if self.losses else math.inf

    def largest_difference(self, like: Report, *, steps: Iterable[int] | None = None) -> float:
        """The largest relative difference of a loss, in these steps, or in all that both runs have."""
        common = self.losses.keys() & like.losses.keys() if steps is None else steps
        return max((_difference(self.losses[step], like.losses[step]) for step in common), default=0.0)

    def first_difference(self, like: Report, *, tolerance: float) -> int | None:
        """The first step whose loss differs by more than that; None: there is none."""
        steps = sorted(self.losses.keys() & like.losses.keys())
        return next(
            (step for step in steps if not _difference(self.losses[step], like.losses[step]) <= tolerance), None
        )

    def _differences(self, like: Report) -> dict[int, float]:
        """By step, as far as steps are to have the losses of an undisturbed run."""
        until = min([*self._poisoned, self.is_other_from or math.inf])
        return {step: _difference(loss, like.losses[step]) for step, loss in self.losses.items() if step < until}

    def _difference_of_means(self, like: Report) -> float:
        """That of the mean losses of the steps from which on the curve is another one, in parts of the undisturbed
        run's mean over all steps, since late losses may be next to nothing; 0: of no steps."""
        first, until = self.is_other_from or math.inf, min(self._poisoned, default=math.inf)
        steps = [step for step in self.losses if first <= step < until]
        if not steps:
            return 0.0
        ours, theirs = (sum(losses[step] for step in steps) / len(steps) for losses in (self.losses, like.losses))
        difference = abs(ours - theirs) / (sum(map(abs, like.losses.values())) / len(like.losses))
        return math.inf if math.isnan(difference) else difference

    @property
    def is_other_from(self) -> int | None:
        """The first step whose loss depends on what was lost, by the plan's way to agree; None: all are those of an
        undisturbed run.

        Where replicas take steps by themselves that may be before the loss, by what the lost one was ahead.
        """
        sync, steps = self.plan.sync, list[int]()
        if self.is_elastic and not sync.exact_with_fewer:
            came = zip(self.programme, self.came, strict=True)
            steps += [when.step for fault, when in came if fault.loses_a_worker and when is not None]
        if not sync.exact_again:
            steps += [step + 1 for step in self.resumed_from[1:]]
        if not steps:
            return None
        together = sync.every if isinstance(sync, LocalSGD | Gossip) else 1
        return (max(1, min(steps)) - 1) // together * together + 1

    @property
    def _poisoned(self) -> list[int]:
        """Steps."""
        came = zip(self.programme, self.came, strict=True)
        return [when.step for fault, when in came if fault.poisons and when is not None]

    def broken(self, like: Report, *, tolerance: float | None = None) -> list[str]:
        """The promises that were not kept, a sentence each; `like`: an undisturbed run."""
        numbers = self._numbers(like, tolerance)
        return [*self._unhappened(), *self._ends(), *numbers, *self._restarts()]

    @property
    def tolerance(self) -> float:
        """By how much losses may differ: where a wire rounds, sums over fewer replicas are rounded otherwise, and what
        a lost one had still to send is lost with it."""
        goes_on_without = self.is_elastic and any(fault.loses_a_worker for fault in self.programme)
        return LOSSY_TOLERANCE if goes_on_without and not self.plan.wire.exact else TOLERANCE

    @property
    def is_elastic(self) -> bool:
        return self.plan.layout.is_elastic

    @property
    def may_restart(self) -> bool:
        """Whether what came may end the run, to be started again by the same command."""
        kinds = {fault.kind for fault in self.programme if not self.is_elastic and fault.loses_a_worker}
        if not (isinstance(self.plan.sync, ParameterServer) and self.plan.sync.mirrored):
            kinds |= {fault.kind for fault in self.programme if fault.kind in OF_SERVERS}
            kinds |= {"cut"} if self._may_cut_servers else set()
        return bool(kinds) or any(fault.ends_the_run for fault in self.programme)

    @property
    def _may_cut_servers(self) -> bool:
        return isinstance(self.plan.sync, ParameterServer) and any(fault.kind == "cut" for fault in self.programme)

    def _is_left_by_all(self, start: Start) -> bool:
        """Whether all workers saved and left because a notice came while others were being replaced: too few were left
        to go on without the one that was to leave. No step is lost by that."""
        losses = [fault for fault, came in zip(self.programme, self.came, strict=True) if came and fault.loses_a_worker]
        return start.exit_code == PREEMPTED and len(losses) > 1 and any(fault.kind == "term" for fault in losses)

    def _unhappened(self) -> Iterator[str]:
        for fault, came in zip(self.programme, self.came, strict=True):
            if came is None:
                yield f"{fault} did not come: nothing is proved by this run"
            elif fault.kind == "full_disk" and not self.failed_saves:
                yield f"{fault}: the save at step {came.step} did not fail, though the disk was full"
            elif fault.kind == "flip" and not any(self._is_healed(fault, differ) for differ in self.differing):
                yield f"{fault}: no worker named worker {fault.worker} and healed it. {NO_CHECK}"
            elif fault.poisons and came.step not in self.left_out and (fault.worker, came.step) not in self.late:
                yield f"{fault}: step {came.step} was taken all the same. {NO_GUARD}"

    @staticmethod
    def _is_healed(fault: Fault, differ: WeightsDiffer) -> bool:
        return fault.worker in differ.workers and differ.source is not None

    def _ends(self) -> Iterator[str]:
        last = self.starts[-1]
        if last.is_late:
            yield "the run did not come to its end in time, and was ended"
        elif last.exit_code != 0:
            yield f"the run ended with exit code {last.exit_code}: {_last_words(last.output)}"
        if any(not self._is_left_by_all(start) for start in self.starts[:-1]) and not self.may_restart:
            yield f"the run had to be started {len(self.starts)} times"

    def _numbers(self, like: Report, tolerance: float | None) -> Iterator[str]:
        missing, extra = sorted(like.losses.keys() - self.losses), sorted(self.losses.keys() - like.losses)
        if self.plan.is_asynchronous:
            came = zip(self.programme, self.came, strict=True)
            untold = sum(bool(when) and fault.loses_a_worker for fault, when in came)  # that the audit has all the same
            if len(missing) > untold:
                yield f"steps are missing: {_shown(missing)}"
        elif missing or extra:
            yield f"steps are missing: {_shown(missing)}" if missing else f"steps are too many: {_shown(extra)}"
        else:
            differences, most = self._differences(like), self.tolerance if tolerance is None else tolerance
            difference = max(differences.values(), default=0.0)
            if not difference <= most:
                first = min(step for step, one in differences.items() if not one <= most)
                yield (
                    f"the loss differs by {difference:.1e} (tolerance {most:.0e}), first at step {first}: "
                    f"{self.losses[first]:.6g}, and undisturbed {like.losses[first]:.6g}"
                )
            difference, most = self._difference_of_means(like), CURVE_TOLERANCE if tolerance is None else tolerance
            if not difference <= most:
                since = f"from step {self.is_other_from} on"
                yield f"the mean of the losses {since} differs by {difference:.1e} (tolerance {most:.0e})"
        broken = [step for step, loss in self.losses.items() if not math.isfinite(loss) and step not in self.left_out]
        if self._poisoned and broken and not (missing or extra):
            yield f"the loss is not finite any more: {_shown(broken)}"
        if not self.audit.is_clean:
            says = [*self.audit.problems, *(text for epoch in self.audit.epochs for text in epoch.says)]
            yield f"the audit is not clean: {'; '.join(says)}"
        if self.steps_lost and not self.may_restart:
            yield f"{self.steps_lost} committed steps were lost"

    def _restarts(self) -> Iterator[str]:
        begun = list(zip(self.restarted, self.resumed_from, strict=True))
        by_command = [resumed for restarted, resumed in begun if restarted is None]
        for start, resumed in zip(self.starts[1:], by_command[1:], strict=False):
            if resumed != start.resumable_step:
                yield f"a start went on from step {resumed}; the newest whole checkpoint is of {start.resumable_step}"
        for restarted, resumed in begun:
            if restarted is not None and resumed != restarted.step:
                yield f"the workers began again at step {resumed}, and were to begin at step {restarted.step}"
        torn = any(fault.ends_the_run and came for fault, came in zip(self.programme, self.came, strict=True))
        if torn and not self.passed_over:
            yield "the start after that did not name the checkpoints that it passed over"


def read_report(
    folder: Path, run_dir: Path, *, notes: DrillFolder, starts: Sequence[Start], how: Sequence[str], like: str
) -> Report:
    """Read what a run has left. `like`: the plan's text where no worker came so far as to say it."""
    num_attempts = max(len(starts), RunRecord.load(run_dir).attempt)
    attempts = [_records(run_dir, number) for number in range(1, num_attempts + 1)]
    records = [record for attempt in attempts for record in attempt]
    began = [record.event for record in records if isinstance(record.event, WorkerStarted)]
    came = tuple(notes.when(number) for number in range(len(notes.programme)))
    return Report(
        folder=folder,
        run_dir=run_dir,
        programme=notes.programme,
        came=came,
        starts=tuple(starts),
        resumed_from=tuple(resumed_from(attempt) for attempt in attempts),
        committed=tuple(_committed(run_dir / f"attempt_{number}") for number in range(1, num_attempts + 1)),
        restarted=tuple(map(_restarted, attempts)),
        plan=Plan.parse(began[0].plan if began else like),
        workers=began[0].workers if began else 0,
        losses=_losses(attempts),
        left_out=frozenset(
            record.event.step for record in records if isinstance(record.event, StepDone) and record.event.skipped
        ),
        late=frozenset(
            (record.worker, record.event.step)
            for record in records
            if record.worker is not None and isinstance(record.event, StepDone) and record.event.late
        ),
        differing=tuple(record.event for record in records if isinstance(record.event, WeightsDiffer)),
        regrouped=tuple(record.event for record in records if isinstance(record.event, Regrouped)),
        failed_saves=tuple(record.event.step for record in records if isinstance(record.event, CheckpointFailed)),
        passed_over=tuple(record.event.path for record in records if isinstance(record.event, CheckpointSkipped)),
        audit=audit(run_dir),
        recovery_s=tuple(
            recovery_s(fault, one, attempts) if one is not None else None
            for fault, one in zip(notes.programme, came, strict=True)
        ),
        notes=tuple(how),
    )


def _records(run_dir: Path, attempt: int) -> list[Record]:
    stream = EventTail(run_dir, attempt)
    try:
        return stream.poll(None)
    finally:
        stream.close()


def resumed_from(records: Sequence[Record]) -> int:
    """Where the first workers began; workers that join later do not say. Where a worker was lost again before any had
    begun: where they were to."""
    started = [record.event for record in records if isinstance(record.event, WorkerStarted)]
    restarted = _restarted(records)
    return started[0].resumed_from_step if started else restarted.step if restarted is not None else 0


def _restarted(records: Sequence[Record]) -> Restarted | None:
    """How an attempt began that no user had to start."""
    return next((record.event for record in records if isinstance(record.event, Restarted)), None)


def _committed(directory: Path) -> int:
    """The last step that a worker's ledger of an attempt has."""
    last = 0
    for path in directory.glob("worker_*/ledger.jsonl"):
        for text in lines_of(path):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # cut off by a kill; or no step
                line = read_object(text)
                last = max([last, *(run.last_step for run in runs_in(line) if "step" in line or "runs" in line)])
    return last


def _losses(attempts: Sequence[Sequence[Record]]) -> dict[int, float]:
    """Every committed step's loss, by the workers' own events: a supervisor that was killed may have told less.

    Of a step that was taken again the newest counts.
    """
    told: dict[int, float] = {}
    for records in attempts:
        said: dict[int, dict[int | None, StepDone]] = {}
        for record in records:
            event = record.event
            if isinstance(event, StepDone) and event.loss is not None:
                said.setdefault(event.step, {})[record.worker] = event
        means = {step: loss_of(list(events.values())) for step, events in said.items()}
        told.update((step, loss) for step, loss in means.items() if loss is not None)
    return dict(sorted(told.items()))


def recovery_s(fault: Fault, came: Came, attempts: Sequence[Sequence[Record]]) -> float | None:
    """Seconds until any worker had committed the step that was in hand; where the run was started again, until then."""
    if not fault.loses_a_worker and not fault.ends_the_run and fault.kind not in OF_SERVERS:
        return None
    first = came.step + (came.place == "save")
    later = [records for records in attempts if records and records[0].time > came.time]

    def done(attempts: Sequence[Sequence[Record]], least: int) -> list[float]:
        """When steps from `least` on were."""
        events = [(record.time, record.event) for records in attempts for record in records]
        steps = [(when, event.step) for when, event in events if isinstance(event, StepDone)]
        return [when - came.time for when, step in steps if when > came.time and step >= least]

    # Where nothing was left to be done when the run was started again, the others had gone on.
    return min(done(later, 1) or done(attempts, first), default=None)


def _difference(loss: float, like: float) -> float:
    if loss == like or (math.isnan(loss) and math.isnan(like)):
        return 0.0
    difference = abs(loss - like) / max(abs(loss), abs(like))
    return math.inf if math.isnan(difference) else difference


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _shown(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:8])) + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
