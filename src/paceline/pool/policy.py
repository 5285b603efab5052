"""Which run gets which devices now: a pure function of what is known of runs and nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from paceline.pool.facts import PoolJob, PoolTerms, check_nodes

__all__ = ["PoolChange", "PoolDecision", "PoolJob", "PoolTerms", "allocate", "decide"]


@dataclasses.dataclass(frozen=True, slots=True)
class PoolChange:
    """What changes for one run, and why: one sentence."""

    job: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PoolDecision:
    """The node of each replica of each run, and what that changes. A run without an entry has nothing now."""

    allocations: Mapping[str, list[str]]
    changes: Sequence[PoolChange]


def allocate(
    jobs: Mapping[str, PoolJob], nodes: Mapping[str, int], now: float, terms: PoolTerms | None = None
) -> dict[str, list[str]]:
    """Return the node of each replica of each run: `{"cifar-3": ["a", "a", "b"]}`.

    `nodes` has the devices of each node; `now` is the time on the clock of deadlines. A run that is not in the result,
    or that has an empty list there, gets nothing now. An allocation that stays is returned as it was. PlanError for
    facts that cannot be.
    """
    return dict(decide(jobs, nodes, now, terms).allocations)


def decide(
    jobs: Mapping[str, PoolJob], nodes: Mapping[str, int], now: float, terms: PoolTerms | None = None
) -> PoolDecision:
    """Return what `allocate` does, with one sentence for each change."""
    check_nodes(nodes)
    free = dict(nodes)
    found: dict[str, list[str]] = {}
    for name, job in sorted(jobs.items(), key=lambda one: (-one[1].age, one[0])):
        places = [node for node in sorted(free) for _ in range(free[node])][: job.fewest]
        if len(places) == job.fewest:
            found[name] = places
            for node in places:
                free[node] -= 1
    changes = [
        PoolChange(name, tuple(job.allocation), tuple(found.get(name, ())), f"{name} gets its minimum.")
        for name, job in jobs.items()
        if list(job.allocation) != found.get(name, [])
    ]
    return PoolDecision(found, changes)
