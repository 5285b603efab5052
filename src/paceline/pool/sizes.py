"""How many replicas each run gets: the sizes that are worth most together, moving included."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Mapping, Sequence

from paceline.pool.facts import PoolJob, PoolTerms

__all__ = ["SizeChoice", "choose_sizes", "sizes_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class SizeChoice:
    """A size and what it is worth: weighted pace, less what moving costs."""

    replicas: int
    value: float


class NodeCounts:
    """The fewest nodes that hold so many replicas."""

    def __init__(self, nodes: Mapping[str, int]) -> None:
        self.sums = list(itertools.accumulate(sorted(nodes.values(), reverse=True)))
        self.largest = max(nodes.values(), default=0)
        self.total = sum(nodes.values())

    def fewest(self, replicas: int) -> int:
        for at, devices in enumerate(self.sums):
            if devices >= replicas:
                return at + 1
        return len(self.sums)


def sizes_of(job: PoolJob, counts: NodeCounts) -> list[int]:
    """Return the sizes worth a look: powers of two in a node, then whole nodes in steps of about a quarter."""
    least, most = job.fewest, min(job.max_replicas, counts.total)
    found = {least, most, len(job.allocation)}
    size = 1
    while size < counts.largest:
        found.add(size)
        size *= 2
    found.add(3)
    whole = 1
    while whole * counts.largest <= most and counts.largest:
        found.add(whole * counts.largest)
        whole = max(whole + 1, int(whole * 1.25))
    return sorted(size for size in found if least <= size <= most)


def horizon_s(job: PoolJob, terms: PoolTerms) -> float:
    """Return for how long the next allocation lasts: as long as those before it, in the mean."""
    return max(terms.interval_s, job.age / (job.restarts + 1))


def value_of(job: PoolJob, weight: float, nodes: int, replicas: int, stays: bool, terms: PoolTerms) -> float:
    pace = job.speedup(nodes, replicas)
    share = 0.0 if stays else min(0.9, job.moving_s / horizon_s(job, terms))
    return weight * pace * (1.0 - share)


def choose_sizes(
    jobs: Mapping[str, PoolJob], weights: Mapping[str, float], counts: NodeCounts, terms: PoolTerms
) -> tuple[dict[str, int], float]:
    """Return sizes, and the price of a device: what the last one that was given out brings."""
    found = {name: job.fewest for name, job in jobs.items()}
    free = counts.total - sum(found.values())
    queue: list[tuple[float, str, int, list[SizeChoice]]] = []
    for name, job in jobs.items():
        hull = _hull(_choices(job, weights[name], counts, terms))
        if len(hull) > 1:
            heapq.heappush(queue, (-_slope(hull, 0), name, 0, hull))
    price = 0.0
    while queue and free > 0:
        slope, name, at, hull = heapq.heappop(queue)
        more = hull[at + 1].replicas - hull[at].replicas
        if more > free:
            continue
        free -= more
        price = -slope
        found[name] = hull[at + 1].replicas
        if at + 2 < len(hull):
            heapq.heappush(queue, (-_slope(hull, at + 1), name, at + 1, hull))
    return found, price if free <= 0 else 0.0


def _choices(job: PoolJob, weight: float, counts: NodeCounts, terms: PoolTerms) -> list[SizeChoice]:
    held = len(job.allocation)
    choices: list[SizeChoice] = []
    for size in sizes_of(job, counts):
        nodes = len(set(job.allocation)) if size == held else counts.fewest(size)
        choices.append(SizeChoice(size, value_of(job, weight, nodes, size, size == held, terms)))
    return choices


def _hull(choices: Sequence[SizeChoice]) -> list[SizeChoice]:
    """Return the choices on the upper concave hull, as far as it rises."""
    hull: list[SizeChoice] = []
    for one in choices:
        if hull and one.value <= hull[-1].value:
            continue
        while len(hull) > 1 and _rise(hull[-1], one) >= _rise(hull[-2], hull[-1]):
            hull.pop()
        hull.append(one)
    return hull


def _rise(first: SizeChoice, second: SizeChoice) -> float:
    return (second.value - first.value) / (second.replicas - first.replicas)


def _slope(hull: Sequence[SizeChoice], at: int) -> float:
    return _rise(hull[at], hull[at + 1])
