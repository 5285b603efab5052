"""Up to which step all workers of a run that goes on have written their ledgers.

The files of several workers are read at different moments, and a worker writes a step a little later than another. So
the newest steps are in some ledgers only. They are under way: an audit leaves them out, and says so. Of a run that has
ended nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.logs.ledger_runs import Run, runs_in
from paceline.logs.log_reader import lines_of
from paceline.logs.metric_rows import StepRanges
from paceline.monitor.records.attempt_history import parse_ledger_line
from paceline.monitor.records.run_record import RUNNING, RunRecord

__all__ = ["attempt_under_way", "settled_step"]


def attempt_under_way(run_dir: Path) -> int | None:
    """Return the attempt at which the run is at work; None where it has ended, or that is not known here."""
    try:
        record = RunRecord.load(run_dir)
    except ValueError:  # a host that keeps no record
        return None
    return record.attempt if record.state_now() == RUNNING else None


def settled_step(ledgers: Iterable[Path], *, from_step: int) -> int:
    """Return the newest step that no worker has still to write, of an attempt that began after `from_step`.

    Where each worker notes its own part of a step, that is the last step of the one that has come least far. Where one
    worker's ledger has whole steps, it is also the last one before the first step that nobody has written.
    """
    oldest: int | None = None
    have_wholes, written = True, list[tuple[int, int]]()
    for path in ledgers:
        last = from_step
        for run in _runs(path):
            last = max(last, run.last_step)
            have_wholes = have_wholes and run.shape.whole is not None
            if have_wholes:
                written += _ranges(run)
        if len(written) > 1:
            written = StepRanges(written).ranges()
        oldest = last if oldest is None else min(oldest, last)
    settled = from_step if oldest is None else oldest
    return max(settled, StepRanges(written).whole_until(from_step)) if have_wholes else settled


def _runs(ledger: Path) -> Iterator[Run]:
    for text in lines_of(ledger):
        line = parse_ledger_line(text)
        if line is not None and ("step" in line or "runs" in line):
            try:
                yield from runs_in(line)
            except (KeyError, TypeError, ValueError):  # the audit says what is wrong with it
                continue


def _ranges(run: Run) -> Iterator[tuple[int, int]]:
    if run.stride == 1:
        yield run.step, run.last_step
    else:
        yield from ((step, step) for step in range(run.step, run.last_step + 1, run.stride))
