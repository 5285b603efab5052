"""How many replicas each run gets: the sizes that are worth most together, what moving costs included.

A size is worth the weight of the run times its pace there. Devices go, one step after the other, to the run whose next
step is worth most for a device. Only steps on the upper hull of a run's curve count, so a size that is slow (half a
node more, say) is passed over on the way to a faster one.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections.abc import Mapping, Sequence

from paceline.pool.facts import PoolJob, PoolTerms

__all__ = ["NodeCounts", "SizeChoice", "choose_sizes", "deadline_sizes", "sizes_of", "worth"]

HORIZON_MOVES = 10.0  # a change has to pay within so many times its stand-still: a pace that rises by 11 % does
# A run that says what it has left is moved where that pays within this part of it, at most so many stand-stills.
HORIZON_PART, HORIZON_MOST_MOVES = 0.3, 20.0
BELOW = 1 - 1e-6  # of the last step's worth: with that price the step itself is still taken
PART_GAIN = 1.5  # a run takes a part of a step that does not fit where it is then worth so many times as much
TINY_S = 1e-9  # of a run that has nothing left and moves in no time
STEP = 1.25  # between two numbers of nodes that are looked at


@dataclasses.dataclass(frozen=True, slots=True)
class SizeChoice:
    """A size, and what it is worth: weighted pace, less what moving costs."""

    replicas: int
    value: float


class NodeCounts:
    """The devices of a pool, and the fewest nodes that hold so many replicas."""

    def __init__(self, nodes: Mapping[str, int]) -> None:
        self._sums = list(itertools.accumulate(sorted(nodes.values(), reverse=True)))
        self.largest = max(nodes.values(), default=0)
        self.total = sum(nodes.values())

    def fewest(self, replicas: int) -> int:
        """Return the fewest nodes that hold so many replicas."""
        return min(bisect.bisect_left(self._sums, replicas) + 1, len(self._sums))


def sizes_of(job: PoolJob, counts: NodeCounts) -> list[int]:
    """Return the sizes worth a look: one to four, powers of two in a node, whole nodes in steps of about a quarter.

    They number about four times the logarithm of the pool, so a decision does not look at each size.
    """
    most = min(job.max_replicas, counts.total)
    found = {job.fewest, most, len(job.allocation), 3}
    found.update(2**power for power in range(counts.largest.bit_length()))
    whole = 1
    while 0 < whole * counts.largest <= most:
        found.add(whole * counts.largest)
        whole = max(whole + 1, int(whole * STEP))
    return sorted(size for size in found if job.fewest <= size <= most)


def worth(job: PoolJob, weight: float, nodes: int, replicas: int, terms: PoolTerms) -> float:
    """Return the weighted pace of a run that is moved to so many nodes, over the time in which moving has to pay."""
    pace = job.pace(nodes, replicas)
    return weight * pace * max(0.0, 1 - job.moving_s / _horizon_s(job, pace, terms))


def _horizon_s(job: PoolJob, pace: float, terms: PoolTerms) -> float:
    least_s = 2 * terms.interval_s
    if job.remaining is None or not job.allocation or pace <= 0:  # a run that starts stands still with any size
        return max(HORIZON_MOVES * job.moving_s, least_s)
    left_s = job.moving_s + HORIZON_PART * job.remaining / pace
    return max(TINY_S, min(left_s, max(HORIZON_MOST_MOVES * job.moving_s, least_s)))


def deadline_sizes(jobs: Mapping[str, PoolJob], counts: NodeCounts, now: float) -> dict[str, int]:
    """Return the sizes that runs need to meet their deadlines, the earliest deadline first, as far as devices go.

    Where no size is fast enough, it is the fastest one. A deadline that has passed asks for nothing.
    """
    free = counts.total - sum(job.fewest for job in jobs.values())
    found: dict[str, int] = {}
    due = [(job.deadline, name) for name, job in jobs.items() if job.deadline is not None and job.deadline > now]
    for deadline, name in sorted(due):
        needed = _needed(jobs[name], counts, deadline - now)
        if needed - jobs[name].fewest <= free:
            found[name] = needed
            free -= needed - jobs[name].fewest
    return found


def choose_sizes(
    jobs: Mapping[str, PoolJob],
    weights: Mapping[str, float],
    counts: NodeCounts,
    terms: PoolTerms,
    least: Mapping[str, int],
) -> tuple[dict[str, int], float]:
    """Return a size for each run, at least that in `least`, and the price of a device.

    The price is what the last device that was given out adds, or 0 where some are left. Speed-ups are asked for about
    `sizes_of` times the number of runs; the rest takes n log n steps.
    """
    found = dict(least)
    free = counts.total - sum(found.values())
    curves = {
        name: [one for one in _choices(job, weights[name], counts, terms) if one.replicas >= least[name]]
        for name, job in jobs.items()
    }
    hulls = {name: _hull(choices) for name, choices in curves.items()}
    queue = [(-_rise(hull[0], hull[1]), name, 1) for name, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(queue)
    price = 0.0
    while queue and free > 0:
        _, name, at = heapq.heappop(queue)
        hull = hulls[name]
        step = hull[at]
        if step.replicas - hull[at - 1].replicas > free:
            step = _part_of_step(curves[name], hull[at - 1], free)
        elif at + 1 < len(hull):
            heapq.heappush(queue, (-_rise(step, hull[at + 1]), name, at + 1))
        if step.replicas > found[name]:
            free -= step.replicas - found[name]
            price = _rise(hull[at - 1], step)
            found[name] = step.replicas
    return found, price * BELOW if free == 0 else 0.0


def _needed(job: PoolJob, counts: NodeCounts, seconds: float) -> int:
    sizes = sizes_of(job, counts)
    paces = {size: job.pace(counts.fewest(size), size) for size in sizes}
    for size in sizes:
        moving = 0.0 if size == len(job.allocation) else job.moving_s
        if (job.remaining or 0.0) <= paces[size] * (seconds - moving):
            return size
    return max(sizes, key=lambda size: (paces[size], -size))


def _choices(job: PoolJob, weight: float, counts: NodeCounts, terms: PoolTerms) -> list[SizeChoice]:
    choices: list[SizeChoice] = []
    for size in sizes_of(job, counts):
        if size == len(job.allocation):
            value = weight * job.pace(len(set(job.allocation)), size)
        else:
            value = worth(job, weight, counts.fewest(size), size, terms)
        choices.append(SizeChoice(size, value))
    return choices


def _part_of_step(curve: Sequence[SizeChoice], now: SizeChoice, free: int) -> SizeChoice:
    """Return the choice that is worth most with so many devices more, where it is worth much more; else `now`.

    The run moves once more when the rest of its step comes free, so a small gain would not last.
    """
    fitting = [one for one in curve if now.replicas < one.replicas <= now.replicas + free]
    best = max(fitting, key=lambda one: (one.value, -one.replicas), default=now)
    return best if best.value >= PART_GAIN * now.value else now


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
    """Return what each device of a step is worth."""
    return (second.value - first.value) / (second.replicas - first.replicas)
