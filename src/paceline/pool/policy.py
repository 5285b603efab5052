"""Which run gets which devices now: a pure function of what is known of runs and nodes.

First come the runs that get their minimum (`admission`): all of them where there is room. Then each run has a weight
(`weights`): how many runs wait for it. Then sizes are chosen so that the sum of weight times pace is largest, what
moving costs included (`sizes`). At last replicas get nodes (`packing`). docs/explanation/pool.md has the reasons.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from paceline.pool.admission import admitted, longest_wait_s
from paceline.pool.facts import PoolJob, PoolTerms, check_nodes
from paceline.pool.packing import place
from paceline.pool.reasons import change_text, ranks, waiting_text
from paceline.pool.sizes import NodeCounts, choose_sizes, deadline_sizes, sizes_of, worth
from paceline.pool.weights import weights

__all__ = ["PoolChange", "PoolDecision", "PoolJob", "PoolTerms", "allocate", "decide", "longest_wait_s"]


@dataclasses.dataclass(frozen=True, slots=True)
class PoolChange:
    """What changes for one run, and why: one sentence."""

    job: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PoolDecision:
    """The node of each replica of each run, what that changes, and why runs wait: a sentence for each.

    A run without an entry in `allocations` has nothing now.
    """

    allocations: Mapping[str, list[str]]
    changes: Sequence[PoolChange]
    waiting: Mapping[str, str]


def allocate(
    jobs: Mapping[str, PoolJob], nodes: Mapping[str, int], now: float, terms: PoolTerms | None = None
) -> dict[str, list[str]]:
    """Return the node of each replica of each run: `{"cifar-3": ["a", "a", "b"]}`.

    `nodes` has the devices of each node; `now` is the time on the clock of deadlines. A run that is not in the result
    gets nothing now. An allocation that stays is returned as it was. The same facts give the same result, whatever
    their order. PlanError for facts that cannot be.

    :raises PlanError: a node has a negative number of devices.
    """
    return dict(decide(jobs, nodes, now, terms).allocations)


def decide(
    jobs: Mapping[str, PoolJob], nodes: Mapping[str, int], now: float, terms: PoolTerms | None = None
) -> PoolDecision:
    """Return what `allocate` does, with one sentence for each change and for each run that waits.

    :raises PlanError: a node has a negative number of devices.
    """
    terms = terms or PoolTerms()
    check_nodes(nodes)
    counts = NodeCounts(nodes)
    importance = weights(jobs)
    present = _without_lost_devices(jobs, nodes, importance)
    chosen = admitted(present, importance, counts.total, now, terms)
    found = _allocations({name: present[name] for name in sorted(chosen)}, nodes, counts, now, terms, importance)
    return PoolDecision(found, _changes(jobs, found, importance), _waiting(jobs, found, counts.total, terms))


def _without_lost_devices(
    jobs: Mapping[str, PoolJob], nodes: Mapping[str, int], importance: Mapping[str, float]
) -> dict[str, PoolJob]:
    """Return the runs; one whose devices are gone, or are claimed by a run that counts more, has none."""
    free = Counter(dict(nodes))
    found: dict[str, PoolJob] = {}
    for name in sorted(jobs, key=lambda name: (-importance[name], name)):
        job, held = jobs[name], Counter(jobs[name].allocation)
        if all(count <= free[node] for node, count in held.items()):
            free.subtract(held)
            found[name] = job
        else:
            found[name] = dataclasses.replace(job, allocation=(), waiting_s=job.waiting_s or 0.0)
    return found


def _allocations(
    running: Mapping[str, PoolJob],
    nodes: Mapping[str, int],
    counts: NodeCounts,
    now: float,
    terms: PoolTerms,
    importance: Mapping[str, float],
) -> dict[str, list[str]]:
    least = {name: job.fewest for name, job in running.items()} | deadline_sizes(running, counts, now)
    sizes, price = choose_sizes(running, importance, counts, terms, least)
    choices = {
        name: [sizes[name], *(size for size in sizes_of(job, counts) if least[name] <= size < sizes[name])]
        for name, job in running.items()
    }

    def gain(name: str, num_nodes: int, replicas: int) -> float:
        return worth(running[name], importance[name], num_nodes, replicas, terms) - price * replicas

    return place(choices, {name: job.allocation for name, job in running.items()}, nodes, gain)


def _changes(
    jobs: Mapping[str, PoolJob], found: Mapping[str, Sequence[str]], importance: Mapping[str, float]
) -> list[PoolChange]:
    """Return the changes in the order of names."""
    rank = ranks(importance)
    changes: list[PoolChange] = []
    for name in sorted(jobs):
        before, after = tuple(jobs[name].allocation), tuple(found.get(name, ()))
        if before != after:
            text = change_text(name, jobs[name], after, rank=rank[name], runs=len(jobs))
            changes.append(PoolChange(name, before, after, text))
    return changes


def _waiting(
    jobs: Mapping[str, PoolJob], found: Mapping[str, Sequence[str]], devices: int, terms: PoolTerms
) -> dict[str, str]:
    bound_s = longest_wait_s(jobs, terms)
    return {
        name: waiting_text(name, jobs[name], devices=devices, bound_s=bound_s)
        for name in sorted(jobs)
        if name not in found
    }
