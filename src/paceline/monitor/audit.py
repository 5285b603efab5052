"""`paceline audit RUN`: proves that every sample of each finished epoch was used exactly once, or lists what was not.

The proof has two halves. The half-open ranges of positions that the valid steps of an epoch used are sorted, and must
follow each other without a gap or an overlap from 0 to the end: the work grows with the number of ranges, not of
samples. And the order that turns positions into samples must be a permutation of the dataset: for epochs of up to ten
million samples that is tried, too.

Where replicas take turns (`ParameterServer(staleness=...)`) the ledgers also say how far each update was behind: none
may be further than the plan allowed.
"""

from __future__ import annotations

import dataclasses
import json as json_text
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.monitor.audit_epoch import MOST_LISTED, EpochAudit, judge
from paceline.monitor.cover import column
from paceline.monitor.ledgers import Attempt, Lag, Ledgers
from paceline.monitor.once import workers_text
from paceline.monitor.run_record import RunRecord

__all__ = ["AuditResult", "audit", "main_audit"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AuditResult:
    """What the ledgers of a run prove."""

    run_dir: str
    num_attempts: int
    epochs: tuple[EpochAudit, ...]
    problems: tuple[str, ...]  # beyond single epochs
    notes: tuple[str, ...]  # worth knowing, nothing wrong

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
    ledgers = Ledgers(run_dir)
    problems, notes = list(ledgers.problems), list(ledgers.notes)
    for attempt in ledgers.attempts:
        problems += _partial_steps(attempt)
        notes += _void_note(attempt)
    for stream, lag in sorted(ledgers.lags.items()):
        problems += _too_far_behind(stream, lag)
        notes.append(_how_far_behind(stream, lag))
    notes += _what_cannot_be_known(ledgers)
    problems += _elsewhere(run_dir, ledgers.attempts)
    if not ledgers.attempts:
        problems.append("there is no ledger: no step was committed, and nothing is proved")
    last_epochs = dict(sorted(ledgers.epochs))  # the last epoch of each stream wins
    for stream, last in last_epochs.items():
        present = [epoch for name, epoch in ledgers.epochs if name == stream]
        absent = sorted(set(range(min(present), last)) - set(present))
        problems += [
            f"stream {stream}: epoch {epoch + 1} has no step at all, though epoch {last + 1} has" for epoch in absent
        ]
    rollbacks = [rollback for attempt in ledgers.attempts for _, rollback in sorted(attempt.rollbacks.items())]
    epochs = tuple(
        judge(stream, epoch, ledgers.epochs[stream, epoch], rollbacks, is_last=epoch == last_epochs[stream])
        for stream, epoch in sorted(ledgers.epochs)
    )
    return AuditResult(
        run_dir=str(run_dir),
        num_attempts=len(ledgers.attempts),
        epochs=epochs,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def main_audit(run_dir: Path | str, json: bool = False) -> int:
    """Print the audit of a run; returns 0 when nothing is wrong in it, 1 when something is, 2 where there is no run."""
    try:
        result = audit(run_dir)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    if json:
        judged = {"clean": result.is_clean, "verdict": result.verdict}
        print(json_text.dumps(judged | dataclasses.asdict(result), indent=1))
    else:
        from paceline.monitor.audit_report import report

        print(report(result))
    return 0 if result.is_clean else 1


def _partial_steps(attempt: Attempt) -> list[str]:
    """Say which valid steps some workers have in their ledgers and others have not."""
    says: list[str] = []
    if attempt.silent and attempt.steps:
        silent = workers_text(attempt.silent)
        says.append(f"attempt {attempt.number}: {silent} left no readable ledger, though others committed steps")
    for stream, by_worker in sorted(attempt.steps.items()):
        columns = {worker: np.unique(column(by_worker.get(worker, array("q")))) for worker in attempt.workers}
        steps, counts = np.unique(np.concatenate(list(columns.values())), return_counts=True)
        partial = steps[counts < len(attempt.workers)]
        for step in partial[:MOST_LISTED].tolist():
            having = [worker for worker, known in columns.items() if _contains(known, step)]
            lacking = sorted(set(attempt.workers) - set(having))
            says.append(
                f"step {step} of attempt {attempt.number} ({stream}) is in the ledgers of {workers_text(having)} "
                f"but not of {workers_text(lacking)}: its samples were used in part. Where a kill ended the run there, "
                "continuing it from a checkpoint takes the step again"
            )
        if len(partial) > MOST_LISTED:
            says.append(f"and {len(partial) - MOST_LISTED} more steps of attempt {attempt.number} ({stream})")
    return says


def _too_far_behind(stream: str, lag: Lag) -> Iterator[str]:
    for step, behind, bound in lag.beyond[:MOST_LISTED]:
        yield (
            f"step {step} ({stream}): the weights that its gradient was computed on lacked {behind} updates, but the "
            f"plan allows {bound} (staleness={bound})"
        )
    if len(lag.beyond) > MOST_LISTED:
        yield f"and {len(lag.beyond) - MOST_LISTED} more steps of stream {stream} were too far behind"


def _how_far_behind(stream: str, lag: Lag) -> str:
    bounds = [str(bound) for bound in sorted(bound for bound in lag.bounds if bound is not None)]
    allowed = ", ".join(bounds + ["any number"] * (None in lag.bounds))
    return f"stream {stream}: updates were up to {lag.most} behind; the plan allows {allowed}"


def _elsewhere(run_dir: Path, attempts: list[Attempt]) -> list[str]:
    """Say when the newest attempt had more workers than there are ledgers of it here, and all are needed."""
    if not attempts or not (run_dir / "run.json").exists():
        return []
    record, newest = RunRecord.load(run_dir), attempts[-1]
    here = len(newest.workers) + len(newest.silent)
    if record.attempt != newest.number or here >= record.workers:
        return []
    if newest.wholes:  # an elastic run: any member's ledger has the whole steps
        return []
    return [
        f"attempt {newest.number} had {record.workers} workers, but only {here} of their directories are here: "
        f"copy attempt_{newest.number}/worker_* from the other hosts, then audit again"
    ]


def _contains(ordered: NDArray[np.int64], value: int) -> bool:
    place = int(np.searchsorted(ordered, value))
    return place < len(ordered) and int(ordered[place]) == value


def _void_note(attempt: Attempt) -> list[str]:
    void = np.unique(column(attempt.void_steps))
    if not len(void):
        return []
    which = f"steps {void[0]}-{void[-1]} of attempt {attempt.number} are void"
    if len(void) == 1:
        which = f"step {void[0]} of attempt {attempt.number} is void"
    if attempt.until_step:
        return [f"{which}: a later attempt went on from step {attempt.until_step:.0f}"]
    return [f"{which}: no later attempt went on from this one"]


def _what_cannot_be_known(ledgers: Ledgers) -> Iterator[str]:
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
