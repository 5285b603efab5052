"""Which runs get their minimum now, where there is not enough for the minimum of all: they take turns."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.pool.facts import PoolJob, PoolTerms

__all__ = ["admitted", "longest_wait_s"]


DEADLINE_MARGIN = 1.5  # a run with a deadline goes first once it has less than so many times what it needs


def admitted(
    jobs: Mapping[str, PoolJob], weights: Mapping[str, float], devices: int, now: float, terms: PoolTerms
) -> set[str]:
    """Return the runs that get their minimum now. Where all fit, that is all of them.

    Otherwise a run that was let in keeps its minimum for `turn_s`. Then come those that have waited for `patience_s`,
    the longest wait first, and none overtakes them. Then those with a deadline that presses, the earliest first. What
    is left goes to the others by their weights.
    """
    fitting = {name: job for name, job in jobs.items() if job.fewest <= devices}
    if sum(job.fewest for job in fitting.values()) <= devices:
        return set(fitting)
    in_turn = sorted(name for name, job in fitting.items() if job.allocation and job.held < terms.turn_s)
    overdue = [name for name, job in fitting.items() if job.waited >= terms.patience_s]
    overdue.sort(key=lambda name: (-fitting[name].waited, name))
    chosen: set[str] = set()
    for name in in_turn:
        if fitting[name].fewest <= devices:
            chosen.add(name)
            devices -= fitting[name].fewest
    is_open = True
    for name in overdue:
        is_open = is_open and fitting[name].fewest <= devices
        if is_open:
            chosen.add(name)
            devices -= fitting[name].fewest
    others = set(fitting) - set(in_turn) - set(overdue)
    due = {name: fitting[name].deadline or 0.0 for name in others if _presses(fitting[name], now, terms)}
    by_weight = sorted(others - due.keys(), key=lambda name: (-weights[name], name))
    for name in [*sorted(due, key=lambda name: (due[name], name)), *by_weight]:
        job = fitting[name]
        if job.fewest <= devices and (is_open or job.allocation):
            chosen.add(name)
            devices -= job.fewest
    return chosen


def _presses(job: PoolJob, now: float, terms: PoolTerms) -> bool:
    """Whether a run with its minimum would hardly meet its deadline, if it began now. One that has passed asks for
    nothing.
    """
    if job.deadline is None or job.deadline <= now:
        return False
    pace = job.pace(1, job.fewest)
    needs_s = (job.remaining or 0.0) / pace if pace > 0 else 0.0
    return job.deadline - now < DEADLINE_MARGIN * needs_s + job.moving_s + terms.turn_s


def longest_wait_s(jobs: Mapping[str, PoolJob], terms: PoolTerms) -> float:
    """Return the bound on the wait of a run that is submitted now and fits into the pool; seconds.

    It has priority after `patience_s`. Each run that waits already may go before it, for a turn and a decision.
    """
    waiting = sum(1 for job in jobs.values() if not job.allocation)
    return terms.patience_s + (waiting + 1) * (terms.turn_s + terms.interval_s)
