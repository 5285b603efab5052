"""`paceline audit RUN`: proves that every sample of each finished epoch was used exactly once, or lists what was not.

The proof has two halves. First, the half-open ranges of positions that the valid steps of an epoch used are sorted;
they must follow each other from 0 to the end without gap or overlap. This work grows with the number of ranges, not of
samples. Second, the order that turns positions into samples must be a permutation of the dataset. This is tried for
epochs of up to ten million samples, and for ten million samples in all, spread evenly over the epochs.

Steps that follow each other alike are proved as blocks: of each the first step, and that the next one begins where it
ends. Where something is wrong, the steps around it are looked at one by one.

Of a run that goes on, the newest steps may be in the ledgers of some workers only. They are under way, and left out.

Under asynchronous updates (`ParameterServer(staleness=...)`) the ledgers also record how stale each update was. None
may be staler than the plan allows.

Of a mixture of datasets the report says how many samples each has given, and which share it was to have.

The report has a line for each epoch, and one for each range of samples that was lost or repeated. It counts epochs from
1, as people do.
"""

from __future__ import annotations

import dataclasses
import itertools
import json as json_text
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.monitor.audit.drawn_shares import DrawnShares, drawn_lines
from paceline.monitor.audit.epoch import (
    EpochAudit,
    MissingRange,
    RepeatedRange,
    UndoneRange,
    audit_epoch,
)
from paceline.monitor.audit.epoch_columns import EpochColumns
from paceline.monitor.audit.ledger_reader import MOST_LISTED, AttemptLedger, RunLedgers, StalenessSeen
from paceline.monitor.audit.settled_steps import attempt_under_way
from paceline.monitor.records.run_files import local_path
from paceline.monitor.records.run_record import RunRecord
from paceline.units import printable, workers_text

__all__ = ["AuditResult", "audit", "audit_text", "main_audit"]

MOST_TRIED = 10_000_000  # samples of all epochs, whose orders are tried


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AuditResult:
    """What the ledgers of a run prove."""

    run_dir: str
    num_attempts: int
    epochs: tuple[EpochAudit, ...]
    problems: tuple[str, ...]  # beyond single epochs
    notes: tuple[str, ...]  # worth knowing, nothing wrong
    drawn: Mapping[str, DrawnShares] = dataclasses.field(default_factory=dict[str, DrawnShares])  # of mixtures

    @property
    def is_clean(self) -> bool:
        """Nothing is wrong; nothing need be proved either."""
        return not self.problems and all(epoch.state != "broken" for epoch in self.epochs)

    @property
    def verdict(self) -> str:
        """ "clean": finished epochs are proved; "nothing to prove yet": there is none; "not clean"."""
        if not self.is_clean:
            return "not clean"
        has_proof = any(epoch.state in ("exact", "continued") for epoch in self.epochs)
        return "clean" if has_proof else "nothing to prove yet"


def audit(run_dir: Path | str) -> AuditResult:
    """Read all ledgers of a run and judge them; raises ValueError where `run_dir` is not the directory of a run."""
    run_dir = Path(run_dir)
    if not any(run_dir.glob("attempt_*")):
        RunRecord.load(run_dir)  # says what is wrong with the name
    under_way = attempt_under_way(run_dir)
    ledgers = RunLedgers(run_dir, under_way=under_way)
    problems, notes = list(ledgers.problems), list(ledgers.notes)
    for attempt in ledgers.attempts:
        problems += _partial_steps(attempt)
        notes += _under_way_note(attempt) if attempt.is_under_way else _void_note(attempt)
    for stream, lag in sorted(ledgers.lags.items()):
        problems += _too_far_behind(stream, lag)
        notes.append(_how_far_behind(stream, lag))
    notes += _unprovable(ledgers)
    problems += _missing_ledgers(run_dir, ledgers.attempts)
    if not ledgers.attempts and under_way is not None:
        notes.append(f"attempt {under_way} goes on, and no worker has begun its ledger yet")
    elif not ledgers.attempts:
        problems.append("there is no ledger: no step was committed, and nothing is proved")
    last_epochs = dict(sorted(ledgers.epochs))  # the last epoch of each stream wins
    for stream, last in last_epochs.items():
        present = [epoch for name, epoch in ledgers.epochs if name == stream]
        absent = sorted(set(range(min(present), last)) - set(present))
        problems += [
            f"stream {stream}: epoch {epoch + 1} has no step at all, though epoch {last + 1} has" for epoch in absent
        ]
    tried = _tried_orders(ledgers.epochs)
    rollbacks = [rollback for attempt in ledgers.attempts for _, rollback in sorted(attempt.rollbacks.items())]
    epochs = tuple(
        audit_epoch(
            stream,
            epoch,
            ledgers.epochs[stream, epoch],
            rollbacks,
            is_last=epoch == last_epochs[stream],
            tries_order=(stream, epoch) in tried,
        )
        for stream, epoch in sorted(ledgers.epochs)
    )
    return AuditResult(
        run_dir=str(run_dir),
        num_attempts=len(ledgers.attempts),
        epochs=epochs,
        problems=tuple(problems),
        notes=tuple(notes),
        drawn=dict(sorted(ledgers.drawn.items())),
    )


def main_audit(run_dir: Path | str, json: bool = False) -> int:
    """Print the audit of a run; returns 0 when nothing is wrong in it, 1 when something is, 2 where there is no run."""
    try:
        _refuse_program(Path(run_dir))
        result = audit(run_dir)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    if json:
        judged = {"clean": result.is_clean, "verdict": result.verdict}
        print(json_text.dumps(judged | dataclasses.asdict(result), indent=1))
    else:
        print(printable(audit_text(result)))
    return 0 if result.is_clean else 1


def _refuse_program(run_dir: Path) -> None:
    """Raise ValueError for a run that is a program of another framework."""
    try:
        framework = RunRecord.load(run_dir).job.get("run_for")
    except ValueError:  # the ledgers may be there without it; where they are not, that is reported below
        return
    if framework is not None:
        raise ValueError(
            f"{local_path(run_dir)} is a program of {framework}, which reads its data by itself: which samples "
            "it used is not known, and nothing can be proved of them."
        )


def _tried_orders(epochs: Mapping[tuple[str, int], EpochColumns]) -> set[tuple[str, int]]:
    """The epochs whose orders are tried: all, or as many as there is time for, spread evenly."""
    keys = sorted(epochs)
    num_samples = sum(epochs[key].streams[-1].samples or 0 for key in keys)
    return set(keys[:: max(1, -(-num_samples // MOST_TRIED))])


def _partial_steps(attempt: AttemptLedger) -> list[str]:
    """Say which valid steps some workers have in their ledgers and others have not."""
    says: list[str] = []
    if attempt.silent and attempt.has_steps:
        silent = workers_text(attempt.silent)
        says.append(f"attempt {attempt.number}: {silent} left no readable ledger, though others committed steps")
    for stream, partial in sorted(attempt.partial.items()):
        each = (
            (step, one.having) for one in partial for step in range(one.run.step, one.run.last_step + 1, one.run.stride)
        )
        for step, having in itertools.islice(each, MOST_LISTED):
            lacking = sorted(set(attempt.workers) - set(having))
            says.append(
                f"step {step} of attempt {attempt.number} ({stream}) is in the ledgers of {workers_text(having)} "
                f"but not of {workers_text(lacking)}: its samples were used in part. Where a kill ended the run there, "
                "continuing it from a checkpoint takes the step again"
            )
        more = sum(one.run.num for one in partial) - MOST_LISTED
        if more > 0:
            says.append(f"and {more} more steps of attempt {attempt.number} ({stream})")
    return says


def _too_far_behind(stream: str, lag: StalenessSeen) -> Iterator[str]:
    for step, behind, bound in lag.beyond[:MOST_LISTED]:
        yield (
            f"step {step} ({stream}): the weights that its gradient was computed on lacked {behind} updates, but the "
            f"plan allows {bound} (staleness={bound})"
        )
    if lag.num_beyond > MOST_LISTED:
        yield f"and {lag.num_beyond - MOST_LISTED} more steps of stream {stream} were too far behind"


def _how_far_behind(stream: str, lag: StalenessSeen) -> str:
    bounds = [str(bound) for bound in sorted(bound for bound in lag.bounds if bound is not None)]
    allowed = ", ".join(bounds + ["any number"] * (None in lag.bounds))
    return f"stream {stream}: updates were up to {lag.most} behind; the plan allows {allowed}"


def _missing_ledgers(run_dir: Path, attempts: list[AttemptLedger]) -> list[str]:
    """Say when the newest attempt had more workers than there are ledgers of it here, and all are needed."""
    if not attempts or not os.path.exists(run_dir / "run.json"):
        return []
    record, newest = RunRecord.load(run_dir), attempts[-1]
    here = len(newest.workers) + len(newest.silent)
    if record.attempt != newest.number or here >= record.workers:
        return []
    if newest.has_wholes:  # an elastic run: any member's ledger has the whole steps
        return []
    if newest.is_under_way and not newest.has_steps:  # the others are about to begin
        return []
    return [
        f"attempt {newest.number} had {record.workers} workers, but only {here} of their directories are here: "
        f"copy attempt_{newest.number}/worker_* from the other hosts, then audit again"
    ]


def _under_way_note(attempt: AttemptLedger) -> list[str]:
    if attempt.void_steps is None:
        return []
    first, last = attempt.void_steps
    steps = f"step {first} is" if first == last else f"steps {first}-{last} are"
    has = "has" if len(attempt.silent) == 1 else "have"
    late = f"; {workers_text(attempt.silent)} {has} none" if attempt.silent else ""
    return [f"attempt {attempt.number} goes on: {steps} under way, not yet in the ledgers of all workers{late}"]


def _void_note(attempt: AttemptLedger) -> list[str]:
    if attempt.void_steps is None:
        return []
    first, last = attempt.void_steps
    which = f"steps {first}-{last} of attempt {attempt.number} are void"
    if first == last:
        which = f"step {first} of attempt {attempt.number} is void"
    if attempt.until_step:
        return [f"{which}: a later attempt went on from step {attempt.until_step:.0f}"]
    return [f"{which}: no later attempt went on from this one"]


def _unprovable(ledgers: RunLedgers) -> Iterator[str]:
    """Say of which samples the ledgers prove less than that each was used once."""
    endless = {
        name for (name, _), columns in ledgers.epochs.items() if any(each.samples is None for each in columns.streams)
    }
    for stream in sorted(endless):
        yield (
            f"stream {stream} is an iterable: where its epochs end is not known; what it gave was checked for "
            "repetitions and gaps"
        )
    begun = ledgers.begun_elsewhere
    if begun is not None:
        yield f"the run went on from step {begun.from_step} of {begun.source}: what came before is not in its ledgers"


MOST_STEPS = 20  # skipped ones that are named


def audit_text(result: AuditResult) -> str:
    """Return the audit as text."""
    attempts = "1 attempt" if result.num_attempts == 1 else f"{result.num_attempts} attempts"
    lines = [f"audit of {local_path(result.run_dir)}, {attempts}"]
    for _, alike in itertools.groupby(result.epochs, key=_group_key):
        lines += _epochs_lines(list(alike))
    for stream, drawn in result.drawn.items():
        lines += drawn_lines(stream, drawn)
    lines += [f"  note: {note}" for note in result.notes]
    lines += [f"  PROBLEM: {problem}" for problem in result.problems]
    num_finished = sum(epoch.state in ("exact", "continued") for epoch in result.epochs)
    match result.verdict:
        case "clean":
            finished = f"{num_finished} finished epoch{'s' * (num_finished != 1)}"
            lines.append(f"clean: {finished}, no sample was lost and none was used twice")
        case "nothing to prove yet":
            lines.append(f"nothing to prove yet: {_unfinished(result.epochs)}")
        case _:
            lines.append("NOT clean: see above")
    return "\n".join(lines)


def _unfinished(epochs: Sequence[EpochAudit]) -> str:
    if not any(epoch.num_used and not epoch.num_samples for epoch in epochs):
        return "no finished epoch"
    return "where an iterable ends is not known; so far no position was left out and none was used twice"


def _group_key(epoch: EpochAudit) -> tuple[object, ...]:
    """Equal for neighbors that one line can describe."""
    is_plain = epoch.state == "exact" and not (epoch.skipped_steps or epoch.num_dropped or epoch.undone)
    return (epoch.stream, epoch.num_samples, epoch.weights) if is_plain else (epoch.stream, epoch.epoch, "alone")


def _epochs_lines(epochs: list[EpochAudit]) -> Iterator[str]:
    first, last = epochs[0], epochs[-1]
    if len(epochs) == 1:
        yield from _epoch_lines(first)
        return
    num_tried = sum(epoch.is_permutation is not None for epoch in epochs)
    tried = ", by orders that are permutations" if num_tried else ""
    tried += f" ({num_tried} of {len(epochs)} were tried)" if 0 < num_tried < len(epochs) else ""
    name = f"  {first.stream}, epochs {first.epoch + 1}-{last.epoch + 1} (steps {first.first_step}-{last.last_step}): "
    yield f"{name}in each, each of {_drawn(first.num_samples, first)} was used exactly once{tried}"


def _epoch_lines(epoch: EpochAudit) -> Iterator[str]:
    name = f"  {epoch.stream}, epoch {epoch.epoch + 1} (steps {epoch.first_step}-{epoch.last_step}): "
    if epoch.state == "exact":
        tried = ", by an order that is a permutation" if epoch.is_permutation else ""
        yield f"{name}each of {_drawn(epoch.num_samples, epoch)} was used exactly once{tried}"
    elif epoch.state == "continued":
        yield (
            f"{name}each of {_drawn(epoch.num_used, epoch)} from position {epoch.begins_at:,} on was used exactly "
            "once; those before were another run's"
        )
    elif epoch.state == "unfinished" and not epoch.num_samples:
        used = f"{epoch.num_used:,} samples of an iterable were used{_since(epoch)}"
        yield f"{name}{used}: no position twice, none left out"
    elif epoch.state == "unfinished":
        used = f"{epoch.num_used:,} of {_drawn(epoch.num_samples, epoch)} were used{_since(epoch)}, each once"
        yield f"{name}unfinished; {used}"
    else:
        yield f"{name}BROKEN: {'; '.join(epoch.says)}"
    if epoch.skipped_steps:
        steps = ", ".join(map(str, epoch.skipped_steps[:MOST_STEPS]))
        yield f"    skipped (samples used, weights unchanged): step{'s' * (len(epoch.skipped_steps) > 1)} {steps}"
    if epoch.num_dropped:
        yield f"    dropped (too late for their steps, which were taken without them): {epoch.num_dropped:,} samples"
    for undone in epoch.undone:
        first, last = undone.first_step, undone.last_step
        steps = f"step {first}" if first == last else f"steps {first}-{last}"
        yield f"    undone    {_positions(undone)}, by a rollback of {steps} to step {undone.to_step}: not used again"
    for gap in epoch.missing:
        yield f"    missing   {_positions(gap)}, {_between(gap)}"
    for twice in epoch.repeated:
        by = " and ".join(
            f"step {step} (worker {worker})" for step, worker in zip(twice.steps, twice.workers, strict=True)
        )
        yield f"    repeated  {_positions(twice)}, by {by}"


def _drawn(count: int, epoch: EpochAudit) -> str:
    """So many samples, or draws: a sample that is drawn by weights may come several times, and another not at all."""
    return f"{count:,} draws by {epoch.weights}" if epoch.weights else f"{count:,} samples"


def _since(epoch: EpochAudit) -> str:
    return f" from position {epoch.begins_at:,} on" if epoch.begins_at else ""


def _positions(found: MissingRange | RepeatedRange | UndoneRange) -> str:
    count = found.stop - found.start
    more = ", ..." if count > len(found.samples) else ""
    which = f"position {found.start:,}" if count == 1 else f"positions {found.start:,}-{found.stop - 1:,}"
    if not found.samples:  # of an iterable: its samples cannot be named
        return which
    return f"{which} ({count:,} sample{'s' * (count > 1)}: {', '.join(map(str, found.samples))}{more})"


def _between(gap: MissingRange) -> str:
    if gap.after_step is None and gap.before_step is None:
        return "in no step"
    if gap.after_step == gap.before_step:
        return f"within step {gap.after_step}"
    if gap.before_step is None:
        return f"after step {gap.after_step}"
    if gap.after_step is None:
        return f"before step {gap.before_step}"
    return f"between steps {gap.after_step} and {gap.before_step}"
