"""One sentence for each change, and for each run that waits: what happens, and why."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from paceline.pool.facts import PoolJob
from paceline.units import duration_text

__all__ = ["change_text", "ranks", "waiting_text"]

MOST_NAMES = 3  # of nodes, in a sentence


def change_text(name: str, job: PoolJob, after: Sequence[str], *, rank: int, runs: int) -> str:
    """Say what changes for a run and why. `rank` counts the runs whose seconds count more, of all `runs`."""
    before = job.allocation
    if not after:
        return f"{name} pauses and gives its {_replicas(before)}: {_standing(job, rank, runs)}"
    if not before:
        return f"{name} starts with {_replicas(after)} on {_nodes(after)}."
    if len(before) == len(after):
        return f"{name} moves with {_replicas(after)} to {_nodes(after)}: the devices that it had are no longer there."
    size = f"{name} goes from {len(before)} to {_replicas(after)} on {_nodes(after)}"
    pace = _pace(job, after) / max(_pace(job, before), 1e-9)
    if len(after) > len(before):
        return f"{size}: {_gain(job, before, after, pace)}."
    return f"{size}, at {pace:.2f} of its pace: {_standing(job, rank, runs)}"


def waiting_text(name: str, job: PoolJob, *, devices: int, bound_s: float) -> str:
    """Say why a run that has nothing gets nothing."""
    if job.fewest > devices:
        has = _count(devices, "device")
        return f"{name} cannot start: its minimum is {_count(job.fewest, 'replica')}, and the pool has {has}."
    limit = duration_text(max(0.0, bound_s - job.waited))
    needs = _count(job.fewest, "device")
    return f"{name} waits for {needs}: others go first. It starts as soon as they allow, at the latest in {limit}."


def _gain(job: PoolJob, before: Sequence[str], after: Sequence[str], pace: float) -> str:
    if job.remaining is None:
        return f"it goes on {pace:.2f} times as fast"
    old = job.remaining / max(_pace(job, before), 1e-9)
    new = job.moving_s + job.remaining / max(_pace(job, after), 1e-9)
    return f"it goes on {pace:.2f} times as fast, and finishes {duration_text(max(0.0, old - new))} earlier"


def _standing(job: PoolJob, rank: int, runs: int) -> str:
    """Say why others go before a run."""
    if job.remaining is not None and job.allocation:
        has = f"it has {duration_text(job.remaining / max(_pace(job, job.allocation), 1e-9))} left"
    else:
        has = f"it has had {duration_text(job.attained)} of a device"
    return f"{has}, and {rank} of {_count(runs, 'run')} go first."


def _pace(job: PoolJob, places: Sequence[str]) -> float:
    return job.pace(len(set(places)), len(places))


def _replicas(places: Sequence[str]) -> str:
    return _count(len(places), "replica")


def _nodes(places: Sequence[str]) -> str:
    names = sorted(set(places))
    if len(names) > MOST_NAMES:
        return _count(len(names), "node")
    return f"node {names[0]}" if len(names) == 1 else f"nodes {', '.join(names)}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def ranks(importance: Mapping[str, float]) -> dict[str, int]:
    """Return for each run how many have a larger weight."""
    rising = sorted(importance.values())
    return {name: len(rising) - bisect.bisect_right(rising, weight) for name, weight in importance.items()}
