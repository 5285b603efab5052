"""Which run gets which devices now: a pure function of what is known of runs and nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from paceline.pool.admission import admitted
from paceline.pool.facts import PoolJob, PoolTerms, check_nodes
from paceline.pool.packing import place
from paceline.pool.sizes import NodeCounts, choose_sizes, sizes_of, value_of
from paceline.pool.weights import weights

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
    terms = terms or PoolTerms()
    check_nodes(nodes)
    counts = NodeCounts(nodes)
    importance = weights(jobs)
    chosen = admitted(jobs, importance, counts.total, terms)
    running = {name: jobs[name] for name in sorted(chosen)}
    sizes, price = choose_sizes(running, importance, counts, terms)
    found = _placed(running, sizes, price, importance, nodes, counts, terms)
    changes = [
        PoolChange(name, tuple(job.allocation), tuple(found.get(name, ())), f"{name} gets its minimum.")
        for name, job in jobs.items()
        if list(job.allocation) != found.get(name, [])
    ]
    return PoolDecision(found, changes)


def _placed(running, sizes, price, importance, nodes, counts, terms):
    def worth(name: str, num_nodes: int, replicas: int) -> float:
        return value_of(running[name], importance[name], num_nodes, replicas, False, terms) - price * replicas

    choices = {
        name: [sizes[name], *(size for size in sizes_of(job, counts) if size < sizes[name])]
        for name, job in running.items()
    }
    return place(choices, {name: job.allocation for name, job in running.items()}, nodes, worth)
