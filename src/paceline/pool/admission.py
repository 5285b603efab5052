"""Which runs get their minimum now, where there is not enough for the minimum of all: they take turns."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.pool.facts import PoolJob, PoolTerms

__all__ = ["admitted", "longest_wait_s"]


def admitted(jobs: Mapping[str, PoolJob], weights: Mapping[str, float], devices: int, terms: PoolTerms) -> set[str]:
    """Return the runs that get their minimum now. Where all fit, that is all of them.

    Otherwise a run that was let in keeps its minimum for `turn_s`. Then come those that have waited for `patience_s`,
    the longest wait first, and none overtakes them. What is left goes to the others by their weights.
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
    for name in sorted(set(fitting) - set(in_turn) - set(overdue), key=lambda name: (-weights[name], name)):
        job = fitting[name]
        if job.fewest <= devices and (is_open or job.allocation):
            chosen.add(name)
            devices -= job.fewest
    return chosen


def longest_wait_s(jobs: Mapping[str, PoolJob], terms: PoolTerms) -> float:
    """Return the bound on the wait of a run that is submitted now and fits into the pool; seconds.

    It has priority after `patience_s`. Each run that waits already may go before it, for a turn and a decision.
    """
    waiting = sum(1 for job in jobs.values() if not job.allocation)
    return terms.patience_s + (waiting + 1) * (terms.turn_s + terms.interval_s)
